"""Memory planning of the symmetric arena: offsets of tensors, and the barriers that make reuse of bytes safe.

Peers read and write the arena of a rank. So bytes may be reused only after a barrier of all ranks that follows the last
use and precedes the next one. Without it a fast rank overwrites bytes that a slow rank still reads, and the results are
wrong without an error. Every peer-access collective has one barrier of its own. Before it, ranks copy into their arena
or push to peers; after it, they pull from peers. The barrier of any collective protects any bytes, so most tensors need
no further one. A collective with no barrier between the last use of its bytes and its own first access starts with an
extra one, its *opening barrier*.

The planner relies on four facts about order. The compute stream executes nodes in issue order. A collective starts
after everything issued before it. The collectives of one communication stream run one after the other. A wait blocks
the compute stream until its collective has completed. All ranks issue the same nodes, so what precedes a barrier on one
rank precedes it on every rank.

Finding offsets is dynamic storage allocation, which is NP-hard. Greedy placement by size puts each tensor at the lowest
offset that is free of conflicts. It is within a few percent of the lower bound on neural networks (Pisarchyk and Lee,
Efficient Memory Management for Deep Neural Net Inference, 2020). Placement by bytes times lifetime and by start time
are tried as well, and the smallest result is taken.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.inductor.graph.live_range import LiveInterval, peak_bytes

# Bytes. An L2 cache line has 128; copy engines and 16-byte vector loads want aligned starts.
ALIGNMENT = 256


@dataclass(frozen=True)
class CollectiveInterval:
    """The interval in which one peer-access collective runs, in positions of the issue order.

    Attributes:
        start: position of the node that starts the collective.
        wait: position of the first wait for it.
        stream: name of its communication stream. Collectives of one stream run in the order of their starts.
    """

    start: int
    wait: int
    stream: str = ""


@dataclass(frozen=True)
class Region:
    """The bytes of the arena that one tensor needs, and when.

    Attributes:
        size: bytes.
        intervals: indices of the collectives that use it, in order. Each may write it before its barrier and read it
            after its barrier.
        first_write: position of the compute-stream node that writes it first; None if the first collective writes it.
        last_read: position of the last compute-stream node that uses it; -1 if there is none.
    """

    size: int
    intervals: tuple[int, ...]
    first_write: int | None = None
    last_read: int = -1


@dataclass(frozen=True)
class ArenaPlan:
    """The offsets of all regions, and the opening barriers that make them safe.

    Attributes:
        offsets: bytes from the beginning of the arena, one per region.
        size: bytes of the arena.
        opening_barriers: for each collective, whether it needs a barrier before its first access to the arena.
        lower_bound: lower bound of ``size`` in bytes: the most bytes that are in use at once. 0 if the collectives run
            on several streams, for which the bound is not known.
    """

    offsets: tuple[int, ...]
    size: int
    opening_barriers: tuple[bool, ...]
    lower_bound: int = 0


def plan(intervals: Sequence[CollectiveInterval], regions: Sequence[Region]) -> ArenaPlan:
    """Choose the offsets of ``regions`` and the opening barriers of ``intervals``.

    :func:`can_write` must hold for the position of each region that the compute stream writes. Takes time quadratic in
    the number of distinct lifetimes. The result depends on the arguments only, so all ranks find the same plan.
    """
    # Ranks compare the whole plan before they share memory (`symmetric_buffer`). Whatever follows must be free of ties
    # that depend on addresses or hashes.
    events = _EventOrder(intervals)
    # Regions with the same lifetime conflict with the same others. One block for all of them keeps the conflict matrix
    # small: a step has thousands of regions and a few hundred lifetimes.
    blocks = _blocks([events.lifetime(region) for region in regions], regions)
    lower_bound = _peak_bytes(blocks) if len(events.streams) == 1 else 0
    # Three steps: lifetimes in collectives, offsets without conflicts, and the opening barriers that the offsets call
    # for.
    block_offsets = _best(events, blocks, lower_bound)
    offsets = [0] * len(regions)
    for block, block_offset in zip(blocks, block_offsets, strict=True):
        for region, offset in block.regions:
            offsets[region] = block_offset + offset
    with_barrier = _opening_barriers(events, blocks, block_offsets)
    return ArenaPlan(
        tuple(offsets),
        _arena_size(blocks, block_offsets),
        tuple(at in with_barrier for at in range(len(intervals))),
        lower_bound,
    )


def can_write(intervals: Sequence[CollectiveInterval], position: int) -> bool:
    """Whether the node at ``position`` may write into the arena on the compute stream.

    Peers may still read bytes of the previous step. Its accesses are over once a collective of this step has passed its
    barrier, and the compute stream knows that only after a wait. So some wait of this step must come first.
    """
    return any(interval.wait < position for interval in intervals)


# ---- order of events


@dataclass(frozen=True)
class _Lifetime:
    """The lifetime of a region. Each stream has its own clock, which counts the collectives of that stream.

    Attributes:
        first_collective: the collective that uses the region first, as (stream, index on the stream); None if a
            compute-stream node does.
        barriers_before: per stream, how many collectives have passed their barriers before the first use.
            ``first_collective`` itself is not counted: its barrier comes after its writes, unless it has an opening
            barrier.
        free_from: per stream, index of the first collective that starts after the last use.
    """

    first_collective: tuple[int, int] | None
    barriers_before: tuple[int, ...]
    free_from: tuple[int, ...]

    def can_precede(self, other: _Lifetime) -> bool:
        """Whether this region may have the bytes of ``other`` and be used earlier. A barrier between the two must
        exist, or be possible as the opening barrier of the collective that uses ``other`` first."""
        # On its own stream, the first collective of `other` starts after the last use here, and so does its opening
        # barrier. That barrier is the one to be added by `_opening_barriers`.
        return self.is_separated_from(other) or (
            other.first_collective is not None
            and self.free_from[other.first_collective[0]] <= other.first_collective[1]
        )

    def is_separated_from(self, other: _Lifetime) -> bool:
        """Whether some collective already has its barrier between the last use of this region and the first of
        ``other``.

        That collective starts after the last use on every rank (index >= free) and has passed its barrier before the
        first use (index < before). One stream with such a collective is enough.
        """
        # Strictly: collective number `free` has passed its barrier only if it is among the first `before`.
        return any(free < before for free, before in zip(self.free_from, other.barriers_before, strict=True))


class _EventOrder:
    """Translates positions of the issue order into counts of collectives, per stream."""

    def __init__(self, intervals: Sequence[CollectiveInterval]) -> None:
        names = list(dict.fromkeys(interval.stream for interval in intervals))
        # A FIFO stream runs its collectives in the order of issue, so indices on a stream are a clock.
        by_start = sorted(range(len(intervals)), key=lambda number: intervals[number].start)
        self.streams = [[number for number in by_start if intervals[number].stream == name] for name in names]
        self.stream_index = {
            number: (stream, at) for stream, numbers in enumerate(self.streams) for at, number in enumerate(numbers)
        }
        self.starts = [[intervals[number].start for number in numbers] for numbers in self.streams]
        # Position at which the compute stream knows that a collective has completed: the wait for it, or an earlier
        # wait for a later collective of its stream, which completes after it.
        self.ends = [_suffix_minima([intervals[number].wait for number in numbers]) for numbers in self.streams]

    def lifetime(self, region: Region) -> _Lifetime:
        """The lifetime of ``region``."""
        streams = range(len(self.streams))
        # A tensor that is written and never read still occupies its bytes when it is written.
        last = max(region.last_read, -1 if region.first_write is None else region.first_write)
        free_from = tuple(self._free_from(stream, last, region.intervals) for stream in streams)
        # A node on the compute stream knows what its waits have shown. It has no barrier that could be added.
        if region.first_write is not None:
            return _Lifetime(None, self._completed(region.first_write), free_from)
        # Written on the communication stream: by the collective itself, as the first of its users.
        own, at = first_collective = self.stream_index[region.intervals[0]]
        # The collective starts when the compute stream reaches it. On its own stream, all earlier collectives have
        # completed by then; on other streams, only those that the compute stream has waited for.
        completed = self._completed(self.starts[own][at])
        return _Lifetime(
            first_collective, tuple(at if stream == own else completed[stream] for stream in streams), free_from
        )

    def _completed(self, position: int) -> tuple[int, ...]:
        """Per stream, how many collectives have completed when the compute stream reaches ``position``."""
        # `ends` ascends (see above), so the completed collectives are a prefix of the stream.
        return tuple(bisect_left(ends, position) for ends in self.ends)

    def _free_from(self, stream: int, last: int, users: Iterable[int]) -> int:
        """Index of the first collective of a stream that starts after the node at ``last`` and after all ``users``.

        The barrier of that collective is the first one of its stream that proves the bytes unused on all ranks.
        """
        starts = self.starts[stream]
        # A collective starts behind everything that was issued to the compute stream before it, this node included.
        free_from = bisect_right(starts, last)
        for user in users:
            own, at = self.stream_index[user]
            # On another stream, a collective is known to follow ``user`` only if it starts after a wait for ``user``.
            free_from = max(free_from, at + 1 if own == stream else bisect_right(starts, self.ends[own][at]))
        return free_from


def _suffix_minima(numbers: Sequence[int]) -> list[int]:
    return list(accumulate(reversed(numbers), min))[::-1]


# ---- placement


@dataclass(frozen=True)
class _Block:
    """Regions with one lifetime, placed next to each other. They are all in use at once, so this wastes nothing.

    Attributes:
        number: index of the block.
        lifetime: the lifetime of its regions.
        size: bytes, a multiple of ``ALIGNMENT``.
        regions: (index of the region, offset inside the block in bytes).
    """

    number: int
    lifetime: _Lifetime
    size: int
    regions: tuple[tuple[int, int], ...]

    @property
    def span(self) -> int:
        """Length of the lifetime, in collectives, summed over streams."""
        lifetime = self.lifetime
        return sum(free - before for free, before in zip(lifetime.free_from, lifetime.barriers_before, strict=True))


# A symmetric matrix by block numbers: 1 where two blocks must not share bytes. Computed once per plan: placement is
# repeated dozens of times and only reads it.
_ConflictMatrix = Sequence[bytearray]


def _conflict_matrices(blocks: Sequence[_Block], streams: int) -> tuple[_ConflictMatrix, _ConflictMatrix]:
    """Which blocks must not share a byte whatever opening barriers there are, and which may only with an opening
    barrier of a collective between them.

    Sets of blocks are integers with a bit for each. On a stream, the blocks that a block is separated from are those
    whose first use comes after so many barriers: a run in one order of the blocks, looked up and not compared pair by
    pair.
    """
    lifetimes = [block.lifetime for block in blocks]
    separated = [0] * len(blocks)  # of the two, either may come first
    possible = [0] * len(blocks)  # also with an opening barrier of the later one
    for stream in range(streams):
        free = [lifetime.free_from[stream] for lifetime in lifetimes]
        before = [lifetime.barriers_before[stream] for lifetime in lifetimes]
        later, earlier = _Counts(before), _Counts(free)
        opening = {
            at: lifetime.first_collective[1]
            for at, lifetime in enumerate(lifetimes)
            if lifetime.first_collective is not None and lifetime.first_collective[0] == stream
        }
        opened = _Counts(opening)
        for at in range(len(blocks)):
            separated[at] |= later.above(free[at]) | earlier.below(before[at])
            possible[at] |= opened.above(free[at] - 1)
            if at in opening:
                possible[at] |= earlier.below(opening[at] + 1)
    everything = (1 << len(blocks)) - 1
    rows = []
    for may_share in ([one | other for one, other in zip(separated, possible, strict=True)], separated):
        rows.append([_bits(everything & ~(mask | 1 << at), len(blocks)) for at, mask in enumerate(may_share)])
    return rows[0], rows[1]


class _Counts:
    """Blocks by a number that each has; sets of blocks as integers."""

    def __init__(self, numbers: Mapping[int, int] | Sequence[int]) -> None:
        items = numbers.items() if isinstance(numbers, Mapping) else enumerate(numbers)
        ordered = sorted((number, at) for at, number in items)
        self._numbers = [number for number, _ in ordered]
        self._first = [0, *accumulate((1 << at for _, at in ordered), operator.or_)]

    def below(self, number: int) -> int:
        """The blocks with a lower number."""
        return self._first[bisect_left(self._numbers, number)]

    def above(self, number: int) -> int:
        """The blocks with a higher number."""
        return self._first[-1] & ~self._first[bisect_right(self._numbers, number)]


def _bits(mask: int, count: int) -> bytearray:
    """The lowest bits of a number, a byte for each."""
    return bytearray(f"{mask:0{count}b}"[::-1].encode().translate(_DIGITS))


_DIGITS = bytes(digit - ord("0") if digit in b"01" else digit for digit in range(256))


def _blocks(lifetimes: Sequence[_Lifetime], regions: Sequence[Region]) -> list[_Block]:
    by_lifetime: dict[_Lifetime, list[int]] = {}
    # In the order of regions, so numbers of blocks, and with them all ties, are the same on all ranks.
    for number, lifetime in enumerate(lifetimes):
        by_lifetime.setdefault(lifetime, []).append(number)
    blocks = []
    for lifetime, numbers in by_lifetime.items():
        *starts, size = accumulate((_aligned(regions[number].size) for number in numbers), initial=0)
        blocks.append(_Block(len(blocks), lifetime, size, tuple(zip(numbers, starts, strict=True))))
    return blocks


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# Orders in which blocks are placed: by size, by size times lifetime, by start.
_ORDERS: tuple[Callable[[_Block], tuple[int, ...]], ...] = (
    lambda block: (-block.size, block.number),
    lambda block: (-block.size * block.span, block.number),
    lambda block: (sum(block.lifetime.barriers_before), -block.size, block.number),
)
# How often placement is repeated with the blocks that reach the end of the arena placed first. The test of sizes in
# tests/inductor/transports/test_arena.py asserts the waste that remains.
_REPAIRS = 16


def _best(events: _EventOrder, blocks: Sequence[_Block], lower_bound: int) -> list[int]:
    """The offsets with the fewest opening barriers among those tried that fit the smallest arena found.

    Memory comes first: a barrier costs time once per collective, but the arena is allocated for the whole run.
    """
    conflicts, conflicts_without_barrier = _conflict_matrices(blocks, len(events.streams))
    # Two passes: how small the arena can get with all barriers that it takes, then which barriers are not needed at
    # that size.
    smallest = _smallest(blocks, conflicts, lower_bound)
    size = _arena_size(blocks, smallest)
    tried = (_place_blocks(sorted(blocks, key=key), conflicts, conflicts_without_barrier, size) for key in _ORDERS)
    # In the second pass a block is placed apart from those that would need a barrier, as long as the arena does not
    # grow.
    fitting = [block_offsets for block_offsets in tried if _arena_size(blocks, block_offsets) <= size]
    return min([smallest, *fitting], key=lambda block_offsets: len(_opening_barriers(events, blocks, block_offsets)))


def _smallest(blocks: Sequence[_Block], conflicts: _ConflictMatrix, lower_bound: int) -> list[int]:
    """The offsets of the smallest arena found. The search stops once it is as small as ``lower_bound``."""
    best: list[int] = []
    tried: set[tuple[int, ...]] = set()
    for key in _ORDERS:
        order = sorted(blocks, key=key)
        for _ in range(_REPAIRS):
            # An order gives one placement, and that the next order: all that would follow has been tried, too.
            numbers = tuple(block.number for block in order)
            if numbers in tried:
                break
            tried.add(numbers)
            block_offsets = _place_blocks(order, conflicts)
            if not best or _arena_size(blocks, block_offsets) < _arena_size(blocks, best):
                best = block_offsets
            end = _arena_size(blocks, block_offsets)
            if _arena_size(blocks, best) <= lower_bound:
                return best
            # The sort is stable: the blocks that set the size come first, and the others keep their order.
            order.sort(key=lambda block: block_offsets[block.number] + block.size < end)
    return best


def _place_blocks(
    order: Sequence[_Block],
    conflicts: _ConflictMatrix,
    conflicts_without_barrier: _ConflictMatrix | None = None,
    size: int = 0,
) -> list[int]:
    """Place the blocks in ``order``, each at the lowest offset without a conflict with those before it.

    Args:
        conflicts: the conflicts that no barrier can solve.
        conflicts_without_barrier: also those that an opening barrier would solve. If given, a block is first placed
            without such a conflict, and with one only if it would end after ``size``.
        size: bytes.

    Returns the offsets by block number.
    """
    block_offsets = [0] * len(order)
    placed: list[tuple[int, int, int]] = []  # offset, end and number

    # `placed` is sorted by offset, so the first gap that is long enough is the lowest. Bytes of blocks that do
    # not conflict may be shared.
    def lowest(size: int, conflicting: bytearray) -> int:
        offset = 0
        for start, end, other in placed:
            if conflicting[other]:
                if start >= offset + size:
                    break
                if end > offset:
                    offset = end
        return offset

    for block in order:
        offset = (
            lowest(block.size, conflicts_without_barrier[block.number])
            if conflicts_without_barrier is not None
            else size
        )
        # Giving up the distance to one block saves bytes at the price of a barrier.
        if offset + block.size > size:
            offset = lowest(block.size, conflicts[block.number])
        block_offsets[block.number] = offset
        insort(placed, (offset, offset + block.size, block.number))
    return block_offsets


def _arena_size(blocks: Sequence[_Block], block_offsets: Sequence[int]) -> int:
    return max((offset + block.size for block, offset in zip(blocks, block_offsets, strict=True)), default=0)


def _peak_bytes(blocks: Sequence[_Block]) -> int:
    """The most bytes in use at once, for collectives of one stream: with one clock, lifetimes are live intervals."""
    intervals = []
    for block in blocks:
        # Time is doubled so that an opening barrier has a place between two collectives: a region that its collective
        # writes first may follow one that is in use until just before. The 1 keeps the first begin from being negative.
        begin = 2 * block.lifetime.barriers_before[0] - (block.lifetime.first_collective is None) + 1
        intervals.append(LiveInterval(block.size, begin, 2 * block.lifetime.free_from[0]))
    return peak_bytes(intervals)


# ---- barriers


def _opening_barriers(events: _EventOrder, blocks: Sequence[_Block], block_offsets: Sequence[int]) -> set[int]:
    """Indices of the collectives that need an opening barrier: no other barrier is between their first access and an
    earlier use of the same bytes, in this step or in the one before."""
    # Checked for the offsets that were chosen, pair by pair of blocks that share bytes: a barrier that two of them need
    # is counted once.
    found = set()
    for block in blocks:
        first_collective = block.lifetime.first_collective
        # A compute-stream node cannot wait for peers. Its regions are placed only where a barrier already exists.
        if first_collective is None or not block.size:
            continue
        begins, ends = block_offsets[block.number], block_offsets[block.number] + block.size
        sharing = (
            other
            for other in blocks
            if block_offsets[other.number] < ends and begins < block_offsets[other.number] + other.size
        )
        # No barrier of this step has passed: peers may still read these bytes for the previous step.
        if not any(block.lifetime.barriers_before) or any(
            other.lifetime.can_precede(block.lifetime) and not other.lifetime.is_separated_from(block.lifetime)
            for other in sharing
        ):
            stream, at = first_collective
            found.add(events.streams[stream][at])
    return found
