"""Loop fusion: which loop nests share a kernel.

Two nests that access one buffer are joined when their loops correspond there (:mod:`weft.inductor.loop_ir.axes`). Pairs
that save most bytes come first. A reader joined with its writer saves a read, and the write too if nobody else reads
the buffer; two readers of the same elements read them once. XLA and torch's Inductor fuse greedily by shared bytes as
well. They do not split loops to make them correspond, and they gate joining the row and the column reductions of a
norm's backward on shapes.

Two rules keep a kernel correct. All reductions of a nest run over the same axes, or code generation confirms that it
supports both (``supports``). A buffer that one nest writes is read by the other at the same loop point only.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from weft import knobs
from weft.capture.node_kinds import is_effect
from weft.inductor.codegen.kernel_plan import MAX_REGISTER_ROW
from weft.inductor.fusion.fusion_group import (
    FusionGroup,
    GroupMember,
    accesses,
    axes_of,
    fused,
    is_row_part,
    over_common_axes,
    points,
    shared_axes,
    single,
)
from weft.inductor.fusion.lifetimes import Lifetimes
from weft.inductor.graph.faults import Guard, unguarded
from weft.inductor.loop_ir.axes import Substitution, align, merge
from weft.inductor.loop_ir.ir import Nest
from weft.inductor.loop_ir.numbering import Numbered, number_of
from weft.inductor.lowering.lowered_step import Extern, Loop, Lowered, NestItem
from weft.inductor.lowering.verify import verify_lowered

log = logging.getLogger(__name__)

Node = torch.fx.Node
Supports = Callable[[Nest], str | None]

_MAX_DISTANCE = 200  # operations between two nests that only share reads: longer live ranges cost memory
# Bounds on a kernel's text, on its registers, and on the time of the search.
_MAX_MEMBERS = 48
_MAX_BUFFERS = 28
_CACHED_BYTES = 1 << 20  # a buffer this small stays in the L2 cache in whatever order it is read
_MAX_ROW_ELEMENTS = MAX_REGISTER_ROW * 32  # elements in registers of one row, over all buffers of a row kernel
_MIN_SHARED_READ = 65536  # bytes that two readers must share to be joined for that alone


@dataclass(frozen=True)
class FusedLoops(NestItem):
    """Loop nests joined to one, and the nodes they came from."""

    nodes: tuple[Node, ...]


def fuse(
    lowered: Lowered, supports: Supports = lambda nest: None, guard: Guard = unguarded, *, join: bool = True
) -> list[FusedLoops | Extern]:
    """Join the loop nests of a step into kernels; calls stay as they are. The result is in topological order.

    Args:
        supports: why code generation cannot print a nest, None where it can.
        guard: the context in which nests are joined, and in which each kernel is made.
        join: whether nests are joined; else each is a kernel of its own.
    """
    fuser = _Fuser(lowered, supports, guard)
    if join:
        fuser.join_all()
    kernels = fuser.kernels()  # may undo joins, and counts those among the refusals
    log.debug(
        "loop nests not joined: %s", ", ".join(f"{n} x {why}" for why, n in fuser.refusals.most_common()) or "none"
    )
    if knobs.verify_graphs:
        verify_lowered(lowered, kernels, "fusion", guard)
    return kernels


class _Fuser:
    def __init__(self, lowered: Lowered, supports: Supports, guard: Guard) -> None:
        self.lowered = lowered
        self.supports = supports
        self.guard = guard
        self.lifetimes = Lifetimes(lowered)
        self.groups: dict[int, FusionGroup] = {}
        self.group_of: dict[int, int] = {}  # operation -> group
        self.writers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        # Equal layers have equal groups, see `loop_ir/numbering.py`.
        self._fused = functools.cache(fused)
        self._merged = functools.cache(merge)
        self.refused: set[tuple[int, int, int]] = set()
        self.refusals: Counter[str] = Counter()
        # Each operation starts as a group of its own, and a group keeps the number of one of its members.
        for at, operation in enumerate(lowered.operations):
            self.groups[at] = single(at, operation)
            self.group_of[at] = at
            for name in operation.writes:
                self.writers.setdefault(name, []).append(at)
            for name in operation.reads:
                self.readers.setdefault(name, []).append(at)
        # Data does not order effects such as random draws and collectives. Eager does, and ranks must agree on it.
        effects = [at for at, group in self.groups.items() if group.fixed and is_effect(lowered.operations[at].node)]
        self.next_effect = dict(itertools.pairwise(effects))
        # Between operations, and never changed: groups may be split again, and their edges are derived from these.
        self.successors = {at: self._successors(at) for at in self.groups}
        self.after: dict[int, set[int]] = {}
        self.before: dict[int, set[int]] = {}
        self._link_groups()

    def _link_groups(self) -> None:
        """Derive the edges between groups from those between operations."""
        self.after = {at: set() for at in self.groups}
        self.before = {at: set() for at in self.groups}
        for at, successors in self.successors.items():
            for successor in successors:
                a, b = self.group_of[at], self.group_of[successor]
                if a != b:
                    self.after[a].add(b)
                    self.before[b].add(a)

    def _successors(self, at: int) -> set[int]:
        operation = self.lowered.operations[at]
        # Flow dependences only. There are no others between loops: a buffer is written before it is read, and never
        # again.
        after = {reader for name in operation.writes for reader in self.readers.get(name, ())}
        # Loops that write one buffer write different elements of it. An ATen call may write all of it, so its
        # order among the writers stays.
        after |= {
            w for name in operation.writes for w in self.writers[name] if w > at and isinstance(operation, Extern)
        }
        # A chain of edges, one to the next effect, orders all of them.
        if at in self.next_effect:
            after.add(self.next_effect[at])
        return after - {at}

    # ---- joining

    def join_all(self) -> None:
        # A heap by negative bytes: the pair that saves most first. Ties go to the earliest groups, so all ranks join
        # alike.
        queue = [entry for at in self.groups for entry in self._candidates(at) if entry[1] < entry[2]]
        heapq.heapify(queue)
        while queue:
            _, a, b = heapq.heappop(queue)
            # The queue is not searched when groups are joined: entries of groups that are gone are skipped here.
            if a not in self.groups or b not in self.groups:
                continue
            # A refusal holds until one of the two has grown, which the number of members tells.
            pair = a, b, len(self.groups[a].members) + len(self.groups[b].members)
            if pair in self.refused:
                continue
            # The joined group has `a`'s number, new neighbours and new loops, so its candidates are estimated again.
            if self._join(a, b):
                for entry in self._candidates(a):
                    heapq.heappush(queue, entry)
            else:
                self.refused.add(pair)

    def _candidates(self, at: int) -> list[tuple[float, int, int]]:
        """Groups that share a buffer with this one, by the bytes that joining may save. Producers and consumers of any
        size count, as joining them saves a launch; readers of one buffer count from ``_MIN_SHARED_READ`` bytes on."""
        group = self.groups[at]
        if group.fixed:
            return []
        saved: dict[int, float] = {}
        for name in group.buffers:
            bytes_ = self.lowered.bytes(name)
            for operation in self._sharers(name, group):
                other = self.group_of[operation]
                if other != at and not self.groups[other].fixed:
                    # The largest shared buffer, not the sum: a lower bound that one buffer proves, and cheap.
                    saved[other] = max(saved.get(other, 0.0), bytes_)
        # Producers and consumers at any distance: the buffer between them is alive over it in either case.
        far = {o for o in saved if not self._is_near(group, self.groups[o]) and not self._linked(at, o)}
        return [(-bytes_, min(at, other), max(at, other)) for other, bytes_ in saved.items() if other not in far]

    def _sharers(self, name: str, group: FusionGroup) -> list[int]:
        """The operations that ``group`` may be joined with because of a buffer."""
        writers, readers = self.writers.get(name, []), self.readers.get(name, [])
        # Readers of what the group writes count at any size, as they are its consumers.
        return [*writers, *readers] if name in group.writes or self.lowered.bytes(name) >= _MIN_SHARED_READ else writers

    def _is_near(self, a: FusionGroup, b: FusionGroup) -> bool:
        return max(a.first, b.first) - min(a.last, b.last) <= _MAX_DISTANCE

    def _linked(self, a: int, b: int) -> bool:
        return b in self.after[a] or a in self.after[b]

    def _join(self, a: int, b: int) -> bool:
        # What stays if the guard swallows a fault of weft's: the pair is refused, and both remain as they were.
        joined: FusionGroup | str = "joining them fails"
        with self.guard(self._computed(self.groups[a], self.groups[b])):
            joined = self._combined(a, b)
        if isinstance(joined, str):
            self.refusals[joined] += 1
            return False
        self._replace(a, b, joined)
        return True

    def _combined(self, a: int, b: int) -> FusionGroup | str:
        """Two groups as one, or why they cannot be."""
        one, two = self.groups[a], self.groups[b]
        # The cheap refusals come first: most pairs end at one of them.
        if len(one.members) + len(two.members) > _MAX_MEMBERS or len(one.buffers | two.buffers) > _MAX_BUFFERS:
            return "too large"
        both_ways = (one, two), (two, one)
        # A value that backward recomputes would stay in memory if the kernel of its forward computed it too.
        if not self._linked(a, b) and any(self._is_forward(x) and self._is_recomputed(y) for x, y in both_ways):
            return "recomputed in backward so that it is not kept"
        if self._path_between(a, b) or self._path_between(b, a):
            return "an operation must run between them"
        # The kernel runs at the position of the later one, when all operands are there.
        if self._extends_lifetimes(*sorted((one, two), key=lambda group: group.last)):
            return "large buffers would live longer"
        joined = self._joined(one, two)
        if joined is None:
            return "their loops differ"
        # Last, as it builds and plans the kernel. Nests that are reduced in one way always have a plan.
        why = self.supports(self._form(joined).form) if len(joined.reduced) > 1 else None
        return joined if why is None else why

    def _extends_lifetimes(self, early: FusionGroup, late: FusionGroup) -> bool:
        """Whether computing the first group at the position of the second would extend the live ranges of large
        buffers."""
        # What the later group reads as well is alive until then anyway.
        return self.lifetimes.would_extend(early.reads.keys() - late.reads.keys(), early.writes, late.last)

    def _is_recomputed(self, group: FusionGroup) -> bool:
        """Whether a group recomputes values of the forward."""
        return any(node.meta.get("recomputed") for node in self._computed(group))

    def _is_forward(self, group: FusionGroup) -> bool:
        """Whether a group computes a value of the forward."""
        return any(node.meta.get("stage") == "forward" for node in self._computed(group))

    def _computed(self, *groups: FusionGroup) -> Iterator[Node]:
        members = (at for group in groups for at, _ in group.members)
        return (node for at in members for node in self.lowered.operations[at].nodes)

    # A kernel of both groups would have to run before and after what lies on such a path: a cycle.
    def _path_between(self, a: int, b: int) -> bool:
        """Whether something else must run after ``a`` and before ``b``."""
        last = self.groups[b].last
        seen = {a, b}
        # A direct edge is no obstacle: inside a kernel the value is handed over in a register.
        stack = [n for n in self.after[a] if n != b]
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            if b in self.after[at]:
                return True
            # Refusing a join is always correct, so a long search ends with that.
            if len(seen) > 4000:
                return True
            # Groups that begin after `b` ends cannot come before it in the step's order, so the search stops there;
            # `_order` repairs the rare case that this misses.
            stack += (n for n in self.after[at] if n not in seen and self.groups[n].first <= last)
        return False

    def _joined(self, one: FusionGroup, two: FusionGroup) -> FusionGroup | None:
        # Buffers with most axes first: they match most loops, so that few axes are left to one group alone.
        shared = sorted(
            one.buffers & two.buffers, key=lambda name: (-shared_axes(one, two, name), -self.lowered.bytes(name), name)
        )
        for name in shared:
            for left in accesses(one, name):
                for right in accesses(two, name):
                    # Two readers at different offsets (halves of a tensor) read different elements, and share
                    # nothing.
                    if name not in one.writes and name not in two.writes and left.offset != right.offset:
                        continue
                    # An empty list means that the buffer has one element: it relates no loops.
                    factors = align(left, one.sizes, right, two.sizes)
                    if factors:
                        joined = over_common_axes(one, two, factors)
                        if self._legal(one, two, joined):
                            return joined[0]
        return None

    def _legal(self, one: FusionGroup, two: FusionGroup, joined: tuple[FusionGroup, FusionGroup, FusionGroup]) -> bool:
        """Whether every buffer that one group writes is accessed at one index only, and the axes of both groups fit."""
        both, left, right = joined
        for name in one.buffers & two.buffers:
            written = name in one.writes or name in two.writes
            # Programs of a kernel run in no order: a point can read only what it stored itself.
            if written and len({*accesses(left, name), *accesses(right, name)}) != 1:
                return False
            # None: written under a mask or in several ways, so the value at a point is not the stored value.
            if written and None in (left.writes.get(name, 0), right.writes.get(name, 0)):
                return False
        mine, others = axes_of(left), axes_of(right)
        if len(both.reduced) > 1:
            # Rows and columns of one space, not a sum and the sum of its parts; what is done once a row adds none.
            # Mean and rstd of a norm are such: one number a row, beside a kernel that walks rows and sums columns.
            once = any(
                is_row_part(narrow, wide, over) and not part.reduced
                for narrow, wide, part in ((mine, others, left), (others, mine, right))
                for over in both.reduced
            )
            if not (mine == others or once) or not frozenset().union(*both.reduced) <= mine | others:
                return False
        else:
            over = next(iter(both.reduced), frozenset())
            # Equal loops, or one that runs once a row of the other. A part with fewer axes otherwise would be
            # repeated along the rest.
            if not (mine == others or is_row_part(mine, others, over) or is_row_part(others, mine, over)):
                return False
            # A reduction's axes must be loops of each part as a whole, or not at all.
            if any(over & part not in (over, frozenset()) for part in (mine, others)):
                return False
        if both.reduced:
            if not self._along_memory(both):
                return False
            # The narrower of two reductions is the row: the other goes over rows.
            width = min((points(both.sizes, over) for over in both.reduced), default=1.0)
            # Longer rows are processed in a loop and need not fit. A row in registers holds an element of each buffer
            # at each position.
            if width <= MAX_REGISTER_ROW and width * len(both.buffers) > _MAX_ROW_ELEMENTS:
                return False
        return True

    def _along_memory(self, group: FusionGroup) -> bool:
        """Whether all large buffers are contiguous along axes of one kind: reduced in one way, or not reduced. A kernel
        that loops along rows would load each cache line of a transposed tensor many times."""
        kinds = set()
        for name in group.buffers:
            if self.lowered.bytes(name) < _CACHED_BYTES:
                continue
            for index in accesses(group, name):
                inner = [axis for axis, stride in index.strides if stride == 1]
                whole = any(index.axes & over for over in group.reduced)
                # An access that changes along no reduced axis is made once, outside of the loop.
                if inner and whole and not index.indirect:
                    kinds.add(next((over for over in group.reduced if inner[0] in over), frozenset()))
        return len(kinds) <= 1

    def _replace(self, a: int, b: int, joined: FusionGroup) -> None:
        for at, _ in joined.members:
            self.group_of[at] = a
        self.groups[a] = joined
        del self.groups[b]
        # The neighbours of both become neighbours of `a`; the edges between the two disappear.
        for links, back in ((self.after, self.before), (self.before, self.after)):
            merged = (links[a] | links.pop(b)) - {a, b}
            links[a] = merged
            for other in merged:
                back[other].discard(b)
                back[other].add(a)

    # ---- results

    def kernels(self) -> list[FusedLoops | Extern]:
        result: list[FusedLoops | Extern] = []
        for at in self._order():
            group = self.groups[at]
            operation = self.lowered.operations[group.members[0][0]]
            if isinstance(operation, Extern):
                result.append(operation)
                continue
            # In the order of the step, so that each store comes after the values that it reads.
            loops = [self.lowered.operations[member] for member, _ in sorted(group.members, key=_first)]
            nodes = tuple(dict.fromkeys(node for loop in loops for node in loop.nodes))
            with self.guard(nodes):
                form, buffers = self._form(group)
                result.append(FusedLoops(self._merged(form), buffers, nodes))
        return result

    def _order(self) -> list[int]:
        """Groups in topological order, otherwise in the step's order; effects keep their order.

        :meth:`_path_between` follows paths in the order of the step only, which keeps it cheap. A path through a group
        with an early and a late member escapes it, and two joins may then wait for each other. Such a group is split
        into its operations again.
        """
        while len(order := self._topological()) < len(self.groups):
            waiting = [at for at in self.groups.keys() - set(order) if len(self.groups[at].members) > 1]
            assert waiting, "operations of a graph wait for each other"
            # The group that reaches furthest is most likely the one with a path around it. The position breaks ties,
            # for all ranks alike.
            self._split(max(waiting, key=lambda at: (self.groups[at].last - self.groups[at].first, at)))
        return order

    def _topological(self) -> list[int]:
        """Kahn's algorithm, the earliest group first. Groups on a cycle, and those behind one, are left out."""
        waiting = {at: len(needs) for at, needs in self.before.items()}
        # Ready groups in the order of the step, so that live ranges stay close to those of the captured order.
        ready = [(self.groups[at].first, at) for at, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            _, at = heapq.heappop(ready)
            order.append(at)
            for other in self.after[at]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(ready, (self.groups[other].first, other))
        return order

    def _split(self, at: int) -> None:
        """Let each operation of a group be a group of its own again."""
        self.refusals["joins that wait for each other"] += 1
        # Operations alone have no cycles, so splitting groups ends them.
        for member, _ in self.groups.pop(at).members:
            self.groups[member] = single(member, self.lowered.operations[member])
            self.group_of[member] = member
        self._link_groups()

    def _form(self, group: FusionGroup) -> Numbered:
        """The nest of a group, over numbered buffers, and the names of these."""
        inside = {at for at, _ in group.members}
        place: dict[str, int] = {}
        parts = []
        # In the order of the step, so that each store comes after the values that it reads.
        for at, substitution in sorted(group.members, key=_first):
            loop = self.lowered.operations[at]
            assert isinstance(loop, Loop)
            common = tuple([place.setdefault(name, len(place)) for name in loop.buffers])
            parts.append(GroupMember(loop.form, common, tuple(substitution.items())))
        buffers = [self.lowered.buffers.get(name) for name in place]
        dtypes = tuple([None if buffer is None else buffer.dtype for buffer in buffers])
        # A buffer that only members read is never stored: this is what fusion saves.
        needed = frozenset([number for name, number in place.items() if self._needed(name, inside)])
        form, kept = self._fused(tuple(group.sizes), tuple(parts), dtypes, needed)
        names = list(place)
        return Numbered(form, tuple([names[number_of(name)] for name in kept]))

    def _needed(self, name: str, inside: set[int]) -> bool:
        return name in self.lifetimes.results or any(at not in inside for at in self.readers.get(name, ()))


def _first(member: tuple[int, Substitution]) -> int:
    return member[0]
