"""fully_shard as such: what it accepts beyond torch's, what it refuses, and where the user's hooks run."""

from __future__ import annotations

import copy
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import weft
from harness import run_ranks
from weft import errors
from weft.distributed import settings_without_effect
from weft.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard, share_comm_ctx
from weft.distributed.fsdp.saved import describe
from weft.distributed.fsdp.state import state_of
from weft.torch_adapter import local_tensor

# ---- against one process that holds everything


class Odd(nn.Module):
    """What torch's fully_shard refuses: a scalar, several dtypes, weights tied across wrapped modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 9).to(torch.float64)
        self.table = nn.Parameter(torch.arange(6) * 3, requires_grad=False)
        self.lstm = nn.LSTM(9, 6)
        self.head = nn.Sequential(nn.Linear(6, 11, bias=False))
        self.head[0].weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.embed(ids).double() + self.table).float()
        return self.head(self.lstm(x)[0]) * self.temperature


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9, foreach=False)
    losses = []
    for ids in batches:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.dtype == torch.float32], 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def wrap_odd(model: Any, mesh: Any, how: str) -> None:
    placement = (lambda p: Shard(p.ndim - 1)) if how == "last dimension" else None
    for part in (model.embed, model.head):
        fully_shard(part, mesh=mesh, shard_placement_fn=placement, reshard_after_forward=how != "kept")
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    assert model.head[0].weight is model.embed.weight


def odd_body(rank: int, world: int, how: str) -> None:
    """The same batch on every rank, so that the mean gradient is that of one process."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    reference, model = Odd(), None
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (world,))
    wrap_odd(model, mesh, how)
    batches = [torch.randint(0, 11, (5, 3)) for _ in range(4)]
    torch.testing.assert_close(train(model, batches), train(reference, batches), rtol=1e-6, atol=1e-7)
    for (name, want), (_, got) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(got, DTensor)
        assert got.shape == want.shape
        torch.testing.assert_close(
            got.full_tensor(), want, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["first dimension", "last dimension", "kept"])
def test_what_torch_refuses_trains_as_in_one_process(how: str) -> None:
    run_ranks(odd_body, 4 if how == "last dimension" else 2, how)


def hooks_body(rank: int, world: int) -> list[Any]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    fired: list[Any] = []
    weight = model[0].weight
    weight.register_hook(lambda grad: fired.append(("tensor", isinstance(grad, DTensor))) or grad * 2)
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(("accumulated", p is weight)))
    model[0].register_full_backward_hook(lambda *_: fired.append(("module", None)))
    model[0].register_forward_hook(lambda m, a, out: fired.append(("forward", type(m.weight).__name__)))
    model(torch.ones(2, 3)).sum().backward()
    doubled = model[0].weight.grad.full_tensor()
    model.zero_grad()
    weight._backward_hooks.clear()
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(doubled, 2 * model[0].weight.grad.full_tensor())
    return fired


@pytest.mark.gloo
def test_hooks_of_the_sharded_parameter_fire_once() -> None:
    for fired in run_ranks(hooks_body, 2):
        assert sorted(name for name, _ in fired) == ["accumulated"] * 2 + ["forward"] * 2 + ["module"] * 2 + ["tensor"]
        assert ("tensor", True) in fired
        assert ("accumulated", True) in fired


def unused_body(rank: int, world: int) -> None:
    """A parameter that only rank 0 uses: with zeros reduced for it, nobody waits."""
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model.set_reduce_scatter_unused_params(True)
    model.unshard()
    part = model[0](torch.ones(2, 3))
    (model[1](part) if rank == 0 else part).sum().backward()
    assert model[1].weight.grad is not None
    assert torch.equal(model[1].bias.grad.full_tensor(), torch.full((3,), 2.0 / world))


@pytest.mark.gloo
def test_zeros_are_reduced_for_unused_parameters() -> None:
    run_ranks(unused_body, 2)


def tensor_parallel_body(rank: int, world: int) -> None:
    """Parameters that are DTensors already: split over one mesh dimension by columns, then over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = nn.Linear(6, 7, bias=False)
    whole = reference.weight.detach().clone()
    for dim in (0, 1):
        module: Any = nn.Linear(6, 7, bias=False)
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)]))
        fully_shard(module, mesh=mesh["dp"])
        assert torch.equal(module.weight.full_tensor(), whole)
        module.unshard()
        assert torch.equal(module.weight.full_tensor(), whole)
        module.weight.full_tensor().square().sum().backward()
        module.reshard()
        assert module.weight.grad.placements == module.weight.placements
        torch.testing.assert_close(module.weight.grad.full_tensor(), 2 * whole)
        module.weight.grad = None
        x = distribute_tensor(torch.ones(3, 6, requires_grad=True), mesh["tp"], [Replicate()])
        module.set_reshard_after_forward(True)
        alive, out = gathered_memory(module, x)
        assert not alive
        out.full_tensor().square().sum().backward()
        want = torch.ones(3, 6).t() @ (2 * torch.ones(3, 6) @ whole.t())
        torch.testing.assert_close(module.weight.grad.full_tensor(), want.t())


@pytest.mark.gloo
def test_parameters_that_are_dtensors_already() -> None:
    run_ranks(tensor_parallel_body, 4)


def mesh_dims_body(rank: int, world: int) -> None:
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    whole = torch.randn(7, 6)
    for dims in (
        DataParallelMeshDims(shard="shard", replicate="replicate"),
        DataParallelMeshDims(shard=("replicate", "shard")),
        DataParallelMeshDims(replicate=("replicate", "shard")),
    ):
        module: Any = nn.Linear(6, 7, bias=False)
        module.weight = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Replicate()]))
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
        assert torch.equal(module.weight.full_tensor(), whole)
        x = distribute_tensor(torch.ones(2, 6), mesh, [Replicate(), Replicate()])
        out = module(x)
        torch.testing.assert_close(out.full_tensor(), torch.ones(2, 6) @ whole.T)
        out.full_tensor().sum().backward()
        torch.testing.assert_close(module.weight.grad.full_tensor(), torch.full((7, 6), 2.0))


@pytest.mark.gloo
@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch 2.11 has no DataParallelMeshDims")
def test_data_parallel_dimensions_of_a_larger_mesh() -> None:
    run_ranks(mesh_dims_body, 4)


# ---- one process, nobody to talk to


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def sharded(mesh: Any, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


@pytest.mark.fake
def test_the_class_is_of_both_kinds(mesh: Any) -> None:
    model = sharded(mesh)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[:1]) is nn.Sequential
    with pytest.raises(errors.CannotCopyWrapped):
        copy.deepcopy(model)


@pytest.mark.fake
def test_what_stands_in_the_module(mesh: Any) -> None:
    """Shards outside of forward; whole tensors inside, which pass for parameters; shards after an error."""
    model = sharded(mesh)
    seen: list[Any] = []

    def look(module: Any, args: Any) -> None:
        seen.append((type(module.weight), isinstance(module.weight, nn.Parameter), tuple(module.weight.shape)))
        if len(seen) == 2:
            raise KeyboardInterrupt

    model[0].register_forward_pre_hook(look)
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert seen[0] == (torch.Tensor, False, (5, 3))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 3))
    assert seen[1] == (torch.Tensor, True, (5, 3))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not state_of(model[0]).saving
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ones(1, requires_grad=True) * torch.ones(1, requires_grad=True)
    assert len(saved) == 2, "hooks of the broken forward are still there"
    model(torch.ones(1, 3)).sum().backward()


def gathered_memory(module: Any, inputs: torch.Tensor) -> tuple[bool, torch.Tensor]:
    """Whether the gathered weight outlived a forward whose graph is still there, and the output."""
    memory: list[Any] = []

    def note(module: Any, args: Any) -> None:
        weight = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
        memory.append(torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage()))

    handle = module.register_forward_pre_hook(note)
    out = module(inputs)
    handle.remove()
    until = time.monotonic() + 2.0  # a thread of gloo lets go of what it gathered a little later
    while not memory[0].expired() and time.monotonic() < until:
        time.sleep(0.01)
    return not memory[0].expired(), out


@pytest.mark.fake
@pytest.mark.parametrize("keep", [False, True])
def test_gathered_parameters_do_not_outlive_forward(mesh: Any, keep: bool) -> None:
    """With reshard_after_forward the graph holds recipes; without, the tensors."""
    module = fully_shard(nn.Linear(6, 7), mesh=mesh, reshard_after_forward=not keep)
    alive, out = gathered_memory(module, torch.ones(1, 6, requires_grad=True))
    assert alive is keep
    out.sum().backward()
    assert isinstance(module.weight, DTensor)


@pytest.mark.fake
def test_hooks_outside_see_what_is_not_a_parameter(mesh: Any) -> None:
    """Offloading around a sharded module still gets its activations, but not its gathered parameters."""
    model = sharded(mesh, reshard_after_forward=True)
    packed = []

    def pack(tensor: torch.Tensor) -> Any:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model[0](torch.ones(2, 3, requires_grad=True))
    assert packed == [(2, 3)]
    out.sum().backward()


@pytest.mark.fake
def test_an_update_is_never_missed(mesh: Any) -> None:
    """A gathered tensor is not used again after its shard has changed."""
    model = sharded(mesh, reshard_after_forward=False)
    with torch.no_grad():
        model[0](torch.ones(1, 3))
        before = model[0].weight
        model[0](torch.ones(1, 3))
        assert model[0].weight is before
        for param in state_of(model[0]).members:
            param.param.sharded.add_(1)
        model[0](torch.ones(1, 3))
        assert model[0].weight is not before


def not_contiguous(mesh: Any) -> None:
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(torch.ones(3, 5).t())
    fully_shard(model, mesh=mesh)


def hooked(mesh: Any) -> None:
    model = nn.Linear(3, 5)
    model.weight.register_hook(lambda grad: grad)
    fully_shard(model, mesh=mesh)


def replaced(mesh: Any) -> None:
    model = fully_shard(nn.Linear(3, 5), mesh=mesh)
    model.weight = nn.Parameter(torch.ones(5, 3))
    model(torch.ones(1, 3))


def on_meta(mesh: Any) -> None:
    model = fully_shard(nn.Linear(3, 5, device="meta"), mesh=mesh)
    model(torch.ones(1, 3))


@pytest.mark.fake
@pytest.mark.parametrize(
    ("mistake", "error", "said"),
    [
        (not_contiguous, errors.UnshardableParameter, "weight: it is not contiguous"),
        (hooked, errors.HookBeforeSharding, "after fully_shard"),
        (replaced, errors.ParameterReplaced, "sharded parameter weight there is a torch.float32 tensor"),
        (on_meta, errors.MetaParameters, "weight, bias"),
        (lambda mesh: fully_shard(sharded(mesh), mesh=mesh), errors.AlreadyWrapped, "FSDPSequential"),
        (
            lambda mesh: sharded(mesh, reshard_after_forward=3),
            errors.InvalidReshardSize,
            "divide the 4 ranks",
        ),
        (
            lambda mesh: sharded(mesh, shard_placement_fn=lambda p: Shard(2)),
            errors.InvalidShardPlacement,
            "weight",
        ),
        (lambda mesh: fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh), ValueError, "has no forward"),
        (lambda mesh: sharded(init_device_mesh("cpu", (2, 2))), errors.InvalidMesh, "mesh_dim_names"),
        (lambda mesh: sharded(init_device_mesh("cpu", (1, 2, 2))), errors.InvalidMesh, "one dimension"),
        (lambda mesh: sharded(mesh)[0].reset_iter_state(), errors.NotTheRoot, "root"),
        (
            lambda mesh: sharded(mesh).set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
            ValueError,
            "modules[0] is a Linear",
        ),
    ],
)
def test_a_mistake_has_a_name(mesh: Any, mistake: Callable[[Any], None], error: type, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        mistake(mesh)


@pytest.mark.fake
def test_every_method_of_torch_is_there(mesh: Any, caplog: pytest.LogCaptureFixture) -> None:
    """And what means nothing says so, once."""
    from torch.distributed.fsdp import FSDPModule as TorchModule

    settings_without_effect._said.clear()  # other tests of this process may have called them
    ours = sharded(mesh)
    for name in vars(TorchModule):
        if callable(getattr(TorchModule, name)) and not name.startswith("__") and name != "_get_fsdp_state":
            assert hasattr(ours, name), name
    with caplog.at_level(logging.WARNING, logger="weft.distributed.settings_without_effect"):
        for _ in range(2):
            ours.set_is_last_backward(False)
            share_comm_ctx([ours])
            ours.set_keep_unsharded_storage(True)
            ours.set_manual_backward_finalization(False)
            assert ours.finalize_backward() is None
            ours.finalize_backward(async_op=True).wait()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages)) == 4
    assert all("does nothing in weft" in message for message in messages)
    handle = ours.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    assert tuple(ours[1].weight.shape) == (2, 5)
    assert not isinstance(ours[1].weight, DTensor)


@pytest.mark.fake
def test_ignored_parameters_stay(mesh: Any) -> None:
    model: Any = nn.Linear(3, 5)
    bias = model.bias
    fully_shard(model, mesh=mesh, ignored_params={bias})
    assert model.bias is bias
    assert isinstance(model.weight, DTensor)


@pytest.mark.fake
def test_only_what_is_wrapped_inside_is_left_out(mesh: Any) -> None:
    model = sharded(mesh)
    paths = [[member.param.path for member in state_of(part).members] for part in (model, model[0])]
    assert paths == [["1.weight", "1.bias"], ["weight", "bias"]]
    assert not state_of(model[0]).is_root
    assert state_of(model[0]).context is state_of(model).context


@pytest.mark.fake
def test_a_broken_backward_does_not_spoil_the_next_step(mesh: Any) -> None:
    model = sharded(mesh, reshard_after_forward=True)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("boom")

    x = torch.ones(1, 3, requires_grad=True)
    handle = x.register_hook(fail)
    loss = model(x * 2).sum()
    with pytest.raises(ValueError, match="boom"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())


@pytest.mark.fake
def test_recomputation_sees_the_same_saved_tensors(mesh: Any) -> None:
    """Checkpointing compares what is saved in both forwards; recipes are in neither."""
    model = sharded(mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    x = torch.ones(1, 3, requires_grad=True)
    checkpoint(lambda y: model[0](y.sin()).cos(), x, use_reentrant=False).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.t(),
        lambda w: w[1:3],
        lambda w: w[:, 2:5].t(),
        lambda w: w[2],
        lambda w: w.view(-1),
        lambda w: w[::2],
        lambda w: w.flatten()[3:9].view(2, 3),
        lambda w: w.unsqueeze(1),
    ],
)
def test_a_view_is_taken_again(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """On memory of the same shape that starts elsewhere."""
    first = torch.arange(30.0).view(5, 6)
    second = torch.cat([torch.zeros(7), torch.arange(30.0) + 100])[7:].view(5, 6)
    described = describe(view(first), first)
    again = described.of(second)
    assert torch.equal(again, view(second))
    assert again.stride() == view(second).stride()


def test_usual_views_need_no_strides() -> None:
    whole = torch.empty(5, 6)
    for usual in (whole, whole.t(), whole[1:3], whole[:, 2:5].t()):
        assert describe(usual, whole).order is not None


@pytest.mark.fake
def test_forward_may_write_to_what_it_sees(mesh: Any) -> None:
    """As in torch, it writes to the gathered copy only."""

    class Clamped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    module = fully_shard(Clamped(3, 8), mesh=mesh)
    before = module.weight.to_local().clone()
    out = module(torch.full((1, 3), 10.0))
    assert out.abs().max() <= 3.1 + 1
    out.sum().backward()
    assert torch.equal(module.weight.to_local(), before)


def recurrent_body(rank: int, world: int) -> list[tuple[int, bool]]:
    """How often a step over each recurrent network was captured in six calls, and whether it trained as in eager."""
    found = []
    for kind in (nn.RNN, nn.LSTM, nn.GRU):

        def trained(compiled: bool, kind: Any = kind) -> tuple[int, list[torch.Tensor]]:
            torch.manual_seed(0)
            model: Any = fully_shard(kind(4, 6))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x: torch.Tensor) -> None:
                model(x)[0].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            run: Any = weft.compile(step) if compiled else step
            for at in range(6):
                run(torch.full((5, 3, 4), at / 3 - rank))
            return len(run.captures) if compiled else 0, [local_tensor(each) for each in model.parameters()]

        (_, eager), (captures, ours) = trained(False), trained(True)
        found.append((captures, all(map(torch.equal, eager, ours))))
    return found


@pytest.mark.gloo
def test_recurrent_networks_are_captured_once() -> None:
    """They keep lists of their weights, which sharding exchanges at each forward."""
    assert run_ranks(recurrent_body, 2) == [[(1, True)] * 3] * 2
