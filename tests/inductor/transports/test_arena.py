"""Arena offsets: bytes are reused only after a barrier of all ranks, and arena sizes are close to the lower bound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from growth import assert_growth

from weft.inductor.transports import arena
from weft.inductor.transports.arena import ALIGNMENT, ArenaPlan, CollectiveInterval, Region, can_write, plan

# ---- the oracle: every use of memory by every rank in two steps, ordered by what the ranks wait for


@dataclass
class Trace:
    """Events of all ranks as a graph, and which bytes of whose memory they use."""

    before: list[int] = field(default_factory=list)  # of each event, the set of those before it, as bits
    uses: list[tuple[int, int, int, int, bool, str, str]] = field(default_factory=list)

    def event(self, *after: int) -> int:
        bits = 0
        for other in after:
            bits |= self.before[other] | 1 << other
        self.before.append(bits)
        return len(self.before) - 1

    def use(self, event: int, memory: int, start: int, size: int, writes: bool, who: str, what: str) -> None:
        if size:
            self.uses.append((event, memory, start, start + size, writes, who, what))

    def races(self) -> list[str]:
        found = []
        for one, two in itertools.combinations(self.uses, 2):
            a, of, begins, ends, writes, who, what = one
            b, of2, begins2, ends2, writes2, who2, what2 = two
            meet = of == of2 and begins < ends2 and begins2 < ends and (writes or writes2)
            # Each rank pushes to a part of its own.
            if meet and what != what2 and not (self.before[b] >> a & 1 or self.before[a] >> b & 1):
                found.append(f"{who} {what} and {who2} {what2}")
        return found


def trace(
    intervals: list[CollectiveInterval], pushes: list[bool], regions: list[Region], layout: ArenaPlan, ranks: int = 2
) -> Trace:
    """What all ranks do in two steps, one after the other, of the same layout."""
    out = Trace()
    begin = out.event()
    compute = [begin] * ranks
    streams: dict[str, list[int]] = {interval.stream: [begin] * ranks for interval in intervals}
    length = 1 + max([e.wait for e in intervals] + [r.last_read for r in regions])
    for step in range(2):
        ended: dict[int, list[int]] = {}
        for position in range(length):
            compute = [out.event(c) for c in compute]
            for at, region in enumerate(regions):
                for rank in range(ranks):
                    if position == region.first_write:  # by a node, or by the exchange itself ahead of its lane
                        place = rank, layout.offsets[at], region.size
                        out.use(compute[rank], *place, True, f"rank {rank}", f"computes {at} in step {step}")
            for number, interval in enumerate(intervals):
                if interval.start == position:
                    stream = streams[interval.stream]
                    for rank in range(ranks):
                        stream[rank] = out.event(stream[rank], compute[rank])
                    run_collective(out, number, pushes[number], stream, regions, layout, step)
                    ended[number] = list(stream)
                if interval.wait == position:
                    compute = [out.event(c, e) for c, e in zip(compute, ended[number], strict=True)]
            compute = [out.event(c) for c in compute]
            for at, region in enumerate(regions):
                for rank in range(ranks):
                    if position == region.last_read:
                        place = rank, layout.offsets[at], region.size
                        out.use(compute[rank], *place, False, f"rank {rank}", f"reads {at} in step {step}")
    return out


def run_collective(
    out: Trace, number: int, pushes: bool, stream: list[int], regions: list[Region], layout: ArenaPlan, step: int
) -> None:
    def barrier() -> None:
        met = out.event(*stream)
        stream[:] = [out.event(met) for _ in stream]

    def use(writes: bool, everywhere: bool, what: str) -> None:
        stream[:] = [out.event(event) for event in stream]
        for at, region in enumerate(regions):
            if number not in region.intervals or (writes and region.first_write is not None):
                continue
            for rank, event in enumerate(stream):
                for memory in range(len(stream)) if everywhere else [rank]:
                    name = f"{what} {at} in step {step}"
                    out.use(event, memory, layout.offsets[at], region.size, writes, f"rank {rank}", name)

    if layout.opening_barriers[number]:
        barrier()
    use(True, pushes, "pushes" if pushes else "copies in")
    barrier()
    if not pushes:
        use(False, True, "pulls")


def case(seed: int, streams: int = 1, pulls: bool = True) -> tuple[list[CollectiveInterval], list[bool], list[Region]]:
    """A random step: overlapping collectives, results that are read for a while, inputs computed in place."""
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    starts = sorted(draw.sample(range(0, 80, 2), count))
    free = list(range(1, 200, 2))
    intervals, pushes, regions = [], [], []
    for start in starts:
        later = [position for position in free if start < position < start + draw.choice([10, 30, 60])]
        wait = draw.choice(later)
        free.remove(wait)
        intervals.append(CollectiveInterval(start, wait, f"stream {draw.randrange(streams)}"))
        pushes.append(not pulls or draw.random() < 0.5)
    for number, interval in enumerate(intervals):
        for _ in range(draw.randint(1, 3)):
            size = draw.choice([0, 1, 255, 256, 1000, 4096, 70000])
            if pushes[number]:
                regions.append(Region(size, (number,), last_read=interval.wait + draw.randint(1, 60)))
                continue
            first_write = draw.choice([interval.start, draw.randint(0, interval.start)])
            by_compute = can_write(intervals, first_write) and draw.random() >= 0.4
            regions.append(Region(size, (number,), first_write if by_compute else None))
    return intervals, pushes, regions


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_no_two_ranks_use_the_same_bytes_without_a_barrier_between(seed: int, streams: int) -> None:
    intervals, pushes, regions = case(seed, streams)
    layout = plan(intervals, regions)
    assert not trace(intervals, pushes, regions, layout).races()
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert all(offset + r.size <= layout.size for offset, r in zip(layout.offsets, regions, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_every_opening_barrier_prevents_a_race(seed: int) -> None:
    intervals, pushes, regions = case(seed, pulls=False)
    regions = [replace(region, size=max(region.size, 1)) for region in regions]
    layout = plan(intervals, regions)
    # The first one of a step has an opening barrier for whatever ran before, which need not be the same step.
    for number in (number for number, needed in enumerate(layout.opening_barriers) if needed and number):
        fewer = tuple(needed and at != number for at, needed in enumerate(layout.opening_barriers))
        assert trace(intervals, pushes, regions, replace(layout, opening_barriers=fewer)).races(), number


@pytest.mark.parametrize("seed", range(40))
def test_the_oracle_reports_races_of_overlapping_regions(seed: int) -> None:
    """Shows that the tests above can fail."""
    intervals, pushes, regions = case(seed, 2)
    layout = plan(intervals, regions)
    everything_at_0 = replace(layout, offsets=(0,) * len(regions))
    alive = [region for region in regions if region.size]
    overlapping = any(
        intervals[a.intervals[0]].start < intervals[b.intervals[0]].start < a.last_read
        for a, b in itertools.permutations(alive, 2)
        if pushes[a.intervals[0]] and pushes[b.intervals[0]]
    )
    if overlapping:
        assert trace(intervals, pushes, regions, everything_at_0).races()


def test_arena_sizes_are_within_5_percent_of_the_lower_bound() -> None:
    waste = []
    for seed in range(300):
        intervals, _, regions = case(seed)
        layout = plan(intervals, regions)
        assert layout.size >= layout.lower_bound
        waste.append(layout.size / layout.lower_bound - 1 if layout.lower_bound else 0.0)
    assert sum(waste) / len(waste) < 0.001
    assert max(waste) < 0.05


def test_prefetched_layers_of_one_size_reuse_two_slots() -> None:
    """Gathers that start a layer early need two layers' bytes; opening barriers separate reads and writes."""
    size, layers = 1 << 20, 8
    intervals = [CollectiveInterval(max(0, 10 * (layer - 1)) + (layer > 0), 10 * layer + 2) for layer in range(layers)]
    regions = [Region(size, (layer,), last_read=10 * layer + 10) for layer in range(layers)]
    layout = plan(intervals, regions)
    assert layout.size == layout.lower_bound == 2 * size
    assert layout.opening_barriers == (True, False, *[True] * (layers - 2))


def test_no_opening_barrier_if_another_collective_has_one_in_between() -> None:
    """The second collective has a barrier between the last read of the first and the start of the third."""
    intervals = [CollectiveInterval(0, 1), CollectiveInterval(4, 9), CollectiveInterval(6, 10)]
    regions = [Region(1024, (0,), last_read=3), Region(512, (1,), last_read=12), Region(1024, (2,), last_read=12)]
    layout = plan(intervals, regions)
    assert layout.offsets == (0, 1024, 0)
    assert layout.opening_barriers == (True, False, False)


def gathers_and_reductions(layers: int) -> tuple[list[CollectiveInterval], list[Region]]:
    """Layers of 9 parameters, gathered twice and reduced once."""
    intervals, regions = [], []
    for layer in range(2 * layers):
        intervals.append(CollectiveInterval(100 * layer, 100 * layer + 90, "gather"))
        regions += [
            Region(1000 * (1 + at), (len(intervals) - 1,), last_read=100 * layer + 110 + 8 * at) for at in range(9)
        ]
        if layer >= layers:
            intervals.append(CollectiveInterval(100 * layer + 50, 100 * layer + 180, "reduce"))
            regions += [Region(1000 * (1 + at), (len(intervals) - 1,)) for at in range(9)]
    return intervals, regions


def test_the_time_to_plan_a_large_step_grows_quadratically_at_most() -> None:
    def of(layers: int) -> Callable[[], object]:
        intervals, regions = gathers_and_reductions(layers)
        return lambda: plan(intervals, regions)

    layout = plan(*gathers_and_reductions(32))
    assert layout.size < 3 * sum(1000 * (1 + at) for at in range(9)) + 9 * 3 * ALIGNMENT
    assert_growth(of, 32, 2)  # all lifetimes differ


def test_the_first_collective_of_each_stream_has_an_opening_barrier() -> None:
    intervals = [
        CollectiveInterval(0, 4, "gather"),
        CollectiveInterval(1, 5, "reduce"),
        CollectiveInterval(8, 9, "reduce"),
    ]
    regions = [Region(256, (at,), last_read=12) for at in range(3)]
    assert plan(intervals, regions).opening_barriers == (True, True, False)
    assert not can_write(intervals, 3)
    assert can_write(intervals, 5)


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_conflicts_are_those_of_each_pair(streams: int) -> None:
    drawn = random.Random(streams)
    lifetimes = []
    for _ in range(200):
        before = tuple(drawn.randrange(20) for _ in range(streams))
        free = tuple(at + drawn.randrange(1, 6) for at in before)
        own = drawn.randrange(streams)
        lifetimes.append(arena._Lifetime(drawn.choice([None, (own, before[own])]), before, free))
    blocks = [arena._Block(number, lifetime, 1, ()) for number, lifetime in enumerate(lifetimes)]
    always, without_barrier = arena._conflict_matrices(blocks, streams)
    assert 0 < sum(map(sum, always)) < sum(map(sum, without_barrier)) < 200 * 199
    for one, other in itertools.product(range(200), repeat=2):
        a, b = lifetimes[one], lifetimes[other]
        different = one != other
        assert always[one][other] == (different and not (a.can_precede(b) or b.can_precede(a)))
        apart = a.is_separated_from(b) or b.is_separated_from(a)
        assert without_barrier[one][other] == (different and not apart)


def test_planning_is_deterministic() -> None:
    for seed in range(20):
        intervals, _, regions = case(seed, 2)
        assert plan(intervals, regions) == plan(list(intervals), list(regions))


def test_a_step_without_regions_needs_no_arena() -> None:
    assert plan([], []) == ArenaPlan((), 0, ())
    assert plan([CollectiveInterval(0, 1)], []).size == 0
