"""Which loop nests share a kernel.

Nests that touch one buffer are joined when their loops correspond there (:mod:`weft.inductor.axes`), most bytes saved
first: a reader next to its writer saves a read, and the write too where nobody else reads; readers of the same elements
read once. Greedy fusion by shared bytes is what XLA and torch's Inductor do; splitting loops to make them correspond,
and joining the row and the column reductions of a norm's backward without a gate on shapes, is what they do not.

Two rules keep a kernel right. All reductions of a nest run over the same axes, or code generation says that it can do
both (``supports``); and what one nest writes the other reads at the same point, never elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.capture.graph import is_effect
from weft.inductor.axes import Factor, Place, Substitution, align, magnitude, merge, move, pieces, substitute
from weft.inductor.ir import Call, Index, Int, Load, Nest, Reduce, Store, Value, map_values, rewrite
from weft.inductor.lifetimes import Lifetimes
from weft.inductor.lower import Extern, Loop, Lowered
from weft.inductor.lowering.registry import convert, literal

log = logging.getLogger(__name__)

Node = torch.fx.Node
Supports = Callable[[Nest], str | None]

_FARTHEST = 200  # operations between two nests that only share reads: longer lives cost memory
_MOST_MEMBERS = 48
_MOST_BUFFERS = 28
_SMALL = 1 << 20  # bytes that the caches hold however they are walked
_WIDEST = 16384 * 32  # elements of one row kept in registers, over all buffers of a row kernel
_LEAST_READ = 65536  # bytes that two readers must share to be joined for that alone


@dataclass(frozen=True)
class Kernel:
    """Loop nests joined to one, and the nodes they came from."""

    nest: Nest
    nodes: tuple[Node, ...]

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(load.buffer for load in self.nest.reads)

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(self.nest.writes)


def fuse(lowered: Lowered, supports: Supports = lambda nest: None) -> list[Kernel | Extern]:
    """Join the loop nests of a step into kernels; calls stay as they are. The result is in an order that runs.

    Args:
        supports: why code generation cannot print a nest, None where it can.
    """
    fuser = _Fuser(lowered, supports)
    fuser.join_all()
    log.debug(
        "loop nests not joined: %s", ", ".join(f"{n} x {why}" for why, n in fuser.refusals.most_common()) or "none"
    )
    return fuser.kernels()


@dataclass
class _Group:
    """Nests that will be one kernel, over common axes ``sizes``.

    Attributes:
        members: positions of the operations, and their axes in the group's.
        reads, writes: indices over the group's axes, by buffer; None where a buffer is accessed in several ways.
        overs: the sets of axes reduced over.
    """

    sizes: list[Int]
    members: list[tuple[int, Substitution]]
    reads: dict[str, set[Index]]
    writes: dict[str, Index | None]
    overs: set[frozenset[int]]
    first: int
    last: int
    fixed: bool = False  # an extern

    @property
    def buffers(self) -> set[str]:
        return set(self.reads) | set(self.writes)


class _Fuser:
    def __init__(self, lowered: Lowered, supports: Supports) -> None:
        self.lowered = lowered
        self.supports = supports
        self.lives = Lifetimes(lowered)
        self.groups: dict[int, _Group] = {}
        self.home: dict[int, int] = {}  # operation -> group
        self.writers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        self.refused: set[tuple[int, int, int]] = set()
        self.refusals: Counter[str] = Counter()
        for at, operation in enumerate(lowered.operations):
            self.groups[at] = _group(at, operation)
            self.home[at] = at
            for name in operation.writes:
                self.writers.setdefault(name, []).append(at)
            for name in operation.reads:
                self.readers.setdefault(name, []).append(at)
        self.after = {at: self._successors(at) for at in self.groups}
        self.before: dict[int, set[int]] = {at: set() for at in self.groups}
        for at, successors in self.after.items():
            for successor in successors:
                self.before[successor].add(at)

    def _successors(self, at: int) -> set[int]:
        operation = self.lowered.operations[at]
        after = {reader for name in operation.writes for reader in self.readers.get(name, ())}
        after |= {
            w for name in operation.writes for w in self.writers[name] if w > at and isinstance(operation, Extern)
        }
        return after - {at}

    # ---- joining

    def join_all(self) -> None:
        queue = [entry for at in self.groups for entry in self._candidates(at) if entry[1] < entry[2]]
        heapq.heapify(queue)
        while queue:
            _, a, b = heapq.heappop(queue)
            if a not in self.groups or b not in self.groups:
                continue
            pair = a, b, len(self.groups[a].members) + len(self.groups[b].members)
            if pair in self.refused:
                continue
            if self._join(a, b):
                for entry in self._candidates(a):
                    heapq.heappush(queue, entry)
            else:
                self.refused.add(pair)

    def _candidates(self, at: int) -> list[tuple[float, int, int]]:
        """Groups that share a buffer with this one, by the bytes that joining might save: those that pass a value on
        however small, as that saves a launch, and those that read the same if it is much."""
        group = self.groups[at]
        if group.fixed:
            return []
        saved: dict[int, float] = {}
        for name in group.buffers:
            bytes_ = self.lowered.bytes(name)
            for operation in self._sharers(name, group):
                other = self.home[operation]
                if other != at and not self.groups[other].fixed:
                    saved[other] = max(saved.get(other, 0.0), bytes_)
        far = {o for o in saved if not self._near(group, self.groups[o]) and not self._linked(at, o)}
        return [(-bytes_, min(at, other), max(at, other)) for other, bytes_ in saved.items() if other not in far]

    def _sharers(self, name: str, group: _Group) -> list[int]:
        """The operations that a buffer gives ``group`` a reason to be joined with."""
        writers, readers = self.writers.get(name, []), self.readers.get(name, [])
        return [*writers, *readers] if name in group.writes or self.lowered.bytes(name) >= _LEAST_READ else writers

    def _near(self, a: _Group, b: _Group) -> bool:
        return max(a.first, b.first) - min(a.last, b.last) <= _FARTHEST

    def _linked(self, a: int, b: int) -> bool:
        return b in self.after[a] or a in self.after[b]

    def _join(self, a: int, b: int) -> bool:
        joined = self._combined(a, b)
        if isinstance(joined, str):
            self.refusals[joined] += 1
            return False
        self._replace(a, b, joined)
        return True

    def _combined(self, a: int, b: int) -> _Group | str:
        """Two groups as one, or why they cannot be."""
        one, two = self.groups[a], self.groups[b]
        if len(one.members) + len(two.members) > _MOST_MEMBERS or len(one.buffers | two.buffers) > _MOST_BUFFERS:
            return "too large"
        if not self._linked(a, b) and any(self._forward(x) and self._again(y) for x, y in ((one, two), (two, one))):
            return "computed again so that it is not kept"
        if self._detour(a, b) or self._detour(b, a):
            return "something runs between"
        if self._holds_longer(*sorted((one, two), key=lambda group: group.last)):
            return "much would be held for little"
        joined = self._joined(one, two)
        if joined is None:
            return "other loops"
        why = self.supports(self._nest(joined)) if len(joined.overs) > 1 else None
        return joined if why is None else why

    def _holds_longer(self, early: _Group, late: _Group) -> bool:
        """Whether the first group, computed where the second is, would hold much that nothing else reads by then."""
        return self.lives.too_long(early.reads.keys() - late.reads.keys(), early.writes, late.last)

    def _again(self, group: _Group) -> bool:
        """Whether a group computes again what forward computed."""
        return any(node.meta.get("recomputed") for node in self._computed(group))

    def _forward(self, group: _Group) -> bool:
        """Whether a group computes something for the first time that forward needs."""
        return any(node.meta.get("stage") == "forward" for node in self._computed(group))

    def _computed(self, group: _Group) -> Iterator[Node]:
        return (node for at, _ in group.members for node in _nodes(self.lowered.operations[at]))

    def _detour(self, a: int, b: int) -> bool:
        """Whether something else must run after ``a`` and before ``b``."""
        last = self.groups[b].last
        seen = {a, b}
        stack = [n for n in self.after[a] if n != b]
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            if b in self.after[at]:
                return True
            if len(seen) > 4000:
                return True
            stack += (n for n in self.after[at] if n not in seen and self.groups[n].first <= last)
        return False

    def _joined(self, one: _Group, two: _Group) -> _Group | None:
        shared = sorted(
            one.buffers & two.buffers, key=lambda name: (-_rank(one, two, name), -self.lowered.bytes(name), name)
        )
        for name in shared:
            for left in _accesses(one, name):
                for right in _accesses(two, name):
                    if name not in one.writes and name not in two.writes and left.offset != right.offset:
                        continue
                    factors = align(left, one.sizes, right, two.sizes)
                    if factors:
                        joined = _over_common_axes(one, two, factors)
                        if joined is not None and self._legal(one, two, joined):
                            return joined[0]
        return None

    def _legal(self, one: _Group, two: _Group, joined: tuple[_Group, _Group, _Group]) -> bool:
        """Whether values pass at one point only, and every axis has a meaning for both parts."""
        both, left, right = joined
        for name in one.buffers & two.buffers:
            written = name in one.writes or name in two.writes
            if written and len({*_accesses(left, name), *_accesses(right, name)}) != 1:
                return False
            if written and None in (left.writes.get(name, 0), right.writes.get(name, 0)):
                return False
        mine, others = _axes_of(left), _axes_of(right)
        if len(both.overs) > 1:
            # Rows and columns of one space, not a sum and the sum of its parts; what is done once a row adds none.
            once = any(
                _rows(narrow, wide, over) and not part.overs
                for narrow, wide, part in ((mine, others, left), (others, mine, right))
                for over in both.overs
            )
            if not (mine == others or once) or not frozenset().union(*both.overs) <= mine | others:
                return False
        else:
            over = next(iter(both.overs), frozenset())
            if not (mine == others or _rows(mine, others, over) or _rows(others, mine, over)):
                return False
            # A reduction's axes must be loops of each part as a whole, or not at all.
            if any(over & part not in (over, frozenset()) for part in (mine, others)):
                return False
        if both.overs:
            if not self._along_memory(both):
                return False
            width = min((_width(both.sizes, over) for over in both.overs), default=1.0)
            if width <= 16384 and width * len(both.buffers) > _WIDEST:
                return False
        return True

    def _along_memory(self, group: _Group) -> bool:
        """Whether all that is large is contiguous along axes of one kind: reduced in one way, or not at all. A kernel
        that walks along rows would touch each line of memory of a transposed tensor many times."""
        kinds = set()
        for name in group.buffers:
            if self.lowered.bytes(name) < _SMALL:
                continue
            for index in _accesses(group, name):
                inner = [axis for axis, stride in index.strides if stride == 1]
                whole = any(index.axes & over for over in group.overs)
                if inner and whole and not index.picks:
                    kinds.add(next((over for over in group.overs if inner[0] in over), frozenset()))
        return len(kinds) <= 1

    def _replace(self, a: int, b: int, joined: _Group) -> None:
        for at, _ in joined.members:
            self.home[at] = a
        self.groups[a] = joined
        del self.groups[b]
        for links, back in ((self.after, self.before), (self.before, self.after)):
            merged = (links[a] | links.pop(b)) - {a, b}
            links[a] = merged
            for other in merged:
                back[other].discard(b)
                back[other].add(a)

    # ---- results

    def kernels(self) -> list[Kernel | Extern]:
        result: list[Kernel | Extern] = []
        for at in self._order():
            group = self.groups[at]
            operation = self.lowered.operations[group.members[0][0]]
            if isinstance(operation, Extern):
                result.append(operation)
                continue
            loops = [self.lowered.operations[member] for member, _ in sorted(group.members, key=_first)]
            nodes = tuple(dict.fromkeys(node for loop in loops for node in _nodes(loop)))
            result.append(Kernel(merge(self._nest(group)).check(), nodes))
        return result

    def _order(self) -> list[int]:
        """Groups so that each follows what it needs, otherwise as in the step; effects keep their order."""
        effects = [at for at, g in self.groups.items() if g.fixed and self._is_effect(at)]
        before = {at: set(self.before[at]) for at in self.groups}
        for earlier, later in itertools.pairwise(effects):
            before[later].add(earlier)
        waiting = {at: len(needs) for at, needs in before.items()}
        after: dict[int, list[int]] = {}
        for at, needs in before.items():
            for need in needs:
                after.setdefault(need, []).append(at)
        ready = [(self.groups[at].first, at) for at, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            _, at = heapq.heappop(ready)
            order.append(at)
            for other in after.get(at, ()):
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(ready, (self.groups[other].first, other))
        assert len(order) == len(self.groups), "groups wait for each other"
        return order

    def _is_effect(self, at: int) -> bool:
        return is_effect(self.lowered.operations[at].node)

    def _nest(self, group: _Group) -> Nest:
        """The members' stores over the group's axes, each reading what earlier ones stored from registers."""
        inside = {at for at, _ in group.members}
        stores: list[Store] = []
        known: dict[str, tuple[Index, Value]] = {}
        for at, places in sorted(group.members, key=_first):
            operation = self.lowered.operations[at]
            assert isinstance(operation, Loop)
            for store in _forwarded(move(operation.nest.stores, places), known):
                buffer = self.lowered.buffers[store.buffer]
                if store.mode == "set" and store.mask is None:
                    known[store.buffer] = (store.index, convert(store.value, buffer.dtype))
                stores.append(store)
        return Nest(tuple(group.sizes), tuple(s for s in stores if self._needed(s.buffer, inside)))

    def _needed(self, name: str, inside: set[int]) -> bool:
        return name in self.lives.kept or any(at not in inside for at in self.readers.get(name, ()))


def _nodes(operation: Loop | Extern) -> tuple[Node, ...]:
    return (*operation.inlined, operation.node) if isinstance(operation, Loop) else (operation.node,)


def _first(member: tuple[int, Substitution]) -> int:
    return member[0]


def _group(at: int, operation: Loop | Extern) -> _Group:
    if isinstance(operation, Extern):
        return _Group([], [(at, {})], {}, {}, set(), at, at, fixed=True)
    nest = operation.nest
    reads: dict[str, set[Index]] = {}
    for load in nest.reads:
        reads.setdefault(load.buffer, set()).add(load.index)
    writes: dict[str, Index | None] = {}
    for store in nest.stores:
        plain = store.mode == "set" and store.mask is None and store.buffer not in writes and not store.index.picks
        writes[store.buffer] = store.index if plain else None
    same = {axis: Place(((axis, 1),)) for axis in range(len(nest.sizes))}
    overs = {frozenset(value.over) for value in nest.values() if isinstance(value, Reduce)}
    return _Group(list(nest.sizes), [(at, same)], reads, writes, overs, at, at)


def _accesses(group: _Group, name: str) -> list[Index]:
    found = list(group.reads.get(name, ()))
    written = group.writes.get(name)
    return [*found, written] if written is not None and written not in found else found


def _rank(one: _Group, two: _Group, name: str) -> int:
    return min(max((len(i.strides) for i in _accesses(g, name)), default=0) for g in (one, two))


def _axes_of(group: _Group) -> frozenset[int]:
    """The axes that a part of a joined group loops over."""
    indices = [index for reads in group.reads.values() for index in reads]
    indices += [index for index in group.writes.values() if index is not None]
    return frozenset().union(*(index.axes for index in indices), *group.overs)


def _rows(narrow: frozenset[int], wide: frozenset[int], over: frozenset[int]) -> bool:
    """Whether ``narrow`` runs once a row where ``wide`` runs along the row too."""
    return bool(over) and narrow | over == wide and not narrow & over


def _width(sizes: Sequence[Int], over: Iterable[int]) -> float:
    total = 1.0
    for axis in over:
        total *= magnitude(sizes[axis])
    return total


def _over_common_axes(one: _Group, two: _Group, factors: list[Factor]) -> tuple[_Group, _Group, _Group] | None:
    """Both groups over common axes, together and each alone."""
    sizes: list[Int] = []
    left: list[tuple[int, int, Int]] = []
    right: list[tuple[int, int, Int]] = []
    for factor in factors:
        left.append((factor.left, len(sizes), factor.size))
        right.append((factor.right, len(sizes), factor.size))
        sizes.append(factor.size)
    for group, pairs in ((one, left), (two, right)):
        known = {axis for axis, _, _ in pairs}
        for axis, size in enumerate(group.sizes):
            if axis not in known and size != 1:
                pairs.append((axis, len(sizes), size))
                sizes.append(size)
    a, b = _moved(one, left, sizes), _moved(two, right, sizes)
    reads = {name: a.reads.get(name, set()) | b.reads.get(name, set()) for name in {**a.reads, **b.reads}}
    both = _Group(
        sizes,
        a.members + b.members,
        reads,
        {**a.writes, **b.writes},
        a.overs | b.overs,
        min(a.first, b.first),
        max(a.last, b.last),
    )
    return both, a, b


def _moved(group: _Group, pairs: list[tuple[int, int, Int]], sizes: list[Int]) -> _Group:
    places = pieces(pairs, group.sizes)
    return _Group(
        sizes,
        [(at, _through(old, places)) for at, old in group.members],
        {name: {substitute(index, places) for index in indices} for name, indices in group.reads.items()},
        {name: None if index is None else substitute(index, places) for name, index in group.writes.items()},
        {frozenset(new for axis in over for new, _ in places[axis].terms) for over in group.overs},
        group.first,
        group.last,
    )


def _through(old: Substitution, places: Mapping[int, Place]) -> Substitution:
    """Axes written in a group's axes, written in the joined group's."""
    return {
        axis: Place(tuple((new, factor * step) for mid, factor in place.terms for new, step in places[mid].terms))
        for axis, place in old.items()
    }


def _forwarded(stores: Sequence[Store], known: Mapping[str, tuple[Index, Value]]) -> list[Store]:
    """The stores, with loads of what was stored before replaced by the values."""

    def forward(value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer not in known:
            return value
        index, stored = known[value.buffer]
        if index != value.index:
            return value
        if value.mask is None:
            return stored
        return Call("where", (value.mask, stored, literal(value.other, stored.dtype)), stored.dtype)

    new = rewrite([root for store in stores for root in store.values()], forward)
    return [map_values(store, new) for store in stores]
