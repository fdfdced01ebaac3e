"""Merged collectives: the same results, fewer calls, never a cycle; and which are merged."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_steps import GROUPS, outcome, the_steps

from harness import run_ranks
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, group_of
from weft.capture.step_interface import Role
from weft.inductor.graph.collectives import collective_op
from weft.inductor.graph.node_order import waits_of
from weft.inductor.graph.sizes import node_bytes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.schedule import bucketing
from weft.inductor.schedule.bucketing import (
    BucketEntry,
    Price,
    balanced_bucket_bytes,
    bucketable_sequences,
    cut_into_buckets,
    merge_buckets,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Node = torch.fx.Node

LATENCY = 1.0


def call(b: StepBuilder, target: Any, value: Node, *args: Any) -> Node:
    start = b.call(target, value, *args)
    return b.call(WAIT, start, val=start.meta["val"])


def gathered(b: StepBuilder, shard: Node, group: str = "dp") -> Node:
    return call(b, c10d.all_gather_into_tensor.default, shard, 2, group)


def scattered(b: StepBuilder, whole: Node, group: str = "dp") -> Node:
    return call(b, c10d.reduce_scatter_tensor.default, whole, "sum", 2, group)


def everything(step: StepGraph, most: int = 1 << 40, keep_bits: bool = False) -> list[list[BucketEntry]]:
    """Buckets as large as they can be: calls take their latency, and computation nothing."""
    clock = [0.0] * (len(step) + 1)
    buckets = (
        cut_into_buckets(of, clock, sizes(of), lambda size, members: LATENCY, most)
        for of in bucketable_sequences(step, keep_bits=keep_bits)
    )
    return [bucket for of in buckets for bucket in of]


def sizes(of: Sequence[BucketEntry]) -> list[int]:
    return [node_bytes(member.start) for member in of]


def merged(step: StepGraph, keep_bits: bool = False) -> StepGraph:
    return merge_buckets(step, everything(step, keep_bits=keep_bits)).check()


def calls(step: StepGraph) -> Counter[str]:
    return Counter(str(node.target).split(".")[1] for node in step.collectives())


# ---- which partial cuts are kept


@pytest.mark.parametrize("seed", range(20))
def test_the_cuts_that_are_kept_are_those_that_no_other_dominates(seed: int) -> None:
    random_ = random.Random(seed)
    # Few different numbers, so that many cuts are equal in one respect or in all.
    cuts: list[Any] = [(*(float(random_.randrange(6)) for _ in range(3)), at, None) for at in range(60)]
    ordered = sorted(cuts, key=lambda cut: cut[:3])
    expected = [
        cut
        for at, cut in enumerate(ordered)
        if not any(other[1] <= cut[1] and other[2] <= cut[2] for other in ordered[:at])
    ]
    assert [tuple(cut) for cut in bucketing._best(cuts)] == expected


# ---- what is merged


def test_gathers_of_shards_become_one_call_before_the_first() -> None:
    b = StepBuilder()
    shards = [b.input(torch.ones(2, 4)) for _ in range(3)]
    x = b.input(torch.ones(4, 4), Role.BATCH)
    for shard in shards:
        x = b.call(aten.mm.default, x, gathered(b, shard))
    b.returns(x)
    step = merged(b.build({"dp": "0"}))
    assert calls(step) == {"all_gather_into_tensor_coalesced": 1}
    (start,) = step.collectives()
    assert list(start.args[0]) == shards  # type: ignore[arg-type]
    assert [node.target for node in waits_of(start)] == [WAIT] * 3
    order = list(step.graph.nodes)
    first = order.index(waits_of(start)[0])
    assert order[first : first + 3] == waits_of(start)


def test_dependent_collectives_are_not_merged() -> None:
    b = StepBuilder()
    shard = b.input(torch.ones(4, 4))
    once = scattered(b, shard)
    twice = scattered(b, b.call(aten.cat.default, [once, once]))
    b.returns(twice)
    assert calls(merged(b.build({"dp": "0"}))) == {"reduce_scatter_tensor": 2}


def test_a_write_to_the_operand_of_the_first_keeps_the_second_out() -> None:
    """Merged, the first would start after the write, which could then not be in place."""
    b = StepBuilder()
    shards = [b.input(torch.ones(2, 4)) for _ in range(2)]
    x = b.input(torch.ones(2, 4), Role.BATCH)
    changed = [b.write(aten.add_.Tensor, shard, x) for shard in shards]
    first = gathered(b, changed[0])
    b.update(shards[0], b.write(aten.mul_.Scalar, changed[0], 0.5))
    second = gathered(b, changed[1])
    b.update(shards[1], changed[1])
    b.returns(first, second)
    assert calls(merged(b.build({"dp": "0"}))) == {"all_gather_into_tensor": 2}


def test_two_kinds_that_need_each_other_crosswise_never_make_a_cycle() -> None:
    """a1 -> b1 and b2 -> a2: either pair may be merged, not both."""
    b = StepBuilder()
    x, y = b.input(torch.ones(4, 4), Role.BATCH), b.input(torch.ones(4, 4), Role.BATCH)
    a1 = scattered(b, x)
    b1 = call(b, c10d.all_reduce.default, b.call(aten.neg.default, a1), "sum", "dp")
    b2 = call(b, c10d.all_reduce.default, b.call(aten.neg.default, y), "sum", "dp")
    a2 = scattered(b, b.call(aten.exp.default, b2))
    b.returns(b1, a2)
    assert len(merged(b.build({"dp": "0"})).collectives()) == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda b, shard: gathered(b, shard, "other"),
        lambda b, shard: gathered(b, b.call(aten._to_copy.default, shard, dtype=torch.bfloat16)),
        lambda b, shard: call(b, c10d.all_reduce.default, shard, "sum", "dp"),
        lambda b, shard: gathered(b, b.call(aten.mul.Tensor, shard, b.batch)),
    ],
    ids=["group", "dtype", "operation", "needs a batch"],
)
def test_only_like_is_merged(other: Any) -> None:
    b = StepBuilder()
    shard, b.batch = b.input(torch.ones(2, 4)), b.input(torch.ones(2, 4), Role.BATCH)  # type: ignore[attr-defined]
    b.returns(gathered(b, shard), other(b, shard))
    assert len(merged(b.build({"dp": "0", "other": "1"})).collectives()) == 2


def test_all_reduces_in_place_stay_in_place() -> None:
    b = StepBuilder()
    values = [b.call(aten.neg.default, b.input(torch.ones(4), Role.BATCH)) for _ in range(2)]
    sums = [b.write(c10d.all_reduce_.default, value, "sum", "dp") for value in values]
    b.returns(*(b.call(WAIT, each, val=each.meta["val"]) for each in sums))
    step = merged(b.build({"dp": "0"}))
    assert calls(step) == {"all_reduce_coalesced": 1}
    assert "all_reduce_coalesced_(" in compile_aten(step).source
    assert "clone" not in compile_aten(step).source


def test_effects_and_random_numbers_keep_their_order() -> None:
    """A reduction whose result a call with effects gets cannot wait for one behind that call."""
    b = StepBuilder()
    x = b.input(torch.ones(4, 4), Role.BATCH)
    first = scattered(b, x)
    b.effect(print, first)
    second = scattered(b, b.call(aten.neg.default, x))
    b.returns(second)
    assert calls(merged(b.build({"dp": "0"}))) == {"reduce_scatter_tensor": 2}


# ---- how many


def test_a_gradient_counts_from_when_it_is_made() -> None:
    """A wrapper hands over what a block made at the end of it."""
    b = StepBuilder()
    x = b.input(torch.ones(4, 4), Role.BATCH)
    early, late = b.call(aten.neg.default, x), b.call(aten.exp.default, x)
    shown = b.call(aten.view.default, early, [4, 4])
    b.returns(scattered(b, late), scattered(b, shown))
    step = b.build({"dp": "0"})
    place = {node.target: at for at, node in enumerate(step.graph.nodes)}
    (found,) = bucketable_sequences(step)
    assert [member.ready_at for member in found] == [place[aten.neg.default] + 1, place[aten.exp.default] + 1]
    assert [member.position for member in found] == sorted((member.position for member in found), reverse=True)


def members(ready: Sequence[float], use: Sequence[float], early: bool = False) -> tuple[list[BucketEntry], list[float]]:
    """Members of a graph in which something happens at each of these times; a clock for it."""
    times = sorted({*ready, *use})
    graph = torch.fx.Graph()
    made = [
        BucketEntry(graph.placeholder(f"m{at}"), place, place, len(times), times.index(needed), early)
        for at, (place, needed) in enumerate(zip(map(times.index, ready), use, strict=True))
    ]
    return made, times


def lane_end(buckets: Sequence[Sequence[int]], ready: Sequence[float], seconds: Sequence[float]) -> float:
    """When a stream has carried buckets, each as soon as its last member is ready."""
    end = -math.inf
    for bucket in buckets:
        end = max(end, max(ready[at] for at in bucket)) + LATENCY + sum(seconds[at] for at in bucket)
    return end


def cuts(count: int) -> list[list[list[int]]]:
    found = []
    for chosen in itertools.product((False, True), repeat=count - 1):
        parts = [[0]]
        for at, cut in enumerate(chosen, 1):
            if cut:
                parts.append([at])
            else:
                parts[-1].append(at)
        found.append(parts)
    return found


def chosen(ready: list[float], use: list[float], seconds: list[float], early: bool = False) -> list[list[int]]:
    made, clock = members(ready, use, early)
    number = {member.start: at for at, member in enumerate(made)}
    cost = lambda size, members: LATENCY + size / 10
    found = cut_into_buckets(made, clock, [round(10 * each) for each in seconds], cost, 1 << 30)
    return [[number[member.start] for member in bucket] for bucket in found]


def some(chance: random.Random) -> tuple[list[float], list[float]]:
    """When members are ready, and how long they take alone, latency left out."""
    ready = list(itertools.accumulate(chance.choice([0.1, 0.5, 1.5, 4.0]) for _ in range(9)))
    return ready, [chance.choice([0.1, 0.5, 2.0]) for _ in ready]


@pytest.mark.parametrize("seed", range(40))
def test_reductions_end_as_early_as_any_partition_lets_them(seed: int) -> None:
    """What is late anyway, against all partitions."""
    ready, seconds = some(random.Random(seed))
    found = lane_end(chosen(ready, [0.0] * len(ready), seconds), ready, seconds)
    assert found == pytest.approx(min(lane_end(parts, ready, seconds) for parts in cuts(len(ready))))


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_that_is_as_little_late_takes_fewer_calls(seed: int) -> None:
    """Against all partitions, with results that are needed a while after they are ready."""
    chance = random.Random(seed)
    ready, seconds = some(chance)
    due = [when + chance.choice([3.0, 6.0, 20.0]) for when in ready]

    def late(parts: Sequence[Sequence[int]]) -> float:
        ends = [lane_end(parts[: at + 1], ready, seconds) for at in range(len(parts))]
        return max(0.0, *(end - min(due[m] for m in part) for end, part in zip(ends, parts, strict=True)))

    found = chosen(ready, due, seconds)
    best = min(((late(parts), len(parts)) for parts in cuts(len(ready))), key=lambda it: (round(it[0], 9), it[1]))
    assert (late(found), len(found)) == (pytest.approx(best[0]), best[1])


@pytest.mark.parametrize("seed", range(20))
def test_gathers_are_reductions_read_backwards(seed: int) -> None:
    """Those needed at the times at which the others are ready, counted from the other end; all are late."""
    ready, seconds = some(random.Random(seed))
    reductions = chosen(ready, [-100.0] * len(ready), seconds)
    last = len(ready) - 1
    needed = [-100.0 - when for when in reversed(ready)]
    gathers = chosen([-200.0] * len(ready), needed, seconds[::-1], early=True)
    backwards = [[last - at for at in reversed(bucket)] for bucket in reversed(gathers)]
    assert lane_end(backwards, ready, seconds) == pytest.approx(lane_end(reductions, ready, seconds))
    assert len(backwards) == len(reductions)


def test_collectives_with_late_uses_are_merged() -> None:
    assert chosen([0.0, 1.0, 2.0], [100.0] * 3, [0.1] * 3) == [[0, 1, 2]]


def test_collectives_with_early_uses_are_not_merged_with_later_ones() -> None:
    assert chosen([0.0, 5.0, 10.0], [2.0, 7.0, 12.0], [0.1] * 3) == [[0], [1], [2]]


def test_the_first_gathers_of_a_step_do_not_wait_for_the_rest() -> None:
    """Needed one after the other from the beginning on: the first by itself, so that it is there soonest."""
    found = chosen([0.0] * 4, [0.0, 10.0, 20.0, 30.0], [2.0] * 4, early=True)
    assert found[0] == [0]
    assert len(found) < 4


def test_buckets_are_no_larger_than_asked() -> None:
    made, clock = members([0.0] * 10, [100.0] * 10)
    found = cut_into_buckets(made, clock, [10] * 10, lambda size, members: LATENCY, 30)
    assert [len(bucket) for bucket in found] == [3, 3, 3, 1]


# ---- random steps


def random_join(step: StepGraph, seed: int, keep_bits: bool = False) -> StepGraph:
    """Buckets chosen by chance among those that may be."""
    chance = random.Random(seed)
    clock = list(itertools.accumulate(chance.random() for _ in range(len(step) + 1)))
    latency, rate, most = chance.random() * 4, chance.random(), chance.choice([64, 200, 1 << 30])
    cost = lambda size, members: latency + rate * size / 64
    every = bucketable_sequences(step, keep_bits=keep_bits)
    buckets = [bucket for of in every for bucket in cut_into_buckets(of, clock, sizes(of), cost, most)]
    return merge_buckets(step, buckets)


@pytest.mark.parametrize("seed", range(60))
def test_every_collective_is_in_one_call_of_its_kind(seed: int) -> None:
    ((step, _),) = the_steps(range(seed, seed + 1), 2, dict.fromkeys(GROUPS, "0"))
    alone = Counter((node.all_input_nodes[0].name, _kind(node)) for node in step.collectives())
    changed = random_join(step.copy(), seed).check()
    found: Counter[Any] = Counter()
    for node in changed.collectives():
        given = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        found.update((value.name, _kind(node)) for value in given)  # type: ignore[union-attr]
        assert len({value.meta["val"].dtype for value in given}) == 1  # type: ignore[union-attr]
    assert found == alone
    assert str(random_join(step.copy(), seed)) == str(changed)


def _kind(node: Node) -> tuple[str, str]:
    row = collective_op(node.target)
    assert row is not None
    return str(row.op), group_of(node)


def test_random_steps_have_much_to_merge() -> None:
    """What these tests rely on."""
    merges = 0
    for step, _ in the_steps(range(60), 2, dict.fromkeys(GROUPS, "0")):
        merges += len(step.collectives()) - len(merged(step.copy()).collectives())
    assert merges > 200


def on_ranks(rank: int, world: int, seeds: range) -> list[str]:
    wrong = []
    groups = dict.fromkeys(GROUPS, dist.group.WORLD.group_name)
    for seed, (step, shapes) in zip(seeds, the_steps(seeds, world, groups), strict=True):
        expected = outcome(compile_aten(step.copy()), shapes, rank)
        chance, everything = random_join(step.copy(), seed, keep_bits=True), merged(step.copy(), keep_bits=True)
        for name, changed in (("chance", chance), ("everything", everything)):
            got = outcome(compile_aten(changed.check()), shapes, rank)
            if not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)):
                wrong.append(f"{name}, seed {seed}")
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize(("world", "steps"), [(2, 40), (4, 15)])
def test_random_steps_keep_their_bits_on_processes(world: int, steps: int) -> None:
    assert run_ranks(on_ranks, world, range(steps), timeout=150) == [[]] * world


def test_a_balanced_bucket_is_no_larger_than_all_members() -> None:
    def price(latency: float) -> Price:
        return lambda size, members: latency + size * 1e-9

    sizes = [1_000_000] * 100
    assert balanced_bucket_bytes(sizes, price(1e-3)) == pytest.approx(1e7)
    assert balanced_bucket_bytes(sizes, price(10.0)) == sum(sizes)
