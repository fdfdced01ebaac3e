"""Whole schedules: what they predict under limits of memory, and that they leave every bit of a step as it was."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_ops import operations
from growth import assert_near_linear
from llama_steps import sharded_llama
from sharded_steps import GROUPS, outcome, the_steps
from torch import nn

import weft
from harness import RanksFailed, run_ranks
from step_builder import StepBuilder
from weft import errors, host_processes, knobs, torch_adapter
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, group_of
from weft.inductor.compiler import schedule_of
from weft.inductor.cost.build_task_graph import build
from weft.inductor.cost.cluster import Cluster, load_cluster
from weft.inductor.cost.collective_cost import collective_of
from weft.inductor.cost.simulate import simulate
from weft.inductor.cost.task_graph import Kind
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.collectives import ALL_GATHER, CollectiveOp, register
from weft.inductor.graph.liveness import liveness
from weft.inductor.graph.node_order import waits_of
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.number_collectives import number_collectives
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.schedule import agree_on_schedule, planner
from weft.inductor.schedule.agree_on_schedule import agree_on_decisions, in_captured_order, scheduled
from weft.inductor.schedule.bucket_reports import _why
from weft.inductor.schedule.communicators import assign_communicators
from weft.inductor.schedule.decisions import Decisions, structure
from weft.inductor.schedule.planner import Schedule, ScheduleCandidate, follow, schedule

H200 = load_cluster("h200x8")
aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Node = torch.fx.Node
GIB = 2**30


def kinds(step: StepGraph) -> Counter[str]:
    return Counter(str(node.target).split(".")[1] for node in step.collectives())


# ---- of a Llama of 8 B parameters in four layers, on eight GPUs


@pytest.fixture(scope="module", autouse=True)
def no_peers() -> Iterator[None]:
    """A library carries everything; see test_set_aside.py for transports over peers."""
    with knobs.override(transports="nccl"):
        yield


@pytest.fixture(scope="module")
def llama() -> Iterator[StepGraph]:
    """Its step as a graph of kernels."""
    with weft.fake_world(8), garbage_collection_paused():
        yield kernel_graph(run_passes(sharded_llama(4, 4096, clip=True), KERNEL_PASSES))


@pytest.fixture(scope="module")
def unbounded(llama: StepGraph) -> Schedule:
    return schedule(llama, H200)


def gathers(found: Schedule) -> int:
    return sum(len(report.members) for report in found.reports if report.kind == "all_gather")


def test_without_a_limit_everything_is_gathered_once(llama: StepGraph, unbounded: Schedule) -> None:
    parameters = sum(entry.role.value == "parameter" for entry in llama.inputs)
    assert gathers(unbounded) == parameters == 39
    assert sum(len(r.members) for r in unbounded.reports if r.kind == "reduce_scatter") == parameters
    assert unbounded.limit == int(0.9 * H200.gpu.memory)


def test_a_schedule_is_faster_than_the_order_of_the_graph(llama: StepGraph, unbounded: Schedule) -> None:
    alone = simulate(build(llama, H200)[0])
    assert unbounded.simulation.seconds < 0.95 * alone.seconds
    assert unbounded.simulation.exposed_seconds < 0.5 * alone.exposed_seconds
    assert len(unbounded.reports) < 0.4 * len(llama.collectives())


def test_time_falls_and_memory_rises_with_the_limit(
    llama: StepGraph, unbounded: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_MAX_TRIAL_NODES", 0)
    peak = int(1.02 * unbounded.simulation.peak)
    with pytest.raises(errors.MemoryLimitUnreachable) as least:
        schedule(llama, H200, peak // 4)
    limits = [least.value.peak + (peak - least.value.peak) * part // 6 for part in range(7)]
    found = [schedule(llama, H200, limit) for limit in limits]
    for limit, one in zip(limits, found, strict=True):
        assert one.simulation.peak <= limit
    seconds = [one.simulation.seconds for one in found]
    for slower, faster in itertools.pairwise(seconds):
        assert faster <= slower * 1.002
    assert seconds[-1] < 0.985 * seconds[0]
    counts = [gathers(one) for one in found]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == gathers(unbounded)
    peaks = [one.simulation.peak for one in found]
    assert peaks == sorted(peaks)


def test_the_predicted_peak_is_that_of_the_scheduled_graph(unbounded: Schedule) -> None:
    assert liveness(unbounded.step).peak == unbounded.simulation.peak
    issued = [task.name for task in unbounded.simulation.task_graph.tasks]
    assert issued == [node.name for node in unbounded.step.graph.nodes]


def test_decisions_make_the_same_schedule_of_an_equal_graph(llama: StepGraph, unbounded: Schedule) -> None:
    limit = int(0.85 * unbounded.simulation.peak)
    with mock.patch.object(planner, "_MAX_TRIAL_NODES", 0):
        made = schedule(llama, H200, limit)
    assert made.decisions.regathers
    assert made.decisions.bucket_positions
    told = Decisions.read(made.decisions.text())
    assert told == made.decisions
    same = follow(llama.copy(), H200, told, limit)
    assert same.limit == made.limit == limit
    assert str(same.step) == str(made.step)
    assert same.reports == made.reports
    assert len(made.decisions.text()) < 10 * len(llama)


def test_the_default_limit_is_reported_whoever_decided(llama: StepGraph, unbounded: Schedule) -> None:
    followed = follow(llama.copy(), H200, unbounded.decisions)
    assert followed.limit == unbounded.limit == planner.usable_memory(H200)


def test_a_rank_that_follows_predicts_when_it_is_asked(llama: StepGraph, unbounded: Schedule) -> None:
    unasked = mock.patch.object(planner, "simulated", side_effect=AssertionError("nobody has asked"))
    with knobs.override(verify_graphs=False), unasked:  # the verifier compares with the predicted peak
        followed = follow(llama.copy(), H200, unbounded.decisions)
        kept = followed.without_nodes()
    assert str(followed.step) == str(unbounded.step)
    assert kept.simulation.seconds == unbounded.simulation.seconds
    assert kept.simulation.peak == unbounded.simulation.peak
    assert kept.reports == unbounded.reports
    assert not kept.nodes
    assert len(followed.nodes) == len(unbounded.nodes)


def planner_within(llama: StepGraph, limit: int, cluster: Cluster = H200) -> planner._Planner:
    return planner._Planner(llama, cluster, limit, keep_bits=False)


def gathered_once(llama: StepGraph) -> int:
    """The bytes of the low-memory order that gathers each parameter once, without anything that is prefetched."""
    with torch_adapter.only_mode():
        return int(planner_within(llama, H200.gpu.memory).gaps._peaks[0])


def test_without_room_for_prefetching_the_fewest_regathers_are_tried_first(llama: StepGraph) -> None:
    # Applied, with buckets, the fewest regathers need a little more than alone: the limit leaves a hundredth for it.
    limit = int(0.945 * gathered_once(llama))
    with torch_adapter.only_mode():
        within = planner_within(llama, limit)
        within.reserve = limit  # no regathers leave that much
        fewest = within.gaps.fewest(limit)
        assert fewest is not None
        assert 0 < fewest < len(within.gaps)
        found = within.few_regathers(1.0)
    assert found is not None
    assert found.applied.candidate == within.candidate(fewest, 1.0)
    assert found.simulation.peak <= limit
    assert within.evaluated == 1


@pytest.mark.parametrize("enough", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("seconds", [1.0, 1.02])
def test_what_a_lower_target_skips_is_tried_before_more_regathers_are_taken(
    llama: StepGraph, enough: int, seconds: float
) -> None:
    """``enough`` more regathers than the first estimate would do; the target falls by those of twelve and more. What
    was skipped is tried only where fewer regathers can gain time: orders that exceed the limit take one second."""
    # Twelve regathers after the first must lower the peak, and leave more that lower it further.
    limit = int(0.94 * gathered_once(llama))
    with torch_adapter.only_mode():
        within = planner_within(llama, limit)
        first = within.gaps.fewest(limit - within.reserve)
        assert first
        twelve = within.gaps._peaks[first] - within.gaps._peaks[first + 12]
        counts = {within.candidate(at, 1.0).regathers: at for at in range(first, len(within.gaps) + 1)}

        def evaluate(candidate: ScheduleCandidate, **how: Any) -> mock.Mock | None:
            within.excess, within.too_large_seconds = twelve, 1.0
            at = counts[candidate.regathers]
            return mock.Mock(at=at, simulation=mock.Mock(seconds=seconds)) if at >= first + enough else None

        with mock.patch.object(within, "evaluate", evaluate):
            found: Any = within.few_regathers(1.0)
    skipped = seconds == 1.0 and enough > 0
    assert found.at == first + enough if not skipped else found.at >= first + 12


def test_what_hardly_fits_beside_the_arena_of_the_last_order_is_not_searched(llama: StepGraph) -> None:
    # Applied, with buckets, the fewest regathers need a little more than alone: the limit leaves a hundredth for it.
    limit = int(0.945 * gathered_once(llama))
    searches = mock.Mock(side_effect=planner.search_order)
    with torch_adapter.only_mode(), mock.patch.object(planner, "search_order", searches):
        within = planner_within(llama, limit)
        fewest = within.gaps.fewest(limit)
        assert fewest is not None
        within.unpredicted = limit
        assert within.evaluate(within.candidate(fewest, 1.0), far_bytes=limit // 128) is None
        assert within.estimated
        assert not searches.called
        # The last resort is searched for all that: arenas differ between orders.
        found = within.few_regathers(1.0)
        most = within.candidate(len(within.gaps), 1.0)
    assert searches.called
    assert found is not None
    assert found.applied.candidate.regathers == most.regathers


def test_buckets_get_smaller_before_they_are_given_up(llama: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between distant nodes, few large buckets are fastest. A limit with room for smaller ones only gets those."""
    monkeypatch.setattr(planner, "_MAX_TRIAL_NODES", 0)
    distant = tuple(replace(each, latency=1e-2) if each.crosses else each for each in H200.transports)
    cluster = replace(H200, gpus_per_node=1, node=None, transports=distant)
    with torch_adapter.only_mode():
        within = planner_within(llama, H200.gpu.memory, cluster)
        unmerged = within.evaluate(within.candidate(len(within.gaps), 0.0))
    assert unmerged is not None
    least = unmerged.applied.low_memory_peak
    room = within.reserve // 3
    found = schedule(llama, cluster, least + room)
    assert found.simulation.peak <= least + room
    assert found.simulation.seconds < 0.6 * unmerged.simulation.seconds
    merged = [report.bytes for report in found.reports if report.kind == "all_gather" and len(report.members) > 1]
    assert merged
    assert max(merged) <= within.reserve / 6


@pytest.mark.usefixtures("llama")  # its world
def test_what_the_host_computes_takes_no_time_of_the_clock_that_buckets_are_cut_by() -> None:
    """As in the task graph: numbers on the CPU are ahead of the compute stream."""
    b = StepBuilder()
    x, shard, number = b.input(torch.ones(64, 64)), b.input(torch.ones(8, 64)), b.input(torch.tensor(1.0))
    host = [number]
    for _ in range(50):
        host.append(b.call(aten.mul.Tensor, host[-1], 2.0))
    start = b.call(ALL_GATHER.op, shard, 8, "dp")
    b.returns(b.call(aten.mm.default, x, b.call(WAIT, start, val=start.meta["val"])), host[-1])
    cut = mock.Mock(side_effect=planner.cut_into_buckets)
    with torch_adapter.only_mode(), mock.patch.object(planner, "cut_into_buckets", cut):
        step = retarget(b.build({"dp": dist.group.WORLD.group_name}), "cuda", host.__contains__)
        planner_within(step, H200.gpu.memory).bucket_entries(step, 1.0)
        tasks = build(step, H200)[0].tasks
    ((_, clock, *_), _) = cut.call_args
    assert clock[-1] == pytest.approx(sum(task.seconds for task in tasks if task.kind is Kind.COMPUTE))
    assert 0 < clock[-1] < 10 * H200.gpu.launch_latency


def test_decisions_for_another_graph_are_refused(llama: StepGraph, unbounded: Schedule) -> None:
    other = llama.copy()
    nodes = list(other.graph.nodes)
    nodes[-2].prepend(nodes[len(nodes) // 2])
    with pytest.raises((errors.MalformedGraph, RuntimeError, KeyError)):
        follow(other, H200, unbounded.decisions)


def test_elements_and_waits_stand_together(unbounded: Schedule) -> None:
    """So that lists and what collectives read can go."""
    place = {node: at for at, node in enumerate(unbounded.step.graph.nodes)}
    for call in unbounded.step.collectives():
        waits = [place[wait] for wait in waits_of(call)]
        assert waits == list(range(waits[0], waits[0] + len(waits)))
    for node, at in place.items():
        elements = sorted(place[user] for user in node.users if user.target is operator.getitem)
        below = sum(user.target is operator.getitem for element in node.users for user in element.users)
        assert not elements or elements[-1] <= at + len(elements) + below


def test_reports_and_logs_explain_the_buckets(
    unbounded: Schedule, llama: StepGraph, caplog: pytest.LogCaptureFixture
) -> None:
    members = [member for report in unbounded.reports for member in report.members]
    assert members.count("model.blocks.3.down.weight") == 2  # gathered, and its gradient reduced
    merged = [report for report in unbounded.reports if len(report.members) > 1]
    assert merged
    assert all("less than one call each" in report.why for report in merged)
    with mock.patch.object(planner, "_MAX_TRIAL_NODES", 0), caplog.at_level(logging.DEBUG, "weft.inductor.schedule"):
        bounded = schedule(llama, H200, int(0.85 * unbounded.simulation.peak))
    assert any("gathered again" in report.why for report in bounded.reports)
    assert "scheduled" in caplog.text
    assert "buckets" in caplog.text


def test_a_bucket_saves_what_its_own_transport_takes_for_single_calls(llama: StepGraph) -> None:
    """Not NCCL, which is slow here; and a collective of two tensors with one result has sizes, too."""
    slow = replace(H200, transports=tuple(replace(t, latency=1e-2) if t.crosses else t for t in H200.transports))
    push = next(each for each in slow.transports if each.name == "push")
    joined = lambda xs, size, group: xs[0].new_empty((size * sum(len(x) for x in xs), 4))
    with operations(joined=("(Tensor[] xs, int group_size, str group_name) -> Tensor", joined)) as ops:
        register(CollectiveOp(ops.joined.default, ALL_GATHER.kind))
        for op, whole in ((ALL_GATHER.coalesced, False), (ops.joined.default, True)):
            b = StepBuilder()
            start = b.call(op, [b.input(torch.empty(4096, 4)) for _ in range(2)], 8, "dp")
            results = [start] if whole else b.pick(start)
            b.returns(*[b.call(WAIT, each, val=each.meta["val"]) for each in results])
            sent = collective_of(b.build({"dp": dist.group.WORLD.group_name}), start)
            saved = {name: int(_why(slow, sent, start, name).split()[0]) for name in ("nccl", "push")}
            assert saved["push"] == pytest.approx((push.latency - push.per_member) * 1e6, abs=1)
            assert saved["nccl"] > 9_000


def test_it_takes_near_linear_time_in_the_layers(llama: StepGraph) -> None:
    """`llama`: its fake world of eight ranks."""

    @functools.cache
    def made(layers: int) -> StepGraph:
        return kernel_graph(run_passes(sharded_llama(layers, 4096, clip=True), KERNEL_PASSES))

    def of(layers: int) -> Callable[[], object]:
        step = made(layers).copy()  # so that nothing is known of its nodes
        return lambda: schedule(step, H200)

    with mock.patch.object(planner, "_MAX_TRIAL_NODES", 0):
        assert_near_linear(of, 2)


def test_the_same_step_gets_the_same_schedule(llama: StepGraph) -> None:
    with mock.patch.object(planner, "_MAX_TRIAL_NODES", 0):
        one, other = schedule(llama, H200), schedule(llama.copy(), H200)
    assert one.decisions == other.decisions


def test_an_impossible_default_is_scheduled_all_the_same(
    llama: StepGraph, unbounded: Schedule, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asked for a limit, and the GPU is too small."""
    import dataclasses

    small = dataclasses.replace(H200, gpu=dataclasses.replace(H200.gpu, memory=unbounded.simulation.peak // 4))
    found = schedule(llama, small)
    assert found.simulation.peak < unbounded.simulation.peak
    assert "may need more memory" in caplog.text


# ---- what has no gathers


def test_a_step_that_does_not_communicate_is_held_to_its_limit() -> None:
    b = StepBuilder()
    x: Any = b.input(torch.ones(1024))
    for _ in range(3):
        x = b.call(torch.ops.aten.exp.default, x)
    b.returns(x)
    step = b.build()
    assert schedule(step, H200, 3 * 4096).simulation.peak == 3 * 4096
    with pytest.raises(errors.MemoryLimitUnreachable):
        schedule(step, H200, 2 * 4096)


# ---- streams


def test_streams_are_groups_of_the_graph(llama: StepGraph, unbounded: Schedule) -> None:
    step = assign_communicators(unbounded.step.copy())
    streams = Counter(group_of(node) for node in step.check().collectives())
    assert set(streams) == {"world/gather", "world/reduce"}
    assert step.groups["world/gather"] == step.groups["world/reduce"] == step.groups["world"]
    assert kinds(step) == kinds(unbounded.step)


# ---- random steps, on processes


def random_schedules(rank: int, world: int, seeds: range) -> list[str]:
    """What goes wrong in schedules of random steps, under limits between the least and the most they need."""
    wrong = []
    groups = dict.fromkeys(GROUPS, dist.group.WORLD.group_name)
    for seed, (step, shapes) in zip(seeds, the_steps(seeds, world, groups), strict=True):
        expected = outcome(compile_aten(step.copy()), shapes, rank)
        number_collectives(step)
        made = {"captured order": in_captured_order(step.copy()), "free": schedule(step, H200, keep_bits=True).step}
        made_by = planner._Planner(step, H200, 0, keep_bits=True)
        made_by.evaluate(made_by.candidate(len(made_by.gaps), 0.0))
        least, most = made_by.excess, schedule(step, H200, keep_bits=True).simulation.peak
        for limit in {least, max(least, (least + most) // 2)}:
            found = schedule(step, H200, limit, keep_bits=True)
            made[f"limit {limit}"] = found.step
            if found.simulation.peak > limit:
                wrong.append(f"{found.simulation.peak} bytes where {limit} were allowed, seed {seed}")
        for name, changed in made.items():
            got = outcome(compile_aten(assign_communicators(changed)), shapes, rank)
            if not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)):
                wrong.append(f"{name}, seed {seed}")
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "seeds"), [(2, range(5)), (4, range(100, 102))])
def test_random_steps_keep_their_bits(world: int, seeds: range) -> None:
    assert run_ranks(random_schedules, world, seeds, timeout=170) == [[]] * world


# ---- training, compiled, on processes


class Toy(nn.Module):
    """Layers of uneven width: over four ranks some shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def training(world: int, reshard: bool) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (world,))
    model = Toy()
    for layer in model.layers:
        weft.fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    weft.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


def as_on_gpus() -> Any:
    """Compile what is on a CPU as if it were on GPUs, with ATen's kernels."""
    return mock.patch("weft.inductor.compiler.device_kind", return_value="cuda")


def trains(
    rank: int, world: int, reshard: bool, limit: float | None, rows: list[int], differ: bool = False
) -> tuple[bool, int, float, Any]:
    """Whether three compiled steps leave what three eager ones do; how often parameters are gathered; the peak; the
    order of the collectives."""
    batches = [torch.randn(rows[rank], 6) for _ in range(3)]
    outcomes, found = [], None
    for compiled in (False, True):
        step, model = training(world, reshard)
        run = weft.compile(step, mode="bitwise", memory_limit=limit) if compiled else step
        other = partial(structure) if not (differ and rank) else lambda graph: "another"
        with (
            knobs.override(cluster="h200x8", disable_passes="pack"),
            as_on_gpus(),
            mock.patch.object(agree_on_schedule, "structure", other),
        ):
            losses = [run(batch).detach().clone() for batch in batches]
        outcomes.append([*losses, *(p.to_local().detach().clone() for p in model.parameters())])  # type: ignore
        if compiled:
            found = schedule_of(run.entries[0].program)
            source = run.entries[0].program.source
    same = all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    if found is None:
        return same, 0, 0.0, [line.split("(")[0].split()[-1] for line in source.splitlines() if "_c10d_" in line]
    return same, gathers(found), found.simulation.peak, [(report.kind, report.members) for report in found.reports]


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "reshard"), [(2, True), (2, False), (4, True)])
def test_a_compiled_step_trains_as_eager_bit_for_bit(world: int, reshard: bool) -> None:
    free = run_ranks(trains, world, reshard, None, [3] * world, timeout=120)
    assert all(same for same, *_ in free)
    assert {count for _, count, *_ in free} == {16}  # each parameter once, whatever the user asked for
    peak = max(held for _, _, held, _ in free)
    tight = run_ranks(trains, world, reshard, (peak - 600) / GIB, [3] * world, timeout=120)
    assert all(same for same, *_ in tight)
    assert all(held <= peak - 600 for _, _, held, _ in tight)
    assert all(order == tight[0][3] for *_, order in tight)


@pytest.mark.gloo
def test_ranks_with_other_batches_follow_rank_0() -> None:
    found = run_ranks(trains, 2, True, None, [3, 300], timeout=120)
    assert all(same for same, *_ in found)
    assert found[0][3] == found[1][3]
    assert found[0][2] != found[1][2]


@pytest.mark.gloo
def test_ranks_with_other_kernels_keep_the_captured_order() -> None:
    found = run_ranks(trains, 2, True, None, [3, 3], True, timeout=120)
    assert all(same for same, *_ in found)
    assert found[0][3] == found[1][3]
    assert found[0][3]


def asks_its_peers(rank: int, world: int, elsewhere: int | None) -> tuple[list[str], list[str], int]:
    """What a schedule lets carry, what is called, and how often a schedule was made, where a rank is on a host of its
    own and NCCL is slow."""
    if rank == elsewhere:
        host_processes.host = lambda: "elsewhere 1"  # type: ignore[assignment]
    slow = [replace(each, latency=1e-2) if each.crosses else each for each in H200.transports]
    step, _ = training(world, True)
    graph = run_passes(weft.capture(step, torch.randn(3, 6)))
    number_collectives(graph)
    name, patched = ("follow", follow) if rank else ("schedule", schedule)
    with mock.patch.object(agree_on_schedule, name, wraps=patched) as making:
        found = [scheduled(graph, replace(H200, transports=tuple(slow))) for _ in range(2)]
    made, report = found[-1]
    assert report is not None
    return (
        sorted({bucket.transport for bucket in report.reports}),
        sorted({type(node.target).__name__ for node in made.collectives()}),
        making.call_count,
    )


@pytest.mark.gloo
def test_chosen_transports_over_peers_are_applied() -> None:
    for transports, calls, count in run_ranks(asks_its_peers, 2, None, timeout=120):
        assert transports != ["nccl"]
        assert any(call.startswith(("Peer", "Copy")) for call in calls)
        assert count == 2


@pytest.mark.gloo
def test_ranks_that_cannot_share_memory_schedule_again_and_remember() -> None:
    for transports, calls, count in run_ranks(asks_its_peers, 2, 1, timeout=120):
        assert transports == ["nccl"]
        assert calls == ["OpOverload"]
        assert count == 3


def calibrated_on_rank_0_only(rank: int, world: int) -> tuple[list[str], float]:
    """What carries, and how long a step takes, where only rank 0 has calibrated."""
    own = replace(H200, transports=tuple(replace(each, latency=1e-2) for each in H200.transports if each.crosses))
    step, _ = training(world, True)
    graph = run_passes(weft.capture(step, torch.randn(3, 6)))
    number_collectives(graph)
    mine = tuple(replace(each, name="pull_7") if each.name == "pull" else each for each in H200.transports)
    _, found = scheduled(graph, own if rank else replace(H200, transports=mine))
    assert found is not None
    return [bucket.transport for bucket in found.reports], found.simulation.seconds


@pytest.mark.gloo
def test_ranks_go_by_the_description_of_rank_0() -> None:
    first, other = run_ranks(calibrated_on_rank_0_only, 2, timeout=120)
    assert first == other


@pytest.mark.gloo
def test_a_limit_that_cannot_be_met_is_an_error_on_every_rank() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(trains, 2, True, 1000 / GIB, [3, 3], timeout=120)
    assert len(caught.value.errors) == 2
    assert str(caught.value).count("no order of the step's operations fits memory_limit=") >= 2


def meets(rank: int, world: int, absent: int, fails: bool) -> str:
    def decide(held: Collection[int]) -> Decisions:
        if fails:
            raise RuntimeError("no idea")
        return Decisions(bucket_positions=((1, 2),), order=(0, 1, 2))

    if rank == absent:
        time.sleep(2)
        return "absent"
    with knobs.override(peer_timeout_s=1.0):
        try:
            return str(agree_on_decisions("the same", decide))
        except (errors.WeftError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.gloo
def test_ranks_that_do_not_come_are_named() -> None:
    first, second, third = run_ranks(meets, 3, 1, False)
    assert "ScheduleTimeout: rank 0 waited 1 s for the schedule of the step, and rank 1 did not come" in first
    assert second == "absent"
    assert "ScheduleLost" in third or "ScheduleTimeout: rank 2 waited" in third
    found = run_ranks(meets, 2, 0, False)
    assert "ScheduleTimeout: rank 1 waited 1 s for the schedule of the step, and rank 0 did not come" in found[1]


@pytest.mark.gloo
def test_an_error_on_rank_0_is_raised_on_all_ranks() -> None:
    first, second = run_ranks(meets, 2, -1, True)
    assert first == "RuntimeError: no idea"
    assert "ScheduleLost: rank 0 could not make the schedule of the step" in second
    assert "no idea" in second


@pytest.mark.gloo
def test_all_ranks_get_what_rank_0_decides_and_nothing_stays_in_the_store() -> None:
    found = run_ranks(meets_twice, 3)
    assert found[0] == found[1] == found[2]


def meets_twice(rank: int, world: int) -> list[str]:
    said = [meets(rank, world, -1, False) for _ in range(2)]
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    left = [f"weft/schedule/{at}/{key}" for at in (1, 2) for key in ("decisions", "left", f"structure/{rank}")]
    return [*said, str(store.check(left[:1]) or any(store.check([key]) for key in left))]


def test_alone_a_rank_decides_for_itself() -> None:
    step = StepBuilder()
    x = step.input(torch.ones(4))
    step.returns(step.call(torch.ops.aten.exp.default, x))
    made, found = scheduled(step.build(), H200)
    assert found is not None
    assert len(made) == 3
    assert copy.copy(found.decisions) == found.decisions


@pytest.mark.parametrize("rows", [0, 128])
def test_a_cheaper_transport_that_begins_later_breaks_nothing(llama: StepGraph, rows: int) -> None:
    """What carries nothing at all may be slower than what carries a little, and there may be nothing to carry."""
    assert llama.collectives()  # of the fake world that it was captured in, which is there as long
    pull = next(each for each in H200.transports if each.name == "pull")
    others = tuple(each for each in H200.transports if each is not pull)
    cluster = replace(H200, transports=(*others, replace(pull, latency=14.5e-6)))

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        outs = [torch.empty(rows, 40, dtype=x.dtype) for _ in range(2)]
        for out in outs:
            dist.reduce_scatter_tensor(out, x.exp())
        return [out + 1 for out in outs]

    with knobs.override(transports="all"):
        graph = weft.capture(step, torch.zeros(8 * rows, 40, dtype=torch.bfloat16))
        made = schedule(retarget(graph.copy(), "cuda:0"), cluster)
    assert sum(len(bucket.members) for bucket in made.reports) == 2
