"""What GPUs run, on CPUs: generated kernels, a searched schedule and transports over peers in one step, over ranks.

Steps on CPUs run ATen's kernels in the order of the step, so other tests see the parts one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from peer_steps import model, step_of, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import weft
from harness import run_ranks
from weft import knobs
from weft.inductor.compiler import compilation_of, schedule_of
from weft.inductor.fusion.kernel_stages import kernel_calls

pytestmark = pytest.mark.gloo

Step = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[nn.Sequential, DeviceMesh], Step]


def sharded(net: nn.Sequential, mesh: DeviceMesh, **options: Any) -> Step:
    for block in net[1:-1]:
        weft.fully_shard(block, mesh=mesh, **options)
    return step_of(weft.fully_shard(net, mesh=mesh, **options))


def replicated(net: nn.Sequential, mesh: DeviceMesh) -> Step:
    return step_of(weft.replicate(net, mesh=mesh))


def accumulating(net: nn.Sequential, mesh: DeviceMesh) -> Step:
    """Two micro-batches of rows that lie in the batch with gaps."""
    sharded(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> torch.Tensor:
        losses = []
        for at in range(2):
            part = ids[:, at::2]
            losses.append(nn.functional.cross_entropy(net(part).flatten(0, 1), part.roll(1, 1).flatten()))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().detach()

    return step


def recomputing(net: nn.Sequential, mesh: DeviceMesh) -> Step:
    for block in net[1:-1]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return sharded(net, mesh, reshard_after_forward=False)


def tensor_parallel(net: nn.Sequential, mesh: DeviceMesh) -> Step:
    """The sequence is sharded between blocks."""
    along = Shard(1)
    plan: dict[str, Any] = {
        "0": weft.RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        str(len(net) - 1): weft.ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    for at in range(1, len(net) - 1):
        plan |= {
            f"{at}.norm": weft.SequenceParallel(),
            f"{at}.up": weft.ColwiseParallel(input_layouts=along),
            f"{at}.down": weft.RowwiseParallel(output_layouts=along),
        }
    return step_of(weft.parallelize(net, mesh, plan), clip=None)


CASES: dict[str, Make] = {
    "sharded": sharded,
    "sharded, bfloat16": partial(sharded, mp_policy=weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "replicated": replicated,
    "two micro-batches": accumulating,
    "recomputing": recomputing,
    "tensor parallel": tensor_parallel,
}


def both_ways(rank: int, world: int, names: Sequence[str]) -> dict[str, tuple[int, bool, int]]:
    """Trains each case eagerly and compiled, and compares. How many kernels, whether there is a schedule, and how many
    collectives peers carry."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    on_gpus = mock.patch("weft.inductor.compiler.device_kind", return_value="cuda")
    found = {}
    for name in names:
        # Of even sizes for tensor parallelism: the sequence of 6 is split over two ranks.
        nets = [model(8, 16) for _ in range(2)]
        batches = 0 if CASES[name] is tensor_parallel else rank  # where ranks see one batch, they draw the same
        expected = train(CASES[name](nets[0], mesh), nets[0], batches, length=6)
        compiled = weft.compile(CASES[name](nets[1], mesh))
        with knobs.override(cluster="h200x8", cuda_graphs=False, transports="all", cache_dir=""), on_gpus:
            got = train(compiled, nets[1], batches, length=6)
        how = {"rtol": 2e-2, "atol": 2e-2} if "bfloat16" in name else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(got, expected, **how, msg=lambda text, name=name: f"{name}: {text}")
        program = compiled.entries[0].program
        compilation = compilation_of(program)
        assert compilation is not None
        carried = [node for node in compilation.graph.collectives() if node.meta.get("transport", "nccl") != "nccl"]
        scheduled = schedule_of(program) is not None
        found[name] = len(kernel_calls(compilation.graph)), scheduled, len(carried)
    return found


def test_steps_equal_eager() -> None:
    for found in run_ranks(both_ways, 2, list(CASES), timeout=300):
        for name, (kernels, scheduled, carried) in found.items():
            assert kernels > 3, name
            # The table has 11 rows: the kernels of tensor parallel ranks differ, and nothing is scheduled.
            assert (scheduled, carried > 0) == (name != "tensor parallel",) * 2, name


def other_sizes(rank: int, world: int, marks: bool) -> str:
    """What a step says whose batch gets longer on the second rank alone; nothing where it equals eager."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    nets = [model(8, 16) for _ in range(2)]
    eager, compiled = sharded(nets[0], mesh), weft.compile(sharded(nets[1], mesh))
    on_gpus = mock.patch("weft.inductor.compiler.device_kind", return_value="cuda")
    with knobs.override(cluster="h200x8", cuda_graphs=False, cache_dir=""), on_gpus:
        for rows in (4, 4 + 2 * rank, 4 + 4 * rank):
            ids = torch.randint(0, 11, (rows, 6), generator=torch.Generator().manual_seed(rank))
            if marks:
                weft.mark_dynamic(ids, 0)
            expected = eager(ids)
            try:
                torch.testing.assert_close(compiled(ids), expected, rtol=1e-4, atol=1e-5)
            except weft.errors.WeftError as error:
                return str(error)
    return ""


def test_a_size_that_changes_on_one_rank_has_to_be_marked() -> None:
    """Ranks schedule a step on GPUs together."""
    told = run_ranks(other_sizes, 2, False, timeout=120)
    assert any("weft.mark_dynamic" in text for text in told), told
    assert run_ranks(other_sizes, 2, True, timeout=120) == ["", ""]


def returned_by_one(rank: int, how: str) -> Step:
    """A step whose reduced loss, or whose gradients, one rank alone returns."""
    weight = torch.nn.Parameter(torch.eye(32) + torch.arange(32.0) / 100)

    def step(x: torch.Tensor) -> Any:
        total = (x @ weight).exp()
        torch.distributed.all_reduce(total)
        result = total.tanh() + x
        if how == "a view":
            return (total[1:] if rank else None), result
        if how == "the state":
            weight.data.copy_(total[:32])
        return (total if rank == 1 else None), result

    return step


def alone(rank: int, world: int, how: str) -> tuple[bool, list[bool]]:
    """Whether the step is scheduled, and by call whether a rank's results are those of eager, also after the next."""
    eager, compiled = returned_by_one(rank, how), weft.compile(returned_by_one(rank, how))
    on_gpus = mock.patch("weft.inductor.compiler.device_kind", return_value="cuda")
    equal, before = [], None
    with (
        knobs.override(cluster="h200x8", cuda_graphs=False, transports="all", cache_dir="", peer_timeout_s=60.0),
        on_gpus,
    ):
        for call in range(3):
            x = torch.full((64, 32), 0.01 * (rank + call))
            pairs = list(zip(eager(x.clone()), compiled(x.clone()), strict=True))
            close = lambda pairs: all(a is b or torch.allclose(a, b, rtol=1e-4) for a, b in pairs)
            equal.append(close(pairs) and (before is None or close(before)))
            before = pairs
    return schedule_of(compiled.entries[0].program) is not None, equal


@pytest.mark.parametrize("how", ["the result", "a view", "the state"])
def test_a_result_of_a_collective_that_one_rank_returns(how: str) -> None:
    """It may not lie in memory that ranks share and the next step uses. Ranks must choose one transport all the same:
    they waited for each other before."""
    # A view that one rank makes is another graph, whose collectives are issued as captured.
    assert run_ranks(alone, 2, how, timeout=150) == [(how != "a view", [True] * 3)] * 2
