"""What a step over sharded parameters runs, on fake tensors and at any world size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from weft.distributed.fsdp import fully_shard
from weft.distributed.materialize import materialize

pytestmark = pytest.mark.fake


class Record(TorchDispatchMode):
    """The operations on plain tensors, in order; what DTensor takes apart is recorded in its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, torch._subclasses.fake_tensor.FakeTensor) for kind in types):
            return NotImplemented
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))

    def collectives(self) -> Counter[str]:
        names = (op.split(".")[1] for op in self.ops if op.startswith("_c10d_functional"))
        return Counter(name for name in names if name != "wait_tensor")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 37), nn.Linear(37, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(29, 13), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(13, 29, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def record(net: nn.Module, steps: int = 1, between: Any = lambda step: None) -> Record:
    """One step of training; the optimizer's state exists before."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    ids = mode.from_tensor(torch.zeros(2, 5, dtype=torch.long))
    with mode, Record() as record, torch.autograd.set_multithreading_enabled(False):
        for step in range(steps):
            between(step)
            net(ids).float().logsumexp(-1).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return record


def sharded(net: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def build(**options: Any) -> nn.Module:
    with torch.device("meta"):
        net = Net(**options)
    return net


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def fake(net: nn.Module) -> nn.Module:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return materialize(net, "cpu")


@pytest.mark.parametrize("world", [8], indirect=True)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["float32", "bfloat16"])
def test_every_parameter_is_gathered_and_reduced_once(world: int, policy: Any) -> None:
    """9 parameters, one of them tied; those of the blocks (8) are gathered again in backward."""
    collectives = record(materialize(sharded(build(), mp_policy=policy))).collectives()
    assert collectives == {
        "all_gather_into_tensor": 9 + 8,
        "reduce_scatter_tensor": 9,
        "all_reduce": 1,  # the norm of all gradients
    }
    kept = record(materialize(sharded(build(), mp_policy=policy, reshard_after_forward=False))).collectives()
    assert kept["all_gather_into_tensor"] == 9


def operations(world: int, rank: int, variant: str) -> list[str]:
    """The operations of a step of this variant on one rank of a world of this size; parameters are fake."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        options: dict[str, Any] = {"mp_policy": BF16}
        if variant == "hybrid":
            net = build()
            fully_shard(net, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")), **options)
        else:
            if variant == "second dimension":
                options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
            net = sharded(build(recompute=variant == "recomputed"), **options)
        fake(net)

        def between(step: int) -> None:
            if variant == "accumulated":
                net.set_requires_gradient_sync(step == 2)  # type: ignore[operator]

        steps = 3 if variant == "accumulated" else 1
        # Once before: DTensor runs what it has not seen yet on fakes of its own, to find shapes.
        record(net, steps, between)
        return record(net, steps, between).ops
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("variant", ["plain", "hybrid", "second dimension", "recomputed", "accumulated"])
def test_the_same_operations_at_any_world_size_and_on_any_rank(variant: str) -> None:
    """Sizes of 13, 29 and 37 divide nowhere; on 4,096 ranks most hold nothing."""
    first = operations(8, 0, variant)
    assert operations(4096, 0, variant) == first
    assert operations(4096, 4095, variant) == first
    assert operations(8, 7, variant) == first


def test_sizes_that_divide_run_the_same_operations_too() -> None:
    """37 over 37 ranks divides, 13 and 29 do not: what is done may not depend on it."""
    assert operations(37, 0, "plain") == operations(8, 0, "plain")


def test_accumulation_reduces_once() -> None:
    counted = Counter(op.split(".")[1] for op in operations(8, 0, "accumulated"))
    assert counted["reduce_scatter_tensor"] == 9
    assert counted["all_gather_into_tensor"] == 3 * (9 + 8)


def test_recomputation_gathers_no_more_than_backward_does() -> None:
    plain = Counter(op.split(".")[1] for op in operations(8, 0, "plain"))
    again = Counter(op.split(".")[1] for op in operations(8, 0, "recomputed"))
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert plain[name] == again[name]


@pytest.mark.parametrize("world", [4096], indirect=True)
def test_nothing_of_a_step_stays_behind(world: int) -> None:
    """Every attribute of the wrapper is after a step what it was before; the tracer relies on it."""

    def snapshot(net: nn.Module) -> list[Any]:
        from weft.distributed.fsdp.state import states_in

        found: list[Any] = []
        for state in states_in(net.modules()):
            found.append({k: list(v) if isinstance(v, (list, set)) else v for k, v in vars(state).items()})
            found.append(dict(vars(state.context)))
            for member in state.members:
                found.append({k: len(v) if k in ("holders", "anchors") else v for k, v in vars(member.param).items()})
                found.append([slot.get() for slot in member.slots])
        return found

    net = fake(sharded(build()))
    before = snapshot(net)
    record(net)
    for old, new in zip(before, snapshot(net), strict=True):
        pairs = zip(old.items(), new.items(), strict=True) if isinstance(old, dict) else zip(old, new, strict=True)
        for a, b in pairs:
            assert a is b or (isinstance(a, tuple) and a[0] == b[0] and (a[1] is b[1] or a[1] == b[1])), (
                a,
                b,
            )
