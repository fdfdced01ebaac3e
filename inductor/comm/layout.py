"""Where the members of a step's collectives over peers lie in the arena, read off the order of its graph.

Results that lie in the arena stay there until their last reader has run. Inputs that peers read are copied there when
their collective starts, unless the node that makes them can write them there itself: a matrix product or a generated
kernel. That node then carries ``meta["place"]``: for each of its results a :class:`Slot`, or None.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from weft.capture.graph import StepGraph, group_of, is_collective, is_wait
from weft.inductor.comm.arena import Exchange, Layout, Region, can_write, plan
from weft.inductor.comm.symmetric import buffer_bytes
from weft.inductor.comm.transports import CopyEngineGather, PeerCall, bytes_of, call_of, inputs_of, members_of
from weft.inductor.kernel_call import KernelCall
from weft.inductor.liveness import LiveRange, liveness
from weft.inductor.passes.escapes import escaping
from weft.inductor.passes.order import waits_of
from weft.inductor.runtime.geometry import looks_into, read_by_storage
from weft.inductor.runtime.memory_plan import PRODUCTS

Node = torch.fx.Node


@dataclass(frozen=True)
class Slot:
    """Where in the arena of a group a contiguous tensor lies, ``offset`` in bytes."""

    group: str
    offset: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


def lay_out(step: StepGraph) -> dict[str, Layout]:
    """Give each member of the step's collectives over peers its place in its group's arena. Changes ``step``.

    The nodes have to stand in the order in which they will be issued. Returns the layouts by group.
    """
    starts = [node for node in step.graph.nodes if isinstance(node.target, PeerCall)]
    if not starts:
        return {}
    places = _Places(step)
    groups = dict.fromkeys(group_of(node) for node in starts)
    return {group: _lay_out(places, [node for node in starts if group_of(node) == group]) for group in groups}


def arena_sizes(step: StepGraph) -> dict[str, int]:
    """Bytes of the arena that each group needs for a step that is laid out, or bound."""
    sizes: dict[str, int] = {}
    for node, call in _calls(step):
        members = call.members([used.meta["val"] for used in inputs_of(node)], node.meta["val"])
        ends = (offset + bytes_of(member) for offset, member in zip(call.offsets, members, strict=True))
        sizes[call.group] = max(sizes.get(call.group, 0), *ends)
    return sizes


def shared_bytes(step: StepGraph) -> int:
    """Bytes of a rank's memory that its peers can address, for a step that is laid out, or bound."""
    groups = {call.group: (call.world, node.meta["val"][0].device) for node, call in _calls(step)}
    sizes = arena_sizes(step)
    return sum(buffer_bytes(world, sizes[group], device) for group, (world, device) in groups.items())


def _calls(step: StepGraph) -> Iterator[tuple[Node, PeerCall]]:
    for node in step.graph.nodes:
        call = getattr(node.target, "call", node.target)  # what is bound has it
        if isinstance(call, PeerCall):
            yield node, call


def _lay_out(places: _Places, starts: list[Node]) -> Layout:
    exchanges = [places.exchange(start) for start in starts]
    regions: list[Region] = []
    makers: list[Node | None] = []
    for number, start in enumerate(starts):
        for at in range(len(start.meta["val"])):
            maker = places.maker(start, at, exchanges)
            maker = None if maker in makers else maker
            regions.append(places.region(number, start, at, maker, exchanges))
            makers.append(maker)
    layout = plan(exchanges, regions)
    placed = iter(zip(layout.offsets, makers, strict=True))
    for start, opens in zip(starts, layout.opens, strict=True):
        call = call_of(start)
        members = [next(placed) for _ in start.meta["val"]]
        if isinstance(call, CopyEngineGather):
            call = replace(call, ahead=places.comes_ahead(start, exchanges))
        start.target = replace(call, offsets=tuple(offset for offset, _ in members), opens=opens)
        for offset, maker in members:
            if maker is not None:
                _put(maker, Slot(call.group, offset, tuple(maker.meta["val"].shape), maker.meta["val"].dtype))
    return layout


def _put(maker: Node, slot: Slot) -> None:
    """Let a node write its result into ``slot``; an element of a kernel's results stands for the kernel."""
    if maker.target is not operator.getitem:
        maker.meta["place"] = (slot,)
        return
    kernel, at = maker.args
    assert isinstance(kernel, Node)
    place = list(kernel.meta.get("place") or [None] * len(kernel.meta["val"]))
    place[at] = slot  # type: ignore[index]
    kernel.meta["place"] = tuple(place)


class _Places:
    """Positions, and who uses what until when, of a step as its nodes stand."""

    def __init__(self, step: StepGraph) -> None:
        self.memory = liveness(step)
        self.at = {node: position for position, node in enumerate(self.memory.order)}
        self.held = escaping(step)

    def exchange(self, start: Node) -> Exchange:
        return Exchange(self.at[start], min(self.at[wait] for wait in waits_of(start)), call_of(start).lane)

    def region(self, number: int, start: Node, at: int, maker: Node | None, exchanges: Sequence[Exchange]) -> Region:
        """What member ``at`` of a collective needs; ``maker`` writes it where it is not None."""
        size = bytes_of(members_of(start)[at])
        if call_of(start).in_arena:
            elements = [user for user in start.users if user.target is operator.getitem and user.args[1] == at]
            ends = [self.range(element).end for element in elements]
            return Region(size, (number,), read=max(ends, default=self.at[start]))
        if maker is None:
            return Region(size, (number,), self.at[start] if self.comes_ahead(start, exchanges) else None)
        return Region(size, (number,), self.written(maker), self.read(maker, start))

    def comes_ahead(self, start: Node, exchanges: Sequence[Exchange]) -> bool:
        """Whether the compute stream brings what peers copy, see :class:`CopyEngineGather`."""
        return isinstance(start.target, CopyEngineGather) and can_write(exchanges, self.at[start])

    def range(self, node: Node) -> LiveRange:
        (found,) = self.memory.of[node]
        return found

    def written(self, maker: Node) -> int:
        return self.at[maker.args[0] if maker.target is operator.getitem else maker]  # type: ignore[index]

    def read(self, maker: Node, start: Node) -> int:
        """Position of the last node that uses what ``maker`` makes, ``start`` left out."""
        users = {user for value in self.range(maker).values for user in value.users} - {start}
        ends = [self.at[end] for user in users for end in (waits_of(user) if is_collective(user) else [user])]
        return max(ends, default=-1)

    def maker(self, start: Node, at: int, exchanges: Sequence[Exchange]) -> Node | None:
        """The node that can write an input of ``start`` into the arena, None where it has to be copied there."""
        if not call_of(start).reads_arena:
            return None
        given, (_, dtype) = inputs_of(start)[at], members_of(start)[at]
        node = whole(given)
        if "inplace" in node.meta:  # it lies where the first value of its memory does
            node = self.range(node).maker
        if (
            given.meta["val"].dtype != dtype
            or not _writes_anywhere(node)
            or not _is_all_of(given, node)
            or node in self.held
            or read_by_storage(node)
            or not can_write(exchanges, self.written(node))
        ):
            return None
        # Nobody writes to it any more: all that lies in its memory are views, and what was added to it before.
        others = (value for value in self.range(node).values if value not in (node, node.args[0]))
        before = self.at[start]
        return node if all(looks_into(value) or self._is_added(value, before) for value in others) else None

    def _is_added(self, value: Node, before: int) -> bool:
        return "inplace" in value.meta and self.at[value] < before


def whole(node: Node) -> Node:
    """What ``node`` is a view of that shows it whole and in order."""
    while looks_into(node) and node.target is not operator.getitem:
        source = node.all_input_nodes[0]
        given = source.meta["val"]
        ordered = isinstance(given, torch.Tensor) and given.is_contiguous()
        if not (ordered and _is_all_of(node, source)) or is_wait(node):
            break
        node = source
    return node


def _is_all_of(given: Node, maker: Node) -> bool:
    """Whether a value in the memory that ``maker`` makes, or shows, is that memory, whole and in order: a view, and
    what was written in place, may be a part of it, or turned."""
    val, made = given.meta["val"], maker.meta["val"]
    return val.is_contiguous() and val.dtype == made.dtype and val.numel() == made.numel()


def _writes_anywhere(node: Node) -> bool:
    """Whether the node makes a contiguous tensor that it can be told a place for."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not val.is_contiguous() or "inplace" in node.meta:
        return False
    if node.target in PRODUCTS:
        return True
    kernel, at = node.args if node.target is operator.getitem else (None, 0)
    call = kernel.target if isinstance(kernel, Node) else None
    return isinstance(call, KernelCall) and not call.symbols and call.outputs[at].name not in call.continued  # type: ignore
