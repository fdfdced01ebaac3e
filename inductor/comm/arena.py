"""Where the values of a step lie in the symmetric arena, and which barriers let them share its bytes.

Peers write into the arena of a rank and read from it, so its bytes may be used again only when every rank has done with
them: after a barrier of all ranks that follows the last use, and before the next one. A collective over peers has a
barrier of its own, between what it does before (copies into the arena, pushes to peers) and after it (pulls from
peers). Any such barrier will do for any bytes, so most values need no barrier of theirs; a collective that finds none
between its bytes' last use and itself *opens* with one.

What is known to come before what: the compute stream works in the order of issue, a collective begins after all that
was issued before it, those of one lane run one after the other, and a wait holds the compute stream until its
collective has ended. All ranks issue the same, so what comes before a barrier on one rank does so on every rank.

Finding offsets is dynamic storage allocation, which is NP-hard. Greedy placement by size, each value at the lowest
offset where nothing that it must not meet lies, is within a few percent of the lower bound on neural networks
(Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference, 2020); by length of life and by
beginning are tried too, and the smallest result is taken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

# Bytes. A cache line of L2 is 128, and copy engines and 16-byte loads want no less.
ALIGNMENT = 256


@dataclass(frozen=True)
class Exchange:
    """A collective over peers.

    Attributes:
        start: position in the order of issue at which it starts.
        waited: position of the first wait for it.
        lane: what carries it; those of one lane run in the order of their starts.
    """

    start: int
    waited: int
    lane: str = ""


@dataclass(frozen=True)
class Region:
    """Bytes of the arena that one value needs.

    Attributes:
        size: bytes.
        exchanges: numbers of the exchanges that use it, in order. Each may write it before its barrier and read it
            after.
        written: position of the node that writes it first, on the compute stream; None where the first exchange does.
        read: position of the last node that uses it on the compute stream, -1 for none.
    """

    size: int
    exchanges: tuple[int, ...]
    written: int | None = None
    read: int = -1


@dataclass(frozen=True)
class Layout:
    """Where regions lie.

    Attributes:
        offsets: bytes from the beginning of the arena, one a region.
        size: bytes of the arena.
        opens: for each exchange, whether it needs a barrier before it uses the arena.
        bound: the most bytes that regions which must not meet one another need together: no layout is smaller. 0 where
            exchanges run on several lanes, for which it is not known.
    """

    offsets: tuple[int, ...]
    size: int
    opens: tuple[bool, ...]
    bound: int = 0


def plan(exchanges: Sequence[Exchange], regions: Sequence[Region]) -> Layout:
    """Place ``regions``, for which :func:`can_write` must hold where they are written on the compute stream.

    Takes time quadratic in the number of regions that differ in what they may share. The result follows from the
    arguments alone, so all ranks find the same.
    """
    clock = _Clock(exchanges)
    blocks = _blocks([clock.life(region) for region in regions], regions)
    bound = _most_alive(blocks) if len(clock.lanes) == 1 else 0
    places = _best(clock, blocks, bound)
    offsets = [0] * len(regions)
    for block, place in zip(blocks, places, strict=True):
        for region, offset in block.members:
            offsets[region] = place + offset
    opening = _opening(clock, blocks, places)
    return Layout(tuple(offsets), _end(blocks, places), tuple(at in opening for at in range(len(exchanges))), bound)


def can_write(exchanges: Sequence[Exchange], position: int) -> bool:
    """Whether the node at ``position`` may write into the arena on the compute stream.

    The step before this one used the arena too: some exchange of this step has to be waited for first.
    """
    return any(exchange.waited < position for exchange in exchanges)


# ---- what comes before what


@dataclass(frozen=True)
class _Life:
    """When a region is in use, in numbers of exchanges, by lane.

    Attributes:
        maker: the exchange that uses it first; None where a node on the compute stream does.
        before: how many exchanges have passed their barriers before the first use; ``maker``, which may open with one
            more, is not counted.
        free: number of the first exchange that starts after the last use.
    """

    maker: tuple[int, int] | None  # its lane and its number there
    before: tuple[int, ...]
    free: tuple[int, ...]

    def gives_way_to(self, other: _Life) -> bool:
        """Whether this region may lie where ``other`` does, and be used earlier: a barrier can stand between them."""
        return self.is_parted_from(other) or (other.maker is not None and self.free[other.maker[0]] <= other.maker[1])

    def is_parted_from(self, other: _Life) -> bool:
        """Whether the barrier of some exchange stands between them."""
        return any(free < before for free, before in zip(self.free, other.before, strict=True))


class _Clock:
    """The order of events, in numbers of exchanges on each lane."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        names = list(dict.fromkeys(exchange.lane for exchange in exchanges))
        by_start = sorted(range(len(exchanges)), key=lambda number: exchanges[number].start)
        self.lanes = [[number for number in by_start if exchanges[number].lane == name] for name in names]
        self.place = {
            number: (lane, at) for lane, numbers in enumerate(self.lanes) for at, number in enumerate(numbers)
        }
        self.starts = [[exchanges[number].start for number in numbers] for numbers in self.lanes]
        # Where the compute stream knows that an exchange has ended: at a wait for it, or for a later one of its lane.
        self.ends = [_least_from_here([exchanges[number].waited for number in numbers]) for numbers in self.lanes]

    def life(self, region: Region) -> _Life:
        lanes = range(len(self.lanes))
        last = max(region.read, -1 if region.written is None else region.written)
        free = tuple(self._free(lane, last, region.exchanges) for lane in lanes)
        if region.written is not None:
            return _Life(None, self._ended(region.written), free)
        own, at = maker = self.place[region.exchanges[0]]
        ended = self._ended(self.starts[own][at])
        return _Life(maker, tuple(at if lane == own else ended[lane] for lane in lanes), free)

    def _ended(self, position: int) -> tuple[int, ...]:
        """By lane, how many exchanges have ended when the compute stream comes to ``position``."""
        return tuple(bisect_left(ends, position) for ends in self.ends)

    def _free(self, lane: int, last: int, users: Iterable[int]) -> int:
        starts = self.starts[lane]
        free = bisect_right(starts, last)
        for user in users:
            own, at = self.place[user]
            free = max(free, at + 1 if own == lane else bisect_right(starts, self.ends[own][at]))
        return free


def _least_from_here(numbers: Sequence[int]) -> list[int]:
    return list(accumulate(reversed(numbers), min))[::-1]


# ---- placement


@dataclass(frozen=True)
class _Block:
    """Regions that may share bytes with the same others, side by side.

    Attributes:
        number: its place among the blocks.
        members: numbers of the regions, and where in the block each begins.
    """

    number: int
    life: _Life
    size: int
    members: tuple[tuple[int, int], ...]

    @property
    def span(self) -> int:
        """How long it is in use, in exchanges."""
        return sum(free - before for free, before in zip(self.life.free, self.life.before, strict=True))

    def meets(self, other: _Block) -> bool:
        """Whether they must not share a byte."""
        return not (self.life.gives_way_to(other.life) or other.life.gives_way_to(self.life))

    def needs_barrier(self, other: _Block) -> bool:
        """Whether they must not share a byte unless an exchange opens with a barrier between them."""
        return not (self.life.is_parted_from(other.life) or other.life.is_parted_from(self.life))


# For each block, by number, those that it has to lie apart from.
_Apart = Sequence[bytearray]


def _apart(blocks: Sequence[_Block], unless: Callable[[_Block, _Block], bool]) -> _Apart:
    found = [bytearray(len(blocks)) for _ in blocks]
    for one in blocks:
        for other in blocks[: one.number]:
            found[one.number][other.number] = found[other.number][one.number] = unless(one, other)
    return found


def _blocks(lives: Sequence[_Life], regions: Sequence[Region]) -> list[_Block]:
    alike: dict[_Life, list[int]] = {}
    for number, life in enumerate(lives):
        alike.setdefault(life, []).append(number)
    blocks = []
    for life, numbers in alike.items():
        *starts, size = accumulate((_aligned(regions[number].size) for number in numbers), initial=0)
        blocks.append(_Block(len(blocks), life, size, tuple(zip(numbers, starts, strict=True))))
    return blocks


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# Orders in which blocks are placed: the largest first, those that are large for long, those that begin first.
_ORDERS: tuple[Callable[[_Block], tuple[int, ...]], ...] = (
    lambda block: (-block.size, block.number),
    lambda block: (-block.size * block.span, block.number),
    lambda block: (sum(block.life.before), -block.size, block.number),
)
# How often what lies highest is placed first instead.
_REPAIRS = 16


def _best(clock: _Clock, blocks: Sequence[_Block], bound: int) -> list[int]:
    """The offsets of the smallest arena found, and of those that fit into it the ones that open least often."""
    meets, needs_barrier = _apart(blocks, _Block.meets), _apart(blocks, _Block.needs_barrier)
    smallest = _smallest(blocks, meets, bound)
    size = _end(blocks, smallest)
    tried = (_place(sorted(blocks, key=key), meets, needs_barrier, size) for key in _ORDERS)
    fitting = [places for places in tried if _end(blocks, places) <= size]
    return min([smallest, *fitting], key=lambda places: len(_opening(clock, blocks, places)))


def _smallest(blocks: Sequence[_Block], meets: _Apart, bound: int) -> list[int]:
    """Offsets in the smallest arena found; no search goes on once it is as small as ``bound``."""
    best: list[int] = []
    for key in _ORDERS:
        order = sorted(blocks, key=key)
        for _ in range(_REPAIRS):
            places = _place(order, meets)
            if not best or _end(blocks, places) < _end(blocks, best):
                best = places
            end = _end(blocks, places)
            if _end(blocks, best) <= bound:
                return best
            order.sort(key=lambda block: places[block.number] + block.size < end)
    return best


def _place(order: Sequence[_Block], meets: _Apart, needs_barrier: _Apart | None = None, size: int = 0) -> list[int]:
    """Offsets of the blocks by number, each at the lowest one that is free of those that come before it in ``order``.

    Where it fits into ``size`` bytes, a block lies where that takes no further barrier, if ``needs_barrier`` is given.
    """
    places = [0] * len(order)
    placed: list[tuple[int, int, int]] = []  # offset, end and number

    def lowest(size: int, apart: bytearray) -> int:
        offset = 0
        for start, end, other in placed:
            if start >= offset + size:
                break
            if end > offset and apart[other]:
                offset = end
        return offset

    for block in order:
        offset = lowest(block.size, needs_barrier[block.number]) if needs_barrier is not None else size
        if offset + block.size > size:
            offset = lowest(block.size, meets[block.number])
        places[block.number] = offset
        insort(placed, (offset, offset + block.size, block.number))
    return places


def _end(blocks: Sequence[_Block], places: Sequence[int]) -> int:
    return max((place + block.size for block, place in zip(blocks, places, strict=True)), default=0)


def _most_alive(blocks: Sequence[_Block]) -> int:
    """The most bytes in use at once, where there is one lane: lives are then stretches of one line."""
    change: dict[int, int] = {}
    for block in blocks:
        # A maker may open with a barrier: what its region follows may be in use until just before it.
        begins = 2 * block.life.before[0] - (block.life.maker is None)
        change[begins] = change.get(begins, 0) + block.size
        ends = 2 * block.life.free[0]
        change[ends] = change.get(ends, 0) - block.size
    return max(accumulate(change[at] for at in sorted(change)), default=0)


# ---- barriers


def _opening(clock: _Clock, blocks: Sequence[_Block], places: Sequence[int]) -> set[int]:
    """The exchanges that have to open with a barrier: no other one stands between what they do first and an earlier use
    of the same bytes, be it in the step before."""
    found = set()
    for block in blocks:
        maker = block.life.maker
        if maker is None or not block.size:
            continue
        begins, ends = places[block.number], places[block.number] + block.size
        sharing = (
            other for other in blocks if places[other.number] < ends and begins < places[other.number] + other.size
        )
        if not any(block.life.before) or any(
            other.life.gives_way_to(block.life) and not other.life.is_parted_from(block.life) for other in sharing
        ):
            lane, at = maker
            found.add(clock.lanes[lane][at])
    return found
