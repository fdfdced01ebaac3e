"""`weft.replicate` against torch's DistributedDataParallel and its own replicate, on real gloo processes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_of_torch_2_15 import PolicyOfTorch215
from torch import nn
from torch.distributed._composable import replicate as torch_replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import weft
from harness import run_ranks
from weft import errors
from weft.distributed.ddp import ReplicateModule, broadcast_state, replicate
from weft.distributed.fsdp import fully_shard

pytestmark = pytest.mark.gloo


class Net(nn.Module):
    """Tied, frozen and unused parameters, a module called twice, BatchNorm buffers, a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.twice = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        h = torch.tanh(self.twice(torch.tanh(self.twice(h)))) * self.scale
        h = self.norm(self.frozen(h).flatten(0, -2))
        return self.head(h)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 11, (4, 5), generator=generator)
    return ids, ids.roll(1, 1).flatten()


def train(model: nn.Module, rank: int, accumulate: int = 1, steps: int = 5) -> tuple[list[float], dict[str, Any]]:
    """Train; return the losses and the final state (weights, buffers, whether each gradient is None)."""
    # Not Adam: it divides by the size of the gradient, and makes a last bit of a tiny one a large step.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            ids, labels = batch(rank, step * accumulate + micro)
            last = micro == accumulate - 1
            with model.no_sync() if not last else torch.enable_grad():  # type: ignore[operator]
                loss = nn.functional.cross_entropy(model(ids).float(), labels) / accumulate
                loss.backward()
            losses.append(loss.item())
        grads = {name: p.grad is None for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    state: dict[str, Any] = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    return losses, {"state": state, "grads": {k.removeprefix("module."): v for k, v in grads.items()}}


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest relative difference of two training results; names must agree."""
    assert a["grads"] == b["grads"]
    assert a["state"].keys() == b["state"].keys()
    worst = 0.0
    for name, x in a["state"].items():
        y = b["state"][name]
        assert x.dtype == y.dtype
        worst = max(worst, ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-12)).item())
    return worst


def seeded(rank: int) -> Net:
    torch.manual_seed(rank)  # each rank starts with other weights: the wrap must make them equal
    net = Net()
    net.get_buffer("norm.running_mean").fill_(float(rank))
    return net


def against_ddp(rank: int, world: int, accumulate: int) -> tuple[float, float, bool]:
    ours = replicate(seeded(rank))
    theirs = DistributedDataParallel(seeded(rank), find_unused_parameters=True)
    our_losses, ours_after = train(ours, rank, accumulate)
    their_losses, theirs_after = train(theirs, rank, accumulate)
    off = max(abs(a - b) / abs(b) for a, b in zip(our_losses, their_losses, strict=True))
    return off, distance(ours_after, theirs_after), ours_after["grads"]["unused.weight"]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_equals_distributed_data_parallel(world: int, accumulate: int) -> None:
    for losses, weights, unused_is_none in run_ranks(against_ddp, world, accumulate):
        assert unused_is_none
        # Two addends have one order. With four, DDP's ring starts elsewhere in a bucket than in a parameter.
        assert losses == 0 if world == 2 else losses < 1e-6
        assert weights == 0 if world == 2 else weights < 1e-6


class Packed(nn.Module):
    """An LSTM over sequences of the lengths given: these decide in which order its gradients are accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.lstm = nn.LSTM(4, 5, 2)
        self.after = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.before(x), lengths, enforce_sorted=False)
        return self.after(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0])


def packed_body(rank: int, world: int) -> tuple[list[list[str]], bool, bool]:
    """In which order gradients were accumulated at each step, and whether `replicate`, eager and compiled, gives the
    weights that DDP gives."""
    orders: list[list[str]] = []

    def trained(wrap: Callable[[nn.Module], Any], compiled: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(0)
        plain = Packed()
        if not compiled:
            for name, param in plain.named_parameters():
                param.register_post_accumulate_grad_hook(lambda _, name=name: orders[-1].append(name))
        model = wrap(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, lengths: torch.Tensor) -> None:
            model(x, lengths).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = weft.compile(step) if compiled else step
        for at in range(4):
            orders.append([])
            generator = torch.Generator().manual_seed(10 * at + rank)
            lengths = torch.tensor([[4, 4, 4], [2, 4, 3]][(rank + at) % 2])
            run(torch.randn(4, 3, 4, generator=generator), lengths)
        return [param.detach() for param in plain.parameters()]

    wanted = trained(DistributedDataParallel)
    eager, compiled = trained(replicate), trained(replicate, compiled=True)
    return orders[4:8], all(map(torch.equal, eager, wanted)), all(map(torch.equal, compiled, wanted))


def test_ranks_whose_gradients_come_in_different_orders() -> None:
    (first, *same), (second, *alike) = run_ranks(packed_body, 2)
    assert [same, alike] == [[True, True], [True, True]]
    for one, other in zip(first, second, strict=True):
        assert sorted(one) == sorted(other)
        # The backward of torch 2.11's LSTM has one order for all lengths.
        assert one != other or torch.__version__.startswith("2.11")


class Crossed(nn.Module):
    """Two layers whose gradients are accumulated in the order of ``turned``, by any torch."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned, self.left, self.right = turned, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.left, self.right)
        one, other = [layer(x).square() for layer in (reversed(layers) if self.turned else layers)]
        return one + other if self.turned else other + one


def crossed_body(rank: int, world: int) -> tuple[list[str], bool]:
    order: list[str] = []

    def trained(wrap: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        plain = Crossed(turned=rank == 1)
        for name, param in plain.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        model = wrap(plain)  # DDP reduces as long as it is there
        model(torch.full((3, 4), rank + 1.0)).sum().backward()
        return [param.grad for param in plain.parameters() if param.grad is not None]

    wanted = trained(DistributedDataParallel)
    order.clear()
    return order, all(map(torch.equal, trained(replicate), wanted))


def test_ranks_whose_layers_run_in_different_orders() -> None:
    (first, same), (second, alike) = run_ranks(crossed_body, 2)
    assert (same, alike) == (True, True)
    assert first != second
    assert sorted(first) == sorted(second)


class Plain(nn.Module):
    """What torch's replicate can run too: no unused, frozen or tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.body = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7), nn.LayerNorm(7))
        self.head = nn.Linear(7, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids))).flatten(0, 1)


def against_torch_replicate(rank: int, world: int, reduce_dtype: torch.dtype | None) -> tuple[float, float]:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, torch.float32)
    torch.manual_seed(3)
    ours = Plain()
    theirs = copy.deepcopy(ours)
    mesh = init_device_mesh("cpu", (world,))
    replicate(ours, mesh=mesh, mp_policy=policy)
    torch_replicate(theirs, mesh=mesh, mp_policy=policy)
    our_losses, ours_after = train(ours, rank)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    their_losses = []
    for step in range(5):
        ids, labels = batch(rank, step)
        loss = nn.functional.cross_entropy(theirs(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        their_losses.append(loss.item())
    full = {name: p.full_tensor() for name, p in theirs.state_dict().items()}
    off = max(abs(a - b) / abs(b) for a, b in zip(our_losses, their_losses, strict=True))
    return off, distance(ours_after, {"state": full, "grads": ours_after["grads"]})


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
@pytest.mark.parametrize("world", [2, 4])
def test_mixed_precision_equals_torch_replicate(world: int, reduce_dtype: torch.dtype | None) -> None:
    # Four addends in bfloat16 are summed in an order that depends on the place in the buffer.
    limit = 0.0 if world == 2 else (1e-6 if reduce_dtype else 2e-2)
    for losses, weights in run_ranks(against_torch_replicate, world, reduce_dtype):
        assert losses <= limit
        assert weights <= limit


def reduced_as_in_torch_2_15(rank: int, world: int) -> list[float]:
    """How far the new policy is from reductions in float32, and from those in bfloat16."""
    runs = []
    new, old = PolicyOfTorch215(torch.bfloat16), MixedPrecisionPolicy(torch.bfloat16)
    for policy in (new, MixedPrecisionPolicy(torch.bfloat16, torch.float32), old):
        torch.manual_seed(3)
        model = replicate(Plain(), mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
        runs.append(train(model, rank)[1])
    return [distance(each, runs[0]) for each in runs[1:]]


@pytest.mark.skipif(hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"), reason="all policies are new ones")
def test_a_policy_of_torch_2_15_reduces_in_the_dtype_of_gradients() -> None:
    for float32, bfloat16 in run_ranks(reduced_as_in_torch_2_15, 2):
        assert float32 == 0
        assert bfloat16 > 0


def broadcast_at_wrap(rank: int, world: int) -> dict[str, torch.Tensor]:
    net = seeded(rank)
    net.head.weight.data = net.head.weight.data.t().contiguous().t()
    before = dict(net.named_parameters())
    replicate(net, ignored_params={net.get_parameter("unused.weight")})
    assert type(net).__name__ == "ReplicateNet"
    assert isinstance(net, Net)
    assert isinstance(net, ReplicateModule)
    assert all(before[name] is p and type(p) is nn.Parameter for name, p in net.named_parameters())
    return {name: t.clone() for name, t in net.state_dict().items()}


def test_parameters_and_buffers_are_those_of_rank_zero() -> None:
    results = run_ranks(broadcast_at_wrap, 2)
    expected = seeded(0).state_dict()
    for rank, state in enumerate(results):
        for name, tensor in state.items():
            equal = torch.equal(tensor, expected[name])
            assert equal == (rank == 0 or name != "unused.weight"), name


def averaged(rank: int, world: int, wrap: Callable[[nn.Module], Any], **policy: Any) -> list[torch.Tensor]:
    """Gradients of one backward of `Plain` after `wrap` changed how it runs."""
    torch.manual_seed(0)
    model = Plain()
    wrap(model)
    replicate(model, mp_policy=MixedPrecisionPolicy(**policy))
    ids, labels = batch(rank, 0)
    nn.functional.cross_entropy(model(ids).float(), labels).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def checkpointed(model: nn.Module, reentrant: bool) -> None:
    body = model.body
    assert isinstance(body, nn.Sequential)
    run = body.forward
    body.forward = lambda x: checkpoint(run, x, use_reentrant=reentrant)  # type: ignore[method-assign]


def checkpoint_body(rank: int, world: int, reentrant: bool, param_dtype: torch.dtype | None) -> bool:
    plain = averaged(rank, world, lambda m: None, param_dtype=param_dtype)
    again = averaged(rank, world, lambda m: checkpointed(m, reentrant), param_dtype=param_dtype)
    return len(plain) == 9 and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, param_dtype: torch.dtype | None) -> None:
    assert run_ranks(checkpoint_body, 2, reentrant, param_dtype) == [True, True]


def autocast_body(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    ours, theirs = Plain(), Plain()
    theirs.load_state_dict(ours.state_dict())
    replicate(ours)
    reference = DistributedDataParallel(theirs)
    ids, labels = batch(rank, 0)
    for model in (ours, reference):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(ids), labels)
        loss.backward()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_autocast_equals_ddp() -> None:
    assert run_ranks(autocast_body, 2) == [True, True]


def reentrant_twice_body(rank: int, world: int) -> list[torch.Tensor]:
    """One parameter gets gradients from the outer backward and from a backward inside it."""
    torch.manual_seed(0)
    linear = replicate(nn.Linear(3, 3))
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    (linear(checkpoint(linear, x, use_reentrant=True)).square().sum() + linear(x).sum()).backward()
    return [p.grad.clone() for p in linear.parameters() if p.grad is not None]


def test_backward_within_backward_averages_the_whole_gradient() -> None:
    results = run_ranks(reentrant_twice_body, 2)
    torch.manual_seed(0)
    linear = nn.Linear(3, 3).double()
    linear.load_state_dict({k: v.double() for k, v in nn_state(nn.Linear(3, 3)).items()})
    for rank in range(2):
        x = torch.full((2, 3), float(rank + 1), dtype=torch.double)
        (linear(linear(x)).square().sum() + linear(x).sum()).div(2).backward()
    expected = [p.grad for p in linear.parameters()]
    for grads in results:
        for grad, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad.double(), want, rtol=1e-6, atol=1e-6)


def nn_state(module: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    for child in [module]:
        child.reset_parameters()  # type: ignore[operator]
    return dict(module.state_dict())


def hooks_body(rank: int, world: int) -> tuple[float, float]:
    linear = nn.Linear(1, 1, bias=False)
    seen: list[float] = []
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    replicate(linear)
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    linear(torch.full((1, 1), float(rank))).sum().backward()
    return seen[0], seen[1]


def test_a_hook_from_before_sees_the_local_gradient_and_one_from_after_the_average() -> None:
    assert run_ranks(hooks_body, 2) == [(0.0, 0.5), (1.0, 0.5)]


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def collectives_body(rank: int, world: int) -> tuple[list[str], list[str]]:
    model: Any = replicate(Plain())
    ids, labels = batch(rank, 0)
    with Log() as log:
        nn.functional.cross_entropy(model(ids), labels).backward()
    with Log() as quiet, model.no_sync():
        nn.functional.cross_entropy(model(ids), labels).backward()
    return [op for op in log.ops if "c10d" in op], [op for op in quiet.ops if "c10d" in op]


def test_one_all_reduce_a_parameter_and_all_waits_after_the_last_of_them() -> None:
    parameters = len(list(Plain().parameters()))
    for logged, quiet in run_ranks(collectives_body, 2):
        assert logged == (
            ["_c10d_functional.all_reduce.default"] * parameters + ["_c10d_functional.wait_tensor.default"] * parameters
        )
        assert quiet == []


def meta_body(rank: int, world: int) -> str:
    with torch.device("meta"):
        model = Plain()
    replicate(model)
    with pytest.raises(errors.NotMaterialized) as caught:
        model(batch(rank, 0)[0])
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for param in model.parameters():
        nn.init.normal_(param)
    broadcast_state(model)
    ids, labels = batch(rank, 0)
    nn.functional.cross_entropy(model(ids), labels).backward()
    for param in model.parameters():
        for tensor in (param.detach(), param.grad):
            assert tensor is not None
            others = [torch.empty_like(tensor) for _ in range(world)]
            dist.all_gather(others, tensor)
            assert torch.equal(others[0], others[1])
    return str(caught.value)


def test_a_module_from_the_meta_device_is_broadcast_once_it_has_memory() -> None:
    for said in run_ranks(meta_body, 2):
        assert "embed.weight is still on the meta device" in said
        assert "weft.materialize" in said


class Elsewhere(nn.Module):
    """Uses parameters of modules whose forward it does not call; an RNN keeps a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        x = nn.functional.linear(x, self.owner.weight) * scale
        x = self.rnn(self.attention(x, x, x, need_weights=False)[0])[0]
        return {"out": x, "dtype_in": scale}


def cast_body(rank: int, world: int, cast_inputs: bool) -> tuple[torch.dtype, torch.dtype, bool]:
    model = Elsewhere()
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=cast_inputs)
    replicate(model, mp_policy=policy)
    seen: list[torch.dtype] = []
    model.rnn.register_forward_hook(lambda m, a, o: seen.append(o[0].dtype))
    x = torch.randn(2, 3, 4, dtype=torch.float32 if cast_inputs else torch.bfloat16)
    out = model(x, scale=torch.ones((), dtype=x.dtype))
    out["out"].sum().backward()
    back = all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    used = [p for name, p in model.named_parameters() if name != "owner.bias"]
    back = back and all(p.grad is not None and p.grad.dtype == torch.float32 for p in used)
    with pytest.raises(TypeError):
        model(x)  # scale is missing: forward raises, and the parameters must be back
    back = back and all(
        type(p) is nn.Parameter for m in model.modules() for p in m._parameters.values() if p is not None
    )
    return seen[0], out["out"].dtype, back


@pytest.mark.parametrize("cast_inputs", [True, False])
def test_casts_reach_parameters_wherever_they_are_used(cast_inputs: bool) -> None:
    expected = (torch.bfloat16, torch.float64, True)
    assert run_ranks(cast_body, 2, cast_inputs) == [expected, expected]


def nested_body(rank: int, world: int) -> list[tuple[str, bool]]:
    model = Plain()
    replicate(model.body)
    replicate(model)
    assert type(model.body[:2]) is nn.Sequential
    assert isinstance(model.body, ReplicateModule)
    model.body.set_requires_gradient_sync(False)
    ids, labels = batch(rank, 0)
    nn.functional.cross_entropy(model(ids), labels).backward()
    same = []
    for name, param in model.named_parameters():
        others = [torch.empty_like(param) for _ in range(world)]
        dist.all_gather(others, param.grad)
        same.append((name, torch.equal(others[0], others[1])))
    return same


def test_a_module_replicated_before_keeps_its_own_settings() -> None:
    for same in run_ranks(nested_body, 2):
        assert dict(same) == {name: not name.startswith("body") for name, _ in same}


def moved_body(rank: int, world: int) -> float:
    wrapped = replicate(nn.Linear(4, 4, bias=False))
    head = nn.Linear(4, 4, bias=False)
    head.weight = wrapped.weight
    del wrapped
    gc.collect()
    head(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert head.weight.grad is not None
    return head.weight.grad[0, 0].item()


def test_a_parameter_is_averaged_after_its_module_is_gone() -> None:
    assert run_ranks(moved_body, 2) == [1.5, 1.5]


def around_sharded_body(rank: int, world: int) -> list[str]:
    """A replicated model with a sharded part: what differs from torch's own two wrappers after three steps."""

    def trained(shard: Callable[..., Any], wrap: Callable[..., Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), nn.Linear(5, 2))
        for part in (model[1][0], model[1]):  # type: ignore[index]
            shard(part)
        wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for step in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sharded = {name for name, param in model.named_parameters() if isinstance(param, DTensor)}
        assert sharded == {"1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"}, sharded
        return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}

    ours, theirs = trained(fully_shard, replicate), trained(torch_fully_shard, torch_replicate_by_ddp)
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


def test_a_sharded_module_inside_stays_sharded() -> None:
    assert run_ranks(around_sharded_body, 2) == [[], []]


def mistakes_body(rank: int, world: int) -> list[str]:
    said = []

    def expect(kind: type[Exception], act: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            act()
        said.append(str(caught.value))

    wrapped = replicate(nn.Linear(2, 2))
    expect(errors.AlreadyWrapped, lambda: replicate(wrapped))
    expect(errors.AlreadyWrapped, lambda: replicate(fully_shard(nn.Linear(2, 2))))
    expect(errors.CannotCopyWrapped, lambda: copy.deepcopy(wrapped))
    expect(ValueError, lambda: replicate(nn.ModuleList([nn.Linear(1, 1)])))
    expect(errors.InvalidMesh, lambda: replicate(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (world, 1))))
    embedding = replicate(nn.Embedding(4, 2, sparse=True))
    expect(errors.UnsupportedParameter, lambda: embedding(torch.tensor([1])).sum().backward())
    lost = nn.Linear(2, 2)
    lost.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    replicate(lost)
    expect(errors.GradientLost, lambda: lost(torch.ones(1, 2)).sum().backward())
    return said


def gradients_of_gradients_body(rank: int, world: int) -> list[torch.Tensor]:
    """The gradient of a penalty on gradients, by a replicated module and by the same one alone."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    module = replicate(copy.deepcopy(alone))
    x = torch.linspace(-1, 1, 6).view(2, 3) + rank
    with pytest.raises(errors.GradientWithGraph, match=r"parameter .*weight|parameter .*bias"):
        module(x).sum().backward(create_graph=True)
    module.zero_grad()
    found: list[torch.Tensor] = []
    for each in (module, alone):
        with module.no_sync():
            each(x).sum().backward(create_graph=True)
            gradients = [parameter.grad for parameter in each.parameters() if parameter.grad is not None]
            penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
            found += torch.autograd.grad(penalty, list(each.parameters())[:2])
        each.zero_grad()
    return found


def test_an_average_that_would_be_differentiated_is_refused() -> None:
    for first, second, *expected in run_ranks(gradients_of_gradients_body, 2):
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])


def test_mistakes_have_names() -> None:
    for said in run_ranks(mistakes_body, 2):
        assert "bias" in said[-1]
        assert "ignored_params" in said[-2]


def mesh_dims_body(rank: int, world: int) -> list[float]:
    from types import SimpleNamespace

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(1, 1, bias=False)
    replicate(linear, mesh=mesh, dp_mesh_dims=SimpleNamespace(replicate="dp", shard=None))
    linear(torch.full((1, 1), float(rank))).sum().backward()
    both = nn.Linear(1, 1, bias=False)
    replicate(both, mesh=mesh, dp_mesh_dims=SimpleNamespace(replicate=("dp", "tp"), shard=None))
    both(torch.full((1, 1), float(rank))).sum().backward()
    return [p.grad.item() for p in (linear.weight, both.weight) if p.grad is not None]


def test_averages_over_the_named_mesh_dimensions() -> None:
    assert run_ranks(mesh_dims_body, 4) == [[1.0, 1.5], [2.0, 1.5], [1.0, 1.5], [2.0, 1.5]]


def test_an_evaluation_between_steps_makes_no_second_capture_where_there_are_no_buffers() -> None:
    with weft.fake_world(2, target_device="cpu"):
        model = replicate(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), mesh=init_device_mesh("cpu", (2,)))
        step = weft.compile(lambda x: (model(x).sum().backward(), model.zero_grad())[0])
        for _ in range(2):
            model.train()
            step(torch.ones(2, 4))
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
        assert step.captures == ["first call"]
