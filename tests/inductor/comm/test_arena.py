"""Offsets in the arena: no bytes are shared without a barrier of all ranks between, few bytes are wasted."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field, replace

import pytest

from weft.inductor.comm.arena import ALIGNMENT, Exchange, Layout, Region, can_write, plan

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
    exchanges: list[Exchange], pushes: list[bool], regions: list[Region], layout: Layout, ranks: int = 2
) -> Trace:
    """What all ranks do in two steps, one after the other, of the same layout."""
    out = Trace()
    begin = out.event()
    compute = [begin] * ranks
    lanes: dict[str, list[int]] = {exchange.lane: [begin] * ranks for exchange in exchanges}
    length = 1 + max([e.waited for e in exchanges] + [r.read for r in regions])
    for step in range(2):
        ended: dict[int, list[int]] = {}
        for position in range(length):
            compute = [out.event(c) for c in compute]
            for at, region in enumerate(regions):
                for rank in range(ranks):
                    if position == region.written:  # by a node, or by the exchange itself ahead of its lane
                        place = rank, layout.offsets[at], region.size
                        out.use(compute[rank], *place, True, f"rank {rank}", f"computes {at} in step {step}")
            for number, exchange in enumerate(exchanges):
                if exchange.start == position:
                    lane = lanes[exchange.lane]
                    for rank in range(ranks):
                        lane[rank] = out.event(lane[rank], compute[rank])
                    run_exchange(out, number, pushes[number], lane, regions, layout, step)
                    ended[number] = list(lane)
                if exchange.waited == position:
                    compute = [out.event(c, e) for c, e in zip(compute, ended[number], strict=True)]
            compute = [out.event(c) for c in compute]
            for at, region in enumerate(regions):
                for rank in range(ranks):
                    if position == region.read:
                        place = rank, layout.offsets[at], region.size
                        out.use(compute[rank], *place, False, f"rank {rank}", f"reads {at} in step {step}")
    return out


def run_exchange(
    out: Trace, number: int, pushes: bool, lane: list[int], regions: list[Region], layout: Layout, step: int
) -> None:
    def barrier() -> None:
        met = out.event(*lane)
        lane[:] = [out.event(met) for _ in lane]

    def use(writes: bool, everywhere: bool, what: str) -> None:
        lane[:] = [out.event(event) for event in lane]
        for at, region in enumerate(regions):
            if number not in region.exchanges or (writes and region.written is not None):
                continue
            for rank, event in enumerate(lane):
                for memory in range(len(lane)) if everywhere else [rank]:
                    name = f"{what} {at} in step {step}"
                    out.use(event, memory, layout.offsets[at], region.size, writes, f"rank {rank}", name)

    if layout.opens[number]:
        barrier()
    use(True, pushes, "pushes" if pushes else "copies in")
    barrier()
    if not pushes:
        use(False, True, "pulls")


def case(seed: int, lanes: int = 1, pulls: bool = True) -> tuple[list[Exchange], list[bool], list[Region]]:
    """A random step: overlapping collectives, results that are read for a while, inputs computed in place."""
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    starts = sorted(draw.sample(range(0, 80, 2), count))
    free = list(range(1, 200, 2))
    exchanges, pushes, regions = [], [], []
    for start in starts:
        later = [position for position in free if start < position < start + draw.choice([10, 30, 60])]
        waited = draw.choice(later)
        free.remove(waited)
        exchanges.append(Exchange(start, waited, f"lane {draw.randrange(lanes)}"))
        pushes.append(not pulls or draw.random() < 0.5)
    for number, exchange in enumerate(exchanges):
        for _ in range(draw.randint(1, 3)):
            size = draw.choice([0, 1, 255, 256, 1000, 4096, 70000])
            if pushes[number]:
                regions.append(Region(size, (number,), read=exchange.waited + draw.randint(1, 60)))
                continue
            written = draw.choice([exchange.start, draw.randint(0, exchange.start)])
            by_compute = can_write(exchanges, written) and draw.random() >= 0.4
            regions.append(Region(size, (number,), written if by_compute else None))
    return exchanges, pushes, regions


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_no_two_ranks_use_the_same_bytes_without_a_barrier_between(seed: int, lanes: int) -> None:
    exchanges, pushes, regions = case(seed, lanes)
    layout = plan(exchanges, regions)
    assert not trace(exchanges, pushes, regions, layout).races()
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert all(offset + r.size <= layout.size for offset, r in zip(layout.offsets, regions, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_no_opening_barrier_can_be_left_out(seed: int) -> None:
    exchanges, pushes, regions = case(seed, pulls=False)
    regions = [replace(region, size=max(region.size, 1)) for region in regions]
    layout = plan(exchanges, regions)
    # The first one of a step opens for whatever ran before, which need not be the same step.
    for number in (number for number, opens in enumerate(layout.opens) if opens and number):
        fewer = tuple(opens and at != number for at, opens in enumerate(layout.opens))
        assert trace(exchanges, pushes, regions, replace(layout, opens=fewer)).races(), number


@pytest.mark.parametrize("seed", range(40))
def test_the_oracle_sees_bytes_that_are_shared_too_early(seed: int) -> None:
    """Otherwise the tests above would show nothing."""
    exchanges, pushes, regions = case(seed, 2)
    layout = plan(exchanges, regions)
    everything_at_0 = replace(layout, offsets=(0,) * len(regions))
    alive = [region for region in regions if region.size]
    overlapping = any(
        exchanges[a.exchanges[0]].start < exchanges[b.exchanges[0]].start < a.read
        for a, b in itertools.permutations(alive, 2)
        if pushes[a.exchanges[0]] and pushes[b.exchanges[0]]
    )
    if overlapping:
        assert trace(exchanges, pushes, regions, everything_at_0).races()


def test_sizes_are_near_the_most_bytes_that_must_be_apart() -> None:
    waste = []
    for seed in range(300):
        exchanges, _, regions = case(seed)
        layout = plan(exchanges, regions)
        assert layout.size >= layout.bound
        waste.append(layout.size / layout.bound - 1 if layout.bound else 0.0)
    assert sum(waste) / len(waste) < 0.001
    assert max(waste) < 0.05


def test_layers_of_one_size_take_turns() -> None:
    """Gathers that start a layer ahead: two layers' bytes, and each gather opens, for the bytes were just read."""
    size, layers = 1 << 20, 8
    exchanges = [Exchange(max(0, 10 * (layer - 1)) + (layer > 0), 10 * layer + 2) for layer in range(layers)]
    regions = [Region(size, (layer,), read=10 * layer + 10) for layer in range(layers)]
    layout = plan(exchanges, regions)
    assert layout.size == layout.bound == 2 * size
    assert layout.opens == (True, False, *[True] * (layers - 2))


def test_a_barrier_of_another_collective_serves() -> None:
    """Between the last read of the first gather and the third one stands the second: the third need not open."""
    exchanges = [Exchange(0, 1), Exchange(4, 9), Exchange(6, 10)]
    regions = [Region(1024, (0,), read=3), Region(512, (1,), read=12), Region(1024, (2,), read=12)]
    layout = plan(exchanges, regions)
    assert layout.offsets == (0, 1024, 0)
    assert layout.opens == (True, False, False)


def test_a_large_step_is_planned_quickly() -> None:
    """32 layers of 9 parameters, gathered twice and reduced once."""
    exchanges, regions = [], []
    for layer in range(64):
        exchanges.append(Exchange(100 * layer, 100 * layer + 90, "gather"))
        regions += [Region(1000 * (1 + at), (len(exchanges) - 1,), read=100 * layer + 110 + 8 * at) for at in range(9)]
        if layer >= 32:
            exchanges.append(Exchange(100 * layer + 50, 100 * layer + 180, "reduce"))
            regions += [Region(1000 * (1 + at), (len(exchanges) - 1,)) for at in range(9)]
    started = time.process_time()
    layout = plan(exchanges, regions)
    assert time.process_time() - started < 3
    assert layout.size < 3 * sum(1000 * (1 + at) for at in range(9)) + 9 * 3 * ALIGNMENT


def test_a_step_opens_on_each_lane_since_the_step_before_used_the_arena() -> None:
    exchanges = [Exchange(0, 4, "gather"), Exchange(1, 5, "reduce"), Exchange(8, 9, "reduce")]
    regions = [Region(256, (at,), read=12) for at in range(3)]
    assert plan(exchanges, regions).opens == (True, True, False)
    assert not can_write(exchanges, 3)
    assert can_write(exchanges, 5)


def test_all_ranks_find_the_same() -> None:
    for seed in range(20):
        exchanges, _, regions = case(seed, 2)
        assert plan(exchanges, regions) == plan(list(exchanges), list(regions))


def test_a_step_without_regions_needs_nothing() -> None:
    assert plan([], []) == Layout((), 0, ())
    assert plan([Exchange(0, 1)], []).size == 0
