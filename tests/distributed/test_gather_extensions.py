"""Parameters that gather themselves (`fsdp_pre_all_gather`, `fsdp_post_all_gather`), against PyTorch's FSDP2."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import gather_extensions as extensions
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import weft
from harness import run_ranks
from weft import errors
from weft.torch_adapter import local_tensor

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def given(layer: Any, kind: Callable[..., torch.Tensor]) -> None:
    """Make the weight of a layer what `kind` makes of it."""
    layer.weight = nn.Parameter(kind(layer.weight.detach()))


def network(kind: Callable[..., torch.Tensor], rows: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    product = extensions.ProductLinear(rows, rows)
    model = nn.Sequential(nn.Linear(6, rows), nn.ReLU(), product, nn.ReLU(), nn.Linear(rows, 4))
    for layer in (model[0], model[2]):
        given(layer, kind)
    return model


def shard(model: nn.Sequential, how: Callable[..., Any] = weft.fully_shard, **options: Any) -> nn.Sequential:
    for layer in (model[0], model[2], model):
        how(layer, **options)
    return model


def step_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def batch(at: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * at + rank))


def trained(model: nn.Module, rank: int, compiled: bool = False) -> list[torch.Tensor]:
    """The losses of three steps and the shards after them."""
    step: Any = weft.compile(step_of(model)) if compiled else step_of(model)
    losses = [step(batch(at, rank)).detach() for at in range(3)]
    if compiled:
        assert len(weft.explain(step).captures) == 1
    return losses + [getattr(part, "elem", part) for part in (local_tensor(p) for p in model.parameters())]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


CASES = {
    "bfloat16": (extensions.HalfWire, 8, MixedPrecisionPolicy(), True),
    "bfloat16, uneven, mixed precision": (extensions.HalfWire, 7, HALF, True),
    "bfloat16, uneven, kept": (extensions.HalfWire, 7, MixedPrecisionPolicy(), False),
    "bfloat16 gradients": (extensions.RawWire, 8, ALL_HALF, True),
    "float8": (extensions.Float8Wire, 8, MixedPrecisionPolicy(), True),
    "float8, mixed precision, kept": (extensions.Float8Wire, 8, HALF, False),
}


def against_torch(rank: int, world: int, case: str) -> dict[str, bool]:
    """Whether losses and shards are those of PyTorch's fully_shard, eagerly and compiled."""
    kind, rows, policy, reshard = CASES[case]
    options: Any = {"mp_policy": policy, "reshard_after_forward": reshard}
    theirs = trained(shard(network(kind, rows), torch_fully_shard, **options), rank)
    eager = trained(shard(network(kind, rows), **options), rank)
    compiled = trained(shard(network(kind, rows), **options), rank, True)
    return {"eager": same(eager, theirs), "compiled": same(compiled, theirs)}


@pytest.mark.gloo
@pytest.mark.parametrize("case", list(CASES))
def test_training_equals_torchs_fully_shard_bit_for_bit(case: str) -> None:
    assert run_ranks(against_torch, 2, case) == [{"eager": True, "compiled": True}] * 2


def half_before(self: torch.Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
    return (self.to(torch.bfloat16),), None


@torch.no_grad()
def half_after(self: torch.Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    if out is None:
        whole = outputs[0].to(dtype)
        return whole, (outputs[0], whole)
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(outputs[0])
    return None


def put_on_later(rank: int, world: int) -> dict[str, bool]:
    """Methods that plain shards get after fully_shard, in the middle of training too, as PyTorch's own tests do it."""

    def found(how: Callable[..., Any], compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
        step: Any = step_of(shard(model, how))
        if how is weft.fully_shard:  # PyTorch would keep the parameter that it has gathered by then
            weft.compile(step)(batch(9)) if compiled else step(batch(9))
        model.load_state_dict({name: value.detach().clone().fill_(0.3) for name, value in model.state_dict().items()})
        for part in map(local_tensor, model.parameters()):
            part.fsdp_pre_all_gather = half_before.__get__(part)
            part.fsdp_post_all_gather = half_after.__get__(part)
        step = step_of(model)
        step = weft.compile(step) if compiled else step
        losses = [step(batch(at, rank)).detach() for at in range(3)]
        return losses + [local_tensor(p).detach() for p in model.parameters()]

    theirs = found(torch_fully_shard, False)
    return {
        "eager": same(found(weft.fully_shard, False), theirs),
        "compiled": same(found(weft.fully_shard, True), theirs),
    }


@pytest.mark.gloo
def test_methods_may_be_put_on_shards_after_fully_shard() -> None:
    assert run_ranks(put_on_later, 2) == [{"eager": True, "compiled": True}] * 2


def come_and_go(rank: int, world: int) -> list[str]:
    """A compiled step notices that shards get such methods between its calls, and lose them; PyTorch's cannot."""

    def found(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
        step: Any = step_of(shard(model))
        step = weft.compile(step) if compiled else step
        losses = [step(batch(at, rank)).detach() for at in range(2)]
        for part in map(local_tensor, model.parameters()):
            part.fsdp_pre_all_gather = half_before.__get__(part)
            part.fsdp_post_all_gather = half_after.__get__(part)
        losses += [step(batch(at, rank)).detach() for at in range(2)]
        for part in map(local_tensor, model.parameters()):
            del part.fsdp_pre_all_gather, part.fsdp_post_all_gather
        losses += [step(batch(at, rank)).detach() for at in range(2)]
        return losses + [local_tensor(p).detach() for p in model.parameters()]

    pairs = zip(found(False), found(True), strict=True)
    return [f"value {at}" for at, (one, other) in enumerate(pairs) if not torch.equal(one, other)]


@pytest.mark.gloo
def test_a_compiled_step_notices_methods_that_shards_get_and_lose() -> None:
    assert run_ranks(come_and_go, 2) == [[], []]


def strided(rank: int, world: int) -> bool:
    ours = trained(shard(network(extensions.StridedFloat8Wire)), rank)
    return same(ours, trained(shard(network(extensions.Float8Wire)), rank))


@pytest.mark.gloo
def test_tensors_that_are_not_contiguous_are_gathered() -> None:
    assert run_ranks(strided, 2) == [True, True]


def two_models(scale: float, kind: Callable[..., torch.Tensor]) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    for layer in (model[0], model[2]):
        given(layer, lambda weight: kind(scale * weight))
    return model


def twofold(rank: int, world: int, compiled: bool) -> list[str]:
    """A parameter of two tensors trains as two models of one tensor do, with PyTorch's fully_shard."""
    TwoTensor.fsdp_pre_all_gather = extensions.two_before  # type: ignore[attr-defined]
    TwoTensor.fsdp_post_all_gather = extensions.two_after  # type: ignore[attr-defined]

    def losses(model: nn.Module, how: Callable[..., Any], compiled: bool, keep: bool) -> list[torch.Tensor]:
        how(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=not keep)
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = weft.compile(step) if compiled else step
        found = [run(batch(at, rank)) for at in range(3)]
        parameters = [local_tensor(p) for p in model.parameters()]
        return found + parameters + [local_tensor(p.grad) for p in model.parameters()]

    theirs = [losses(two_models(scale, torch.clone), torch_fully_shard, False, False) for scale in (1, 2)]
    wrong = []
    for keep in (False, True):
        both = two_models(1, lambda weight: TwoTensor(weight, 2 * weight))
        ours = losses(both, weft.fully_shard, compiled, keep)
        for name, reference in zip("ab", theirs, strict=True):
            if not same([getattr(each, name) for each in ours], reference):
                wrong.append(f"{name} {keep=}")
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("compiled", [False, True])
def test_a_parameter_of_two_tensors_trains_as_two_models(compiled: bool) -> None:
    assert run_ranks(twofold, 2, compiled) == [[], []]


def checkpointed(rank: int, world: int) -> list[bool]:
    """State dicts hold shards of the subclass, and load; another dimension is sharded; an update is never missed."""
    model = shard(network(extensions.HalfWire))
    trained(model, rank)
    other = shard(network(extensions.HalfWire))
    before = torch.equal(other(batch(9)), model(batch(9)))
    other.load_state_dict(model.state_dict())
    columns: Any = {"shard_placement_fn": lambda p: Shard(1)}
    sideways = network(extensions.RawWire)[2]
    weft.fully_shard(sideways, **columns)
    unsharded: Any = network(extensions.RawWire)[2].weight
    whole = unsharded.elem.to(torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    return [
        not before,
        torch.equal(other(batch(9)), model(batch(9))),
        all(
            isinstance(local_tensor(model.state_dict()[name]), extensions.HalfWire) for name in ("0.weight", "2.weight")
        ),
        torch.equal(sideways(x), x @ whole.t()),
    ]


@pytest.mark.gloo
def test_state_dicts_and_other_dimensions() -> None:
    assert run_ranks(checkpointed, 2) == [[True] * 4, [True] * 4]


@pytest.mark.fake
@pytest.mark.parametrize("reshard", [True, False])
def test_captures_hold_one_ordinary_all_gather_for_each_tensor(reshard: bool) -> None:
    with weft.fake_world(2):
        model = shard(network(extensions.Float8Wire), reshard_after_forward=reshard)
        graph = weft.capture(step_of(model), batch(0))
    kinds = [node.meta["val"].dtype for node in graph.collectives() if "all_gather_into_tensor" in str(node.target)]
    rounds = 2 if reshard else 1
    assert kinds.count(torch.float8_e4m3fn) == 2 * rounds
    scales = 2 * 2 * rounds
    others = 3 * rounds  # two biases and the last weight
    assert kinds.count(torch.float32) == scales + others


@pytest.mark.fake
def test_what_a_subclass_lies_in_is_let_go_after_forward() -> None:
    """Autograd saved the float8 weight. With reshard_after_forward it keeps a note of how to gather it again."""
    seen = []

    class Watched(extensions.Float8Wire):
        def fsdp_post_all_gather(self, outputs: Any, *rest: Any, out: Any = None) -> Any:
            whole, inner = super().fsdp_post_all_gather(outputs, *rest, out=out)
            seen.append(weakref.ref(whole.coded))
            return whole, inner

    with weft.fake_world(2):
        for reshard in (True, False):
            seen.clear()
            model = shard(network(Watched), reshard_after_forward=reshard)
            out = model(batch(0))
            assert [ref() is None for ref in seen] == [reshard, reshard]
            out.sum().backward()
            assert len(seen) == (4 if reshard else 2)


@pytest.mark.fake
def test_materialize_and_to_empty_keep_the_subclass() -> None:
    with weft.fake_world(2):
        for fill in (weft.materialize, lambda model: model.to_empty(device="cpu")):
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(6, 8))
            given(model[0], extensions.HalfWire)
            weft.fully_shard(model)
            fill(model)
            assert isinstance(local_tensor(model[0].weight), extensions.HalfWire)
            assert model(batch(0)).shape == (5, 8)


@pytest.mark.fake
def test_the_extension_gets_the_mesh_of_shards() -> None:
    seen = []

    class Asking(extensions.RawWire):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            seen.append((mesh.ndim, mesh.size()))
            return super().fsdp_pre_all_gather(mesh)

    with weft.fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = shard(network(Asking), mesh=mesh, mp_policy=ALL_HALF)
        model(batch(0))
    assert set(seen) == {(1, 4)}


class Before(extensions.Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.elem,), None


class OtherSignature(extensions.HalfWire):
    def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:  # type: ignore[override]
        return (self.elem,), None


class NoTuple(extensions.RawWire):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return self.elem, None


class NoPair(extensions.RawWire):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0]


class TooSmall(extensions.RawWire):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0][:1], outputs


@pytest.mark.fake
@pytest.mark.parametrize(
    ("kind", "rows", "error", "said"),
    [
        (Before, 8, errors.UnshardableParameter, "has fsdp_pre_all_gather and no fsdp_post_all_gather"),
        (OtherSignature, 8, errors.InvalidGatherExtension, "another signature"),
        (NoTuple, 8, errors.InvalidGatherExtension, "must return (tensors to gather, metadata)"),
        (NoPair, 8, errors.InvalidGatherExtension, "must return (parameter, tensors that it lies in)"),
        (TooSmall, 8, errors.InvalidGatherExtension, "returned a tensor of shape (1, 6)"),
        (extensions.RawWire, 7, errors.InvalidGatherExtension, "of the padded shard's shape (2, 6)"),
    ],
)
def test_broken_extensions_are_refused_by_name(kind: Any, rows: int, error: type[Exception], said: str) -> None:
    with weft.fake_world(4, rank=3), pytest.raises(error) as raised:
        weft.fully_shard(network(kind, rows)[0])(batch(0))
    assert "weight" in str(raised.value)
    assert said in str(raised.value)


@pytest.mark.fake
def test_gathering_again_over_fewer_ranks_is_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        with pytest.raises(errors.UnshardableParameter, match="reshard_after_forward is a number"):
            weft.fully_shard(network(extensions.RawWire)[0], reshard_after_forward=2)
    finally:
        dist.destroy_process_group()
