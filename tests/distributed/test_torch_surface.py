"""What code written for PyTorch's FSDP2, replicate and DDP finds in weft: the same names, the same numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule as TorchReplicateModule
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

import weft
from harness import run_ranks
from weft.distributed.fsdp.offload import ShardHome
from weft.errors import OffloadedToDevice, UncapturableWrapper, WrappedInStep

NEW = not torch.__version__.startswith("2.11")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def sharded(shard: Callable[..., Any] = weft.fully_shard, model: nn.Sequential | None = None) -> nn.Sequential:
    """Both layers and the root are wrapped: the layers' parameters are gathered again in backward."""
    model = net() if model is None else model
    for part in (model[0], model[2], model):
        shard(part)
    return model


def batch(rank: int, step: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]


def same(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)


# ---- names


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (weft.FSDPModule, TorchFSDPModule),
        (weft.ReplicateModule, TorchReplicateModule),
        (weft.UnshardHandle, torch.distributed.fsdp.UnshardHandle),
    ],
)
def test_every_method_of_torch_is_there_with_its_parameters(ours: type, theirs: type) -> None:
    assert public(theirs) <= public(ours)
    assert hasattr(ours, "_set_unshard_async_op") == hasattr(theirs, "_set_unshard_async_op")
    for name in public(theirs):
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(
            inspect.signature(getattr(theirs, name)).parameters
        )


def test_every_name_of_fsdp2_is_at_the_top_level() -> None:
    # FSDP1's names are those that torch.distributed.fsdp had before fully_shard.
    names = {"CPUOffloadPolicy", "FSDPModule", "fully_shard", "MixedPrecisionPolicy", "OffloadPolicy"}
    names |= {"register_fsdp_forward_method", "UnshardHandle", "share_comm_ctx", "DataParallelMeshDims"}
    assert names <= set(weft.__all__)
    assert not NEW or names <= set(torch.distributed.fsdp.__all__)
    for policy in ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"):
        assert getattr(weft, policy) is getattr(torch.distributed.fsdp, policy)
    dims = weft.DataParallelMeshDims(shard="dp")
    assert (dims.shard, dims.replicate) == ("dp", None)


# ---- replicate


def unused_on_some_ranks(rank: int, world: int) -> list[tuple[str, bool]]:
    """`set_reduce_scatter_unused_params`: each rank uses another branch, and rank 0 leaves a wrapped module out."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.inner = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            x = (self.first if branch == 0 else self.second)(x)
            return self.inner(x) if branch == 1 else x

    ours, plain = Branches(), Branches()
    weft.replicate(ours.inner)
    weft.replicate(ours)
    ours.set_reduce_scatter_unused_params(True)
    branches = [0, *[1] * (world - 1)]
    for _ in range(2):  # the second adds to the first
        ours(batch(rank), branches[rank]).sum().backward()
        for other in range(world):
            (plain(batch(other), branches[other]).sum() / world).backward()
    wanted = gradients(plain)
    close = all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(gradients(ours), wanted, strict=True))

    # A hook sees each average once, before it is stored.
    hooked = net()
    weft.replicate(hooked)
    hooked.set_all_reduce_hook(lambda gradient: gradient.mul_(2))
    reference = net()
    weft.replicate(reference)
    for model in (hooked, reference):
        model(batch(rank)).sum().backward()
    doubled = same(gradients(hooked), [2 * g for g in gradients(reference)])

    # An exception in backward leaves all-reduces under way; after the reset the iteration starts anew.
    first = gradients(reference)
    reference.set_requires_gradient_sync(False)
    reference(batch(rank)).sum().backward()
    reference.set_requires_gradient_sync(True)
    fail = reference[0].weight.register_hook(raises)
    with pytest.raises(ZeroDivisionError):
        reference(batch(rank)).sum().backward()
    fail.remove()
    reference.reset_iter_state()
    forgotten = all(g is None for g in gradients(reference))
    reference(batch(rank)).sum().backward()
    anew = same(gradients(reference), first)
    return [("unused", close), ("hook", doubled), ("forgotten", forgotten), ("anew", anew)]


def raises(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def buffers_follow_ddp(rank: int, world: int) -> list[tuple[str, bool]]:
    """BatchNorm's statistics after training, accumulation and evaluation, eager and compiled."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def run(wrapped: Any, train: Callable[..., Any], look: Callable[..., Any]) -> list[torch.Tensor]:
        inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        seen = []
        for step in range(3):
            if step == 1:  # accumulation: the forward after it finds the buffers as they are
                with wrapped.no_sync():
                    wrapped(batch(rank, 10 + step)).sum().backward()
            train(batch(rank, step))
            seen += [buffer.clone() for buffer in inner.buffers()]
            with torch.no_grad():
                wrapped.eval()
                seen += [look(batch(rank, 20 + i)).clone() for i in range(2)]
                wrapped.train()
            seen += [buffer.clone() for buffer in inner.buffers()]
        return seen + [p.grad.clone() for p in inner.parameters()]  # type: ignore[union-attr]

    def results(wrap: Callable[..., Any], compiled: bool) -> list[torch.Tensor]:
        wrapped = wrap(model())

        def train(x: torch.Tensor) -> None:
            wrapped(x).sum().backward()

        def look(x: torch.Tensor) -> torch.Tensor:
            return wrapped(x)

        return run(wrapped, weft.compile(train) if compiled else train, weft.compile(look) if compiled else look)

    theirs = results(DistributedDataParallel, False)
    left = results(lambda m: weft.replicate(m, forward_sync_buffers=False), False)
    unsynced = {"forward_sync_buffers" if NEW else "broadcast_buffers": False}
    unsent = results(lambda m: DistributedDataParallel(m, **unsynced), False)
    return [
        ("eager", same(results(weft.replicate, False), theirs)),
        ("compiled", same(results(weft.replicate, True), theirs)),
        ("left alone", same(left, unsent)),
        ("broadcasts matter", rank == 0 or not same(theirs, unsent)),
    ]


def other_dtypes(rank: int, world: int) -> list[tuple[str, bool]]:
    """float64 after the wrap against DDP; frozen float8 weights against torch's fully_shard, on gloo."""
    x = batch(rank).double()
    theirs = DistributedDataParallel(net().double())
    theirs(x).sum().backward()
    eager, stepped = weft.replicate(net()).to(torch.float64), weft.replicate(net()).to(torch.float64)
    eager(x).sum().backward()
    weft.compile(lambda x: stepped(x).sum().backward())(x)
    swapped = [weft.replicate(net()), weft.replicate(net())]
    torch.__future__.set_swap_module_params_on_conversion(True)
    for model in swapped:
        model.to(torch.float64)
    torch.__future__.set_swap_module_params_on_conversion(False)
    swapped[0](x).sum().backward()
    weft.compile(lambda x: swapped[1](x).sum().backward())(x)

    def frozen(seed: int = 0) -> Frozen:
        torch.manual_seed(seed)
        return Frozen()

    def gradient(model: Any, compiled: bool = False) -> torch.Tensor:
        def step(x: torch.Tensor) -> None:
            model(x).sum().backward()

        (weft.compile(step) if compiled else step)(batch(rank))
        return whole(model.scale.grad)

    expected = gradient(torch_fully_shard(frozen()))
    return [
        ("float64", same(gradients(eager), gradients(theirs))),
        *((f"float64 by a swap {at}", same(gradients(model), gradients(theirs))) for at, model in enumerate(swapped)),
        ("float64 compiled", same(gradients(stepped), gradients(theirs))),
        ("float8 sharded", torch.equal(gradient(weft.fully_shard(frozen())), expected)),
        ("float8 sharded, compiled", torch.equal(gradient(weft.fully_shard(frozen()), compiled=True), expected)),
        # replicate gives all ranks the weights of rank 0. It divides before the sum, and fully_shard after it.
        ("float8 replicated", torch.allclose(gradient(weft.replicate(frozen(seed=rank))), expected)),
    ]


class Frozen(nn.Module):
    """A frozen float8 weight with a trained scale per row; the rows do not divide by the world."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).t()


def replicated(rank: int, world: int) -> dict[str, list[str]]:
    """Names of what differs, by group."""
    groups = {"unused": unused_on_some_ranks, "buffers": buffers_follow_ddp, "dtypes": other_dtypes}
    return {name: [what for what, right in case(rank, world) if not right] for name, case in groups.items()}


@pytest.mark.gloo
def test_replicate_does_what_ddp_and_torchs_replicate_do() -> None:
    for found in run_ranks(replicated, 2):
        assert found == {"unused": [], "buffers": [], "dtypes": []}


@pytest.mark.gloo
def test_a_nested_unused_module_is_reduced_on_three_ranks() -> None:
    """Three addends: zeros of a rank that does not use a module must meet the others' gradients."""
    for found in run_ranks(unused_on_some_ranks, 3):
        assert dict(found)["unused"]


# ---- fully_shard with the rest of torch


def composable(rank: int, world: int) -> list[tuple[str, bool]]:
    """torch's composable checkpoint, applied before or after the wrap, against torch's fully_shard."""

    def trained(shard: Callable[..., Any], first: bool, compiled: bool = False) -> list[torch.Tensor | None]:
        model = net()
        if first:
            composable_checkpoint(model[0])
            composable_checkpoint(model[2])
        sharded(shard, model)
        if not first:
            composable_checkpoint(model[0])
            composable_checkpoint(model[2])

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).sum()
            loss.backward()
            return loss

        run = weft.compile(step) if compiled else step
        return [run(batch(rank)).detach(), *gradients(model)]

    theirs = trained(torch_fully_shard, True)
    return [
        (f"{first=} {compiled=}", same(trained(weft.fully_shard, first, compiled), theirs))
        for first in (False, True)
        for compiled in (False, True)
    ]


def transforms(rank: int, world: int) -> list[tuple[str, bool]]:
    """torch.func through sharded modules, against the plain module; training is as before afterwards."""
    x, tangent = batch(rank), batch(rank, 1)
    model, plain = sharded(), net()

    def jvp(module: nn.Module) -> list[torch.Tensor]:
        return list(torch.func.jvp(module, (x,), (tangent,)))

    def input_gradient(module: nn.Module) -> list[torch.Tensor]:
        return [torch.func.grad(lambda x: module(x).pow(2).sum())(x)]

    def dual(module: nn.Module) -> list[torch.Tensor]:
        with torch.autograd.forward_ad.dual_level():
            out = module(torch.autograd.forward_ad.make_dual(x.requires_grad_(), tangent))
            return [t.detach() for t in torch.autograd.forward_ad.unpack_dual(out)]

    def batched(module: nn.Module) -> list[torch.Tensor]:
        return [torch.func.vmap(module)(x)]

    cases = {"jvp": jvp, "grad": input_gradient, "dual": dual, "vmap": batched}
    found = [(name, same(case(model), case(plain))) for name, case in cases.items()]
    found.append(("jvp compiled", same(weft.compile(lambda: jvp(model))(), jvp(plain))))
    reference = sharded(torch_fully_shard)
    for each in (model, reference):
        # Reverse over forward: the tangent's gradient reaches the parameters.
        if each is model:
            jvp(each)[1].sum().backward()
            found.append(("tangent", any(g is not None for g in gradients(each))))
            each.zero_grad()
        each(x).sum().backward()
    return [*found, ("trains", same(gradients(model), gradients(reference)))]


def evaluated(rank: int, world: int) -> list[tuple[str, bool]]:
    """Compiled evaluation under inference_mode, before, between and after training steps."""
    model, plain = sharded(), sharded(torch_fully_shard)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]

    @weft.compile
    def look(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    @weft.compile
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss

    found = []
    for step in range(3):
        with torch.inference_mode():
            ours = look(batch(rank, 10))
        with torch.no_grad():  # torch's own cannot train after a forward under inference_mode
            theirs = plain(batch(rank, 10))
        found.append((f"look {step}", same([ours], [theirs]) and ours.is_inference()))
        loss = plain(batch(rank, step)).pow(2).sum()
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        found.append((f"train {step}", same([train(batch(rank, step)).detach()], [loss.detach()])))
    return found


def distributed_inside(rank: int, world: int) -> list[tuple[str, bool]]:
    """distribute_tensor in a step: every rank's data differs, and rank 0's is what all get."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):

        def step(x: torch.Tensor, placement: Any = placement) -> torch.Tensor:
            return (distribute_tensor(x, mesh, [placement]) * 2).full_tensor()

        found.append((str(placement), same([weft.compile(step)(batch(rank))], [batch(0) * 2])))
    return found


def offloaded(rank: int, world: int) -> list[tuple[str, bool]]:
    """CPUOffloadPolicy against torch's: accumulation, clipping, AdamW, mixed precision; eager and compiled."""
    policy = weft.CPUOffloadPolicy(pin_memory=False)

    def trained(shard: Callable[..., Any], compiled: bool, **options: Any) -> list[Any]:
        model: Any = net()
        for part in (model[0], model):
            shard(part, offload_policy=policy, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            for at, part in enumerate(x.chunk(2)):
                model.set_requires_gradient_sync(at == 1)
                loss = model(part).float().pow(2).sum()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = weft.compile(step) if compiled else step
        losses = [run(batch(rank, at)).detach() for at in range(3)]
        return losses + [whole(p).detach() for p in model.parameters()]

    half = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return [
        (f"{compiled=} {options}", same(trained(weft.fully_shard, compiled, **options), theirs))
        for options in ({}, {"mp_policy": half, "reshard_after_forward": True})
        for theirs in [trained(torch_fully_shard, False, **options)]
        for compiled in (False, True)
    ]


def test_offloaded_shards_are_fetched_to_the_device_and_gradients_kept_on_the_host() -> None:
    home = ShardHome(torch.device("meta"), weft.CPUOffloadPolicy(pin_memory=False))  # the device that computes
    shard = home.keep(torch.ones(3))
    assert shard.device.type == "cpu"
    assert home.fetch(shard, "weight").device.type == "meta"
    assert home.keep(torch.ones(3, device="meta")).is_meta
    with pytest.raises(OffloadedToDevice, match="the shard of weight is on meta"):
        home.fetch(torch.ones(3, device="meta"), "weight")
    assert ShardHome(torch.device("meta"), weft.OffloadPolicy()).keep(torch.ones(3)).is_meta


@pytest.mark.gpu
@pytest.mark.gloo
def test_an_offloaded_step_on_a_gpu_has_its_shards_and_optimizer_on_the_host() -> None:
    assert run_ranks(offloaded_on_gpu, 1, backend="nccl") == [[]]


def offloaded_on_gpu(rank: int, world: int) -> list[str]:
    """What differs from torch's, of losses, parameters and devices; eager, and compiled on ATen kernels."""

    def trained(shard: Callable[..., Any], mode: str | None, pin: bool) -> tuple[list[Any], set[str]]:
        model = net()
        for part in (model[0], model):
            shard(part, offload_policy=weft.CPUOffloadPolicy(pin_memory=pin))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        devices = set()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss

        run = step if mode is None else weft.compile(step, mode=mode)
        losses = []
        for at in range(4):
            losses.append(run(batch(rank, at).cuda()).detach().cpu())
            devices |= {p.device.type for p in model.parameters()} | {p.grad.device.type for p in model.parameters()}
            devices |= {state["exp_avg"].device.type for state in optimizer.state.values()}
            optimizer.zero_grad()
        return losses + [p.to_local().detach().clone() for p in model.parameters()], devices

    theirs, _ = trained(torch_fully_shard, None, True)
    wrong = []
    for mode in (None, "bitwise", "default"):
        for pin in (True, False):
            ours, devices = trained(weft.fully_shard, mode, pin)
            alike = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
            right = alike if mode == "default" else same(ours, theirs)
            if devices != {"cpu"} or not right:
                wrong.append(f"{mode=} {pin=} {devices}")
    return wrong


def refused(rank: int, world: int) -> list[str]:
    """The errors for wrappers that a step cannot hold, or cannot apply."""
    mesh, x = init_device_mesh("cpu", (world,)), batch(rank)
    by_torch, flat = torch_fully_shard(net()), FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, allreduce_hook)
    steps: dict[str, tuple[type[Exception], Callable[..., Any]]] = {
        "torch.distributed.fsdp.fully_shard": (UncapturableWrapper, lambda x: by_torch(x).sum()),
        "FullyShardedDataParallel": (UncapturableWrapper, lambda x: flat(x).sum()),
        "weft.replicate on the module inside": (UncapturableWrapper, lambda x: hooked(x).sum().backward()),
        "fsdp.fully_shard at": (WrappedInStep, lambda x: torch_fully_shard(net(), mesh=mesh)(x).sum()),
        "fsdp.FullyShardedDataParallel at": (WrappedInStep, lambda x: FullyShardedDataParallel(net())(x).sum()),
        "DistributedDataParallel at": (WrappedInStep, lambda x: DistributedDataParallel(net())(x).sum()),
        "weft.fully_shard at": (WrappedInStep, lambda x: weft.fully_shard(net())(x).sum()),
        "weft.replicate at": (WrappedInStep, lambda x: weft.replicate(net())(x).sum()),
        "context_parallel at": (WrappedInStep, lambda x: split(x)),
    }

    def split(x: torch.Tensor) -> torch.Tensor:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
            return x.sum()

    wrong = []
    for text, (kind, step) in steps.items():
        with pytest.raises(kind) as caught:
            weft.compile(step)(x)
        if text not in str(caught.value) or (kind is WrappedInStep and __file__ not in str(caught.value)):
            wrong.append(str(caught.value))
    evaluate = torch.no_grad()(lambda x: hooked(x))
    if not torch.equal(weft.compile(evaluate)(x), evaluate(x)):
        wrong.append("evaluation through DistributedDataParallel")
    return wrong


def with_the_rest(rank: int, world: int) -> list[str]:
    """Names of what differs."""
    cases = (composable, transforms, evaluated, distributed_inside, offloaded)
    found = [f"{case.__name__}: {what}" for case in cases for what, right in case(rank, world) if not right]
    return found + refused(rank, world)


@pytest.mark.gloo
def test_fully_shard_works_with_the_rest_of_torch_or_says_what_does_not() -> None:
    assert run_ranks(with_the_rest, 2) == [[], []]
