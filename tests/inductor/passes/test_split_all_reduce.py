"""All-reduces in two halves: the values of one, on real processes and against float64; and which are left alone."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from peer_steps import COPIES, KERNELS, PASSES, model, over_peers, train
from torch import nn

import weft
from harness import run_ranks
from step_builder import StepBuilder
from weft import host_processes, knobs
from weft.agreed_options import _machines
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.inductor.cache.graph_cache import entry_of
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.collectives import WIDENING_REDUCE_SCATTER
from weft.inductor.graph.retarget import retarget
from weft.inductor.multi_tensor.adam import Adam
from weft.inductor.multi_tensor.norm import Norm
from weft.inductor.passes import shard_norms as norms
from weft.inductor.passes.fuse_optimizer import fuse_optimizer
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.passes.shard_norms import shard_norms
from weft.inductor.passes.split_all_reduce import split, split_all_reduces
from weft.inductor.passes.wire_dtype import wire_dtype
from weft.inductor.schedule.planner import schedule

Node = torch.fx.Node

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ALL_REDUCE = c10d.all_reduce.default
REDUCE = c10d.reduce_scatter_tensor.default
GATHER = c10d.all_gather_into_tensor.default


def split_all(step: StepGraph) -> StepGraph:
    """On a CPU too, and however small."""
    split(step, [node for node in step.graph.nodes if node.target is ALL_REDUCE])
    return step


SPLITTING = [*(pass_ for pass_ in PASSES if pass_ is not wire_dtype), split_all, wire_dtype]


def collectives(step: StepGraph) -> list[Any]:
    return [node.target for node in step.collectives()]


# ---- values, on real processes

SHAPES = [(8,), (12, 3), (5, 4), (2, 6, 2), (1, 8), (3, 5), (7,), (240, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def summed(rank: int, world: int, transports: list[str], seed: int) -> list[str]:
    """Random all-reduces, split over peers, against the exact sums and what gloo makes of the step as it is."""
    draw = random.Random(seed)
    kinds = [
        (shape, draw.choice(DTYPES), draw.choice(DTYPES), draw.choice(["", "mean", "div", "half"])) for shape in SHAPES
    ]
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype, _, _ in kinds]
    group = dist.group.WORLD

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        started = []
        for value, (_, _, wide, how) in zip(values, kinds, strict=True):
            value = (value + 1).to(wide)
            value = {"": value, "mean": value * (1 / world), "div": value / world, "half": value * 0.5}[how]
            started.append(funcol.all_reduce(value, "sum", group))
        return [result + 0 for result in started]

    made = over_peers(step, transports, passes=SPLITTING)
    for _ in range(2):
        results = made(*inputs)
    for value, result, plain, (_, _, wide, how) in zip(inputs, results, step(*inputs), kinds, strict=True):
        exact = (value + 1).double()
        dist.all_reduce(exact)
        exact *= {"": 1, "mean": 1 / world, "div": 1 / world, "half": 0.5}[how]
        assert result.dtype == wide
        bound = 4 * torch.finfo(wide).eps * world
        torch.testing.assert_close(result.double(), exact, rtol=bound, atol=bound)
        torch.testing.assert_close(result, plain, rtol=bound, atol=bound)
        every = [torch.empty_like(result) for _ in range(world)]
        dist.all_gather(every, result)
        assert all(torch.equal(each, result) for each in every)  # replicas stay replicas
    return re.findall(r"= (\w+?)(?:_\d+)?\(\[", made.programs[0].source)


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "seed"), [(2, 0), (2, 1), (3, 2), (4, 3)])
def test_reduce_scatter_and_all_gather_give_the_sums_of_the_all_reduce(world: int, seed: int) -> None:
    transports = [KERNELS, COPIES][seed % 2]
    for calls in run_ranks(summed, world, transports, seed, timeout=120):
        assert {"peer_reduce_scatter", "copy_sum_reduce_scatter"} & set(calls)
        assert {"peer_gather", "copy_engine_gather"} & set(calls)


def kept(rank: int, world: int) -> None:
    """What all-reduces of all sorts leave in the tensors of the user, which outlive the step."""
    group = dist.group.WORLD
    held: dict[str, torch.Tensor] = {}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)  # overwrites an input
        held["fresh"] = funcol.all_reduce(y * 0.5, "sum", group)
        twice = y * (1 / world)  # read by others too
        mean = funcol.all_reduce(twice, "sum", group)
        both = funcol.all_reduce_coalesced([y, y + 1], "sum", group)
        return mean + twice + both[1]

    def run(step: Any) -> list[torch.Tensor]:
        given = [torch.arange(8.0) + rank, torch.ones(8, 2) * (rank + 1)]
        returned = step(*given)
        return [returned.clone(), held["fresh"].clone(), *given]

    expected = run(step)
    made = over_peers(step, COPIES, passes=SPLITTING)
    first = run(made)
    before = held["fresh"]
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(run(made), expected)
    torch.testing.assert_close(before, expected[1])  # the second step did not write into it
    assert "copy_sum_reduce_scatter" in made.programs[0].source


@pytest.mark.gloo
def test_tensors_that_outlive_the_step_hold_the_right_sums() -> None:
    run_ranks(kept, 2, timeout=120)


def apart(rank: int, world: int) -> None:
    """Ranks that share no memory. By another factor than the mean, which gloo does not have."""
    host_processes.host = lambda: f"host{rank}"  # type: ignore[assignment]
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce((x + 1).float() * 0.75, "sum", group) + 1

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank)).bfloat16()
    made = over_peers(step, COPIES, passes=SPLITTING)
    torch.testing.assert_close(made(x), step(x))
    assert {"reduce_scatter", "all_gather"} <= set(
        re.findall(r"c10d\w*?_(reduce_scatter|all_gather)", made.programs[0].source)
    ), made.programs[0].source


@pytest.mark.gloo
def test_without_peer_access_the_library_runs_both_collectives() -> None:
    run_ranks(apart, 2, timeout=120)


# ---- replicated training


def step_of(net: nn.Module, of: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(of(ids).flatten(0, 1).float(), ids.roll(1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def trained(rank: int, world: int, transports: list[str], shards: bool) -> str:
    passes = [*SPLITTING, fuse_optimizer]
    if shards:
        passes.append(shard_norms)
        norms.LEAST_BYTES = 1
    nets = [model(8, 16) for _ in range(2)]
    expected = train(step_of(nets[0], nn.parallel.DistributedDataParallel(nets[0])), nets[0], rank, 3)
    weft.replicate(nets[1])
    made = over_peers(step_of(nets[1], nets[1]), transports, passes=passes)
    found = train(made, nets[1], rank, 3)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, {name: value.tolist() for name, value in found[1].items()})
    assert every == [every[0]] * world
    return made.programs[0].source


@pytest.mark.gloo
@pytest.mark.parametrize("shards", [False, True], ids=["norms of gradients", "norms of shards"])
@pytest.mark.parametrize(("world", "transports"), [(2, COPIES), (4, COPIES), (2, KERNELS)])
def test_replicated_training_equals_torch_ddp(world: int, transports: list[str], shards: bool) -> None:
    for source in run_ranks(trained, world, transports, shards, timeout=180):
        # Behind the norm of gradients an update is whole; behind that of shards, gathers are still under way.
        assert (len(re.findall(r"\badam(?:_\d+)?\(", source)) > 1) is shards
        # With shards, that of all sums of squares, and that of shards, for which reductions add up squares.
        assert len(re.findall(r"\bnorm(?:ofsquares)?(?:_\d+)?\(", source)) == 1 + shards
        assert ("= peer_squares" in source) is shards
        assert len(re.findall(r"reduce_scatter(?:_\d+)?\(", source)) > 1


@pytest.fixture
def captured() -> Iterator[StepGraph]:
    """A replicated step of four ranks as on GPUs."""
    with weft.fake_world(4):
        net = nn.Sequential(nn.LayerNorm(2048), *(nn.Linear(2048, 2048, bias=False) for _ in range(6)))
        weft.replicate(net)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                loss = net(x).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        yield retarget(weft.capture(step, torch.zeros(2048, 2048)).copy(), "cuda:0")


def test_gradients_are_reduced_in_the_dtype_that_gemms_wrote(captured: StepGraph) -> None:
    """Nothing casts or multiplies them, and norm and optimizer are one call each, of what was gathered."""
    made = run_passes(captured, KERNEL_PASSES)
    starts = made.collectives()
    reductions = [node for node in starts if node.target is WIDENING_REDUCE_SCATTER.op]
    assert len(reductions) == 6 == collectives(made).count(GATHER)
    assert {node.args[1] for node in reductions} == {"avg"}
    assert {node.args[0].target for node in reductions} == {aten.mm.default}  # type: ignore[union-attr]
    gathered = {user for node in starts if node.target is GATHER for user in node.users}
    for kind in (Norm, Adam):
        (call,) = (node for node in made.graph.nodes if isinstance(node.target, kind))
        assert gathered <= {*call.all_input_nodes}


def test_gradient_norms_are_computed_from_shards(captured: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of little, that would save nothing; of much, what was gathered is read by the optimizer alone."""
    few = run_passes(captured, KERNEL_PASSES)
    monkeypatch.setattr(norms, "LEAST_BYTES", 32 << 20)
    much = run_passes(captured, KERNEL_PASSES)
    for made, calls in ((few, {Norm, Adam}), (much, {Adam})):
        waits = [user for node in made.collectives() if node.target is GATHER for user in node.users]
        assert {type(user.target) for wait in waits for user in wait.users} == calls
    (small,) = (node for node in much.collectives() if node.target is ALL_REDUCE and node.meta["val"].shape == (6,))
    assert small.args[1:] == ("sum", small.args[2])


def test_both_collectives_use_copy_engines_and_share_calls(captured: StepGraph) -> None:
    with knobs.override(transports="copy_engine, copy_sum"):  # of so little, kernels would cost less
        made = schedule(kernel_graph(run_passes(captured, KERNEL_PASSES)), load_cluster("h200x8"))
    carried = {(bucket.kind, bucket.transport): len(bucket.members) for bucket in made.reports}
    assert carried["reduce_scatter", "copy_sum"] > 1
    assert carried["all_gather", "copy_engine"] > 1
    halves = [name for bucket in made.reports if bucket.kind != "all_reduce" for name in bucket.members]
    assert len(halves) == 12
    assert all(name.endswith("weight") for name in halves)  # not the names of nodes


def test_splitting_is_disabled_by_name(captured: StepGraph) -> None:
    with knobs.override(disable_passes="split_all_reduces"):
        assert GATHER not in collectives(run_passes(captured, KERNEL_PASSES))


# ---- what is left alone


def sum_of(value: torch.Tensor, op: str = "sum", between: bool = True) -> StepGraph:
    """A step that sums a tensor and computes something before it reads the sum."""
    b = StepBuilder()
    given = b.input(value)
    made = b.call(aten.add.Tensor, given, given)
    start = b.call(ALL_REDUCE, made, op, "dp")
    other = b.call(aten.exp.default, given) if between else given
    b.returns(b.call(aten.mul.Tensor, b.call(WAIT, start, val=start.meta["val"]), other))
    return retarget(b.build({"dp": "0"}), "cuda:0")


LARGE = torch.zeros(2048, 1024, dtype=torch.bfloat16)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2048, 1024), torch.bfloat16),
        ((2049, 1024), torch.float16),
        ((1, 1 << 21), torch.bfloat16),
        ((6 << 20,), torch.float32),
        ((3, 1 << 20), torch.float64),
    ],
)
def test_large_all_reduces_are_split(op: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    step = sum_of(torch.zeros(shape, dtype=dtype), op)
    with weft.fake_world(4):
        split_all_reduces(step).check()
    reduce, gather = step.collectives()
    assert [reduce.target, gather.target] == [REDUCE, GATHER]
    assert reduce.args[1:] == (op, 4, "dp")
    assert gather.args[1:] == (4, "dp")
    assert step.results[0].args[0].meta["val"].shape == shape  # type: ignore[union-attr]


def test_a_cast_to_half_precision_in_the_step_lowers_the_size_threshold() -> None:
    b = StepBuilder()
    given = b.input(torch.zeros(2048, 1024))
    start = b.call(ALL_REDUCE, b.call(aten._to_copy.default, given, dtype=torch.bfloat16), "sum", "dp")
    other = b.call(aten.exp.default, given)
    b.returns(b.call(aten.mul.Tensor, b.call(WAIT, start, val=start.meta["val"]), other))
    step = retarget(b.build({"dp": "0"}), "cuda:0")
    with weft.fake_world(4):
        split_all_reduces(step).check()
    assert collectives(step) == [REDUCE, GATHER]
    assert step.collectives()[0].args[0].meta["val"].dtype == torch.bfloat16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "op", "between", "world", "transports"),
    [
        (torch.zeros(2048, 1023).bfloat16(), "sum", True, 4, "all"),  # small
        (torch.zeros(2048, 2048), "sum", True, 4, "all"),  # small for what NCCL would reduce
        (torch.zeros(2049, 1025).bfloat16(), "sum", True, 4, "all"),  # which ranks do not divide
        (torch.zeros(4096, 4096, dtype=torch.int32), "sum", True, 4, "all"),
        (LARGE, "max", True, 4, "all"),
        (torch.zeros(1024, 2048).bfloat16().t(), "sum", True, 4, "all"),  # not in the order of memory
        (LARGE, "sum", False, 4, "all"),  # waited for at once
        (LARGE, "sum", True, 1, "all"),
        (LARGE, "sum", True, 16, "all"),  # two hosts
        (LARGE, "sum", True, 4, "nccl"),
        (LARGE, "sum", True, 4, ""),
        (LARGE, "sum", True, 4, "copy_sum_16, two_shot"),
        (LARGE, "sum", True, 4, "push_32"),
    ],
)
def test_all_reduces_that_gain_nothing_are_left_alone(
    value: torch.Tensor, op: str, between: bool, world: int, transports: str
) -> None:
    step = sum_of(value, op, between)
    with weft.fake_world(world), knobs.override(transports=transports):
        split_all_reduces(step).check()
    assert collectives(step) == [ALL_REDUCE]


def test_world_sizes_do_not_share_cached_kernels() -> None:
    """The size of a group is in the graph that is made, and in none that is captured."""
    step = sum_of(LARGE)
    retarget(step, "cpu")
    found = set()
    for world in (2, 4, 16):
        with weft.fake_world(world):
            found.add(entry_of(retarget(step, "cpu")))
    assert len(found) == 3


def test_ranks_compare_which_groups_are_on_one_host(captured: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of several numbers of processes would make ranks split differently, and wait for each other for ever."""
    for processes, told in (("4", "world"), ("2", "none"), ("0", "world")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert _machines(captured).startswith(f"groups on one host: {told}\n")
    assert _machines(retarget(captured.copy(), "cpu")) == ""


def test_ranks_compare_whether_the_planner_schedules_the_step(captured: StepGraph) -> None:
    """A machine whose GPUs were calibrated, beside one whose were not: one would wait for the other's schedule."""
    with knobs.override(cluster="h200x8"):
        described = _machines(captured)
    undescribed = _machines(captured)  # no GPU here, or one that a shipped description fits
    assert "communication is scheduled" in described
    assert ("not scheduled" in undescribed) or torch.cuda.is_available()
