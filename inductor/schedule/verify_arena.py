"""Checks that values in a symmetric arena never overlap while one of them is in use.

The layout is made in :mod:`weft.inductor.transports.arena`. This file does not trust it and checks the rule: two values
may share a byte only if every rank has finished with the first before any rank begins with the second. On one rank, the
order of issue, the streams and the waits say what comes first. Between ranks, only a barrier does. Each collective over
peers has a barrier between what it does before (copies into the arena, pushes) and after (pulls), and one more at its
beginning if it *opens* with one. So a barrier must follow the last use of the first value and come before the first use
of the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, is_collective
from weft.inductor.graph.liveness import Liveness
from weft.inductor.graph.node_order import waits_of
from weft.inductor.transports.arena_layout import ArenaSlot
from weft.inductor.transports.peer_calls import CopyEngineGather, PeerCall, bytes_of, inputs_of

Node = torch.fx.Node


@dataclass(frozen=True)
class ArenaFault:
    """What is wrong with a layout: a sentence, and the node it is about."""

    node: Node
    what: str


@dataclass(frozen=True)
class _Member:
    """A tensor of a collective in the arena.

    Attributes:
        start: the collective.
        begin, end: bytes of the arena, ``end`` not included.
        before: the barriers that have been passed on every rank before the first use, a bit each.
        after: the barriers that no rank passes before the last use.
    """

    start: Node
    begin: int
    end: int
    before: int
    after: int


def arena_faults(step: StepGraph, memory: Liveness) -> Iterator[ArenaFault]:
    """The faults in the arena layouts of ``step``, whose collectives over peers have their places, or are bound.

    Takes time quadratic in the tensors of one group's collectives.

    Args:
        memory: of ``step``: which values lie in one storage.
    """
    # Each group has an arena and barriers of its own: barriers of one group say nothing about another's.
    groups: dict[str, list[Node]] = {}
    for node in memory.order:
        if isinstance(_call(node), PeerCall):
            groups.setdefault(group_of(node), []).append(node)
    for starts in groups.values():
        yield from _GroupArena(starts, memory).faults()


def _call(node: Node) -> PeerCall | None:
    return getattr(node.target, "call", node.target)  # type: ignore[return-value]


class _GroupArena:
    """The collectives over peers of one group, in order of issue. Barrier ``2 * n`` is the one that collective ``n``
    opens with, barrier ``2 * n + 1`` the one in its middle."""

    def __init__(self, starts: list[Node], memory: Liveness) -> None:
        self.starts, self.memory = starts, memory
        self.at = {node: position for position, node in enumerate(memory.order)}
        self.calls = [_call(node) for node in starts]
        # A call without a wait counts as running until the end, so nothing may follow it.
        self.waited = [min((self.at[wait] for wait in waits_of(node)), default=len(self.at)) for node in starts]
        self.streams: dict[str, list[int]] = {}
        for number, call in enumerate(self.calls):
            self.streams.setdefault(call.stream_name, []).append(number)  # type: ignore[union-attr]

    def faults(self) -> Iterator[ArenaFault]:
        members: list[_Member] = []
        for number, start in enumerate(self.starts):
            call = self.calls[number]
            assert call is not None
            kinds = call.arena_tensors([used.meta["val"] for used in inputs_of(start)], start.meta["val"])
            if len(call.offsets) != len(kinds):
                yield ArenaFault(start, f"has {len(call.offsets)} places in the arena for {len(kinds)} tensors")
                continue
            for which, (offset, kind) in enumerate(zip(call.offsets, kinds, strict=True)):
                yield from self.misplaced(start, which, offset, call)
                before, after = self.first_use(number, which, call), self.last_use(number, which, call)
                member = _Member(start, offset, offset + bytes_of(kind), before, after)
                # Between steps there is no barrier. Whatever this step touches before its first one may still be read
                # by a rank that is in the previous step.
                if not before:
                    yield ArenaFault(start, "uses the arena before any barrier of this step: a peer may still read it")
                # All pairs, whatever the order of issue: on streams that run side by side, an earlier call is not
                # always the earlier user.
                for other in members:
                    if other.begin < member.end and member.begin < other.end and not _ordered(other, member):
                        yield ArenaFault(
                            start,
                            f"tensor {which}, bytes {member.begin:,} to {member.end:,} of the arena, overlaps one of "
                            f"{other.start.name}, {other.begin:,} to {other.end:,}: no barrier is between their uses",
                        )
                members.append(member)

    # ---- uses

    def first_use(self, number: int, which: int, call: PeerCall) -> int:
        """The barriers passed before a tensor is first written."""
        written = self.writer(number, which, call)
        # Written by the compute stream, which knows only of barriers that it has waited for.
        if written is not None:
            return self.passed_before(written)
        # Written on the communication stream, which starts behind the compute stream and runs its calls one after the
        # other. The barrier in the middle of this call comes too late: copies and pushes go before it.
        passed = self.passed_before(self.at[self.starts[number]])
        for earlier in self.streams[call.stream_name]:
            if earlier >= number:
                break
            passed |= self.bits(earlier)
        return passed | (1 << 2 * number if call.opening_barrier else 0)

    def last_use(self, number: int, which: int, call: PeerCall) -> int:
        """The barriers that come after the collective has ended and every node has run that reads the tensor."""
        on_stream = self.streams[call.stream_name]
        # A wait for a later call of the stream proves this one ended, too.
        ended = min((self.waited[n] for n in on_stream if n >= number), default=len(self.at))
        after = self.starting_after(ended)
        for later in on_stream:
            if later > number:
                after |= self.bits(later)
        start = self.starts[number]
        # A barrier counts only if it comes after every use, so each reader takes away those that are issued before it.
        for node in self.readers(start, which, call):
            after &= self.starting_after(self.at[node])
        written = self.writer(number, which, call)
        return after if written is None else after & self.starting_after(written)

    def passed_before(self, position: int) -> int:
        """The barriers of collectives that the compute stream has waited for when it comes to ``position``. A wait for
        a collective is one for all before it on its stream."""
        passed = 0
        for numbers in self.streams.values():
            # From the last to the first: once a wait is found, all earlier calls of the stream have ended.
            known = False
            for number in reversed(numbers):
                known = known or self.waited[number] < position
                if known:
                    passed |= self.bits(number)
        return passed

    def starting_after(self, position: int) -> int:
        """The barriers of collectives that are issued after ``position``."""
        # By issue: a collective starts after everything that was issued before it, on every rank.
        return sum(self.bits(number) for number, start in enumerate(self.starts) if self.at[start] > position)

    def bits(self, number: int) -> int:
        call = self.calls[number]
        assert call is not None
        return 1 << 2 * number + 1 | (1 << 2 * number if call.opening_barrier else 0)

    # ---- who writes and reads

    def writer(self, number: int, which: int, call: PeerCall) -> int | None:
        """Position at which the compute stream writes a tensor into the arena; None where the collective does."""
        start = self.starts[number]
        # Its tensors in the arena are results, or copies that the kernel itself makes.
        if not call.reads_arena:
            return None
        found = self.direct_writer(start, which, call)
        if found is not None:
            return self.at[found]
        return self.at[start] if isinstance(call, CopyEngineGather) and call.copy_in_on_compute_stream else None

    def direct_writer(self, start: Node, which: int, call: PeerCall) -> Node | None:
        """The node that writes an operand where peers read it; None where the operand is copied there."""
        # Bound calls hold tensors in `arena_slots`, not :class:`ArenaSlot`, so after binding an operand counts as
        # copied. The layout was checked before, and binding does not change it.
        for found in self.memory.of[inputs_of(start)[which]]:
            places = found.maker.meta.get("arena_slots", ())
            slots = [slot for slot in places if isinstance(slot, ArenaSlot)]
            if any(slot.group == call.group and slot.offset == call.offsets[which] for slot in slots):
                return found.maker
        return None

    def readers(self, start: Node, which: int, call: PeerCall) -> Iterator[Node]:
        """The nodes, other than the collective, until which a tensor in the arena must stay: its readers, and the waits
        of collectives that read it."""
        if call.in_arena:
            values = [user for user in start.users if user.args[1:] == (which,)]
        # The operand's own memory is in the arena, so whatever else reads it counts. A copy of it has no other readers.
        elif self.direct_writer(start, which, call) is not None:
            values = [inputs_of(start)[which]]
        else:
            return
        for value in values:
            for found in self.memory.of[value]:
                # Views of a result keep its bytes in use, and so do collectives that send it on, until their own waits.
                for alias in found.values:
                    if call.in_arena:
                        yield alias
                    for user in alias.users:
                        if user is not start:
                            yield from waits_of(user) if is_collective(user) else [user]

    def misplaced(self, start: Node, which: int, offset: int, call: PeerCall) -> Iterator[ArenaFault]:
        """Whether a node writes an operand into the arena elsewhere than where the collective reads it."""
        operand = inputs_of(start)[which]
        for found in self.memory.of[operand] if call.reads_arena else ():
            place = found.maker.meta.get("arena_slots", ())
            vals = found.maker.meta.get("val")
            vals = vals if isinstance(vals, (list, tuple)) else [vals]
            for slot, val in zip(place, vals, strict=False):
                # One kernel may write several tensors, for several collectives and groups.
                mine = isinstance(slot, ArenaSlot) and slot.group == call.group and _same_storage(val, operand)
                if mine and slot.offset not in self.offsets_of(found.values, call):
                    yield ArenaFault(start, f"{found.maker.name} writes to byte {slot.offset:,}, not to {offset:,}")

    def offsets_of(self, values: list[Node], call: PeerCall) -> set[int]:
        """The places that collectives read any of ``values`` from."""
        found: set[int] = set()
        for start, other in zip(self.starts, self.calls, strict=True):
            if other is not None and other.reads_arena:
                found.update(
                    offset for used, offset in zip(inputs_of(start), other.offsets, strict=False) if used in values
                )
        return found


def _ordered(one: _Member, other: _Member) -> bool:
    """Whether a barrier stands between the uses of two members, whichever comes first."""
    return bool(one.after & other.before or other.after & one.before)


def _same_storage(val: object, operand: Node) -> bool:
    tensor = operand.meta["val"]
    if not isinstance(val, torch.Tensor):
        return False
    return torch_adapter.storage_key(val) == torch_adapter.storage_key(tensor)
