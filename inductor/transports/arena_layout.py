"""Assigns arena offsets to the tensors of a step's peer-access collectives, from the order of nodes in its graph.

Results in the arena stay there until their last reader has run. Inputs that peers read are copied into the arena when
their collective starts, unless their producer, a GEMM or a generated kernel, can write them there directly, which saves
the copy. Such a producer gets ``meta["arena_slots"]``: for each of its outputs an :class:`ArenaSlot` or None.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, is_collective, is_wait
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.graph.aliasing import looks_into, read_by_storage
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.liveness import Liveness, LiveRange, liveness
from weft.inductor.graph.node_order import waits_of
from weft.inductor.graph.serializable import serializable
from weft.inductor.runtime.memory_plan import GEMMS
from weft.inductor.transports.arena import ArenaPlan, CollectiveInterval, Region, can_write, plan
from weft.inductor.transports.peer_calls import (
    CopyEngineGather,
    PeerCall,
    arena_tensors_of,
    bytes_of,
    call_of,
    inputs_of,
)
from weft.inductor.transports.symmetric_memory import buffer_bytes

Node = torch.fx.Node


@serializable
@dataclass(frozen=True)
class ArenaSlot:
    """The place of a contiguous tensor in the arena of a group.

    Attributes:
        group: the group's name in the graph.
        offset: bytes from the beginning of the arena.
        sizes: of the tensor.
        dtype: of the tensor.
    """

    group: str
    offset: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


def lay_out(step: StepGraph, memory: Liveness | None = None) -> dict[str, ArenaPlan]:
    """Assign arena offsets to all tensors of the step's peer-access collectives. Changes ``step``, and ``memory``, its
    liveness where the caller has it: results that producers write into the arena have no bytes there afterwards.

    The nodes must be in issue order: lifetimes and barriers are read from it, and a later reordering would make bytes
    be reused too early. Returns the plans by group name; empty if no collective uses peer access.
    """
    starts = [node for node in step.graph.nodes if isinstance(node.target, PeerCall)]
    if not starts:
        return {}
    positions = _StepPositions(step, memory)
    # Groups have arenas of their own: a barrier of one group proves nothing about the ranks of another.
    groups = dict.fromkeys(group_of(node) for node in starts)
    return {group: _lay_out(positions, [node for node in starts if group_of(node) == group]) for group in groups}


def arena_sizes(step: StepGraph) -> dict[str, int]:
    """Bytes of the arena per group name, for a step after :func:`lay_out`, bound or not."""
    sizes: dict[str, int] = {}
    for node, call in _calls(step):
        members = call.arena_tensors([used.meta["val"] for used in inputs_of(node)], node.meta["val"])
        ends = (offset + bytes_of(member) for offset, member in zip(call.offsets, members, strict=True))
        # From the offsets: no plan is kept, and the graph alone has to tell, before and after binding.
        sizes[call.group] = max(sizes.get(call.group, 0), *ends)
    return sizes


def shared_bytes(step: StepGraph) -> int:
    """Bytes of this rank's memory that peers can address, signal pads included, for a step after :func:`lay_out`."""
    groups = {call.group: (call.world, node.meta["val"][0].device) for node, call in _calls(step)}
    sizes = arena_sizes(step)
    return sum(buffer_bytes(world, sizes[group], device) for group, (world, device) in groups.items())


def _calls(step: StepGraph) -> Iterator[tuple[Node, PeerCall]]:
    for node in step.graph.nodes:
        call = getattr(node.target, "call", node.target)  # a BoundPeerCall keeps its PeerCall
        if isinstance(call, PeerCall):
            yield node, call


def _lay_out(positions: _StepPositions, starts: list[Node]) -> ArenaPlan:
    # All collectives of the group first: whether a producer may write into the arena depends on waits that come before
    # it.
    intervals = [positions.interval(start) for start in starts]
    regions: list[Region] = []
    producers: list[Node | None] = []
    for number, start in enumerate(starts):
        for at in range(len(start.meta["val"])):
            producer = positions.producer(start, at, intervals)
            # One tensor can be an input of two collectives. Its producer writes it once, for the first of them; the
            # second gets a copy.
            producer = None if producer in producers else producer
            regions.append(positions.region(number, start, at, producer, intervals))
            producers.append(producer)
    layout = plan(intervals, regions)
    # Offsets come in the order in which regions were made: by collective, then by tensor.
    placed = iter(zip(layout.offsets, producers, strict=True))
    # The target is replaced, not changed: copies of the graph share targets with it.
    for start, opening_barrier in zip(starts, layout.opening_barriers, strict=True):
        call = call_of(start)
        members = [next(placed) for _ in start.meta["val"]]
        # Decided by the order, like the offsets: only a call behind a wait of this step may write on the compute
        # stream.
        if isinstance(call, CopyEngineGather):
            call = replace(call, copy_in_on_compute_stream=positions.copies_in_on_compute_stream(start, intervals))
        start.target = replace(call, offsets=tuple(offset for offset, _ in members), opening_barrier=opening_barrier)
        for offset, producer in members:
            if producer is not None:
                val = producer.meta["val"]
                _put(producer, ArenaSlot(call.group, offset, tuple(val.shape), val.dtype))
                positions.range(producer).size = 0
    return layout


def _put(producer: Node, slot: ArenaSlot) -> None:
    """Make a node write its output into ``slot``. A getitem node selects an output of its kernel."""
    if producer.target is not operator.getitem:
        producer.meta["arena_slots"] = (slot,)
        return
    kernel, at = producer.args
    assert isinstance(kernel, Node)
    slots = list(kernel.meta.get("arena_slots") or [None] * len(kernel.meta["val"]))
    slots[at] = slot  # type: ignore[index]
    kernel.meta["arena_slots"] = tuple(slots)


class _StepPositions:
    """Positions in the issue order and live ranges of a step."""

    def __init__(self, step: StepGraph, memory: Liveness | None = None) -> None:
        self.memory = memory or liveness(step)
        self.at = {node: position for position, node in enumerate(self.memory.order)}
        self.escaping = escaping(step)

    def interval(self, start: Node) -> CollectiveInterval:
        """The interval of the collective that ``start`` starts. All tensors of a collective complete together, so its
        earliest wait ends the interval."""
        return CollectiveInterval(
            self.at[start], min(self.at[wait] for wait in waits_of(start)), call_of(start).stream_name
        )

    def region(
        self, number: int, start: Node, at: int, producer: Node | None, intervals: Sequence[CollectiveInterval]
    ) -> Region:
        """The arena bytes that tensor ``at`` of a collective needs; ``producer`` writes it if it is not None."""
        # Three cases: a result that peers write, an input that the collective copies in, an input that its producer
        # writes.
        size = bytes_of(arena_tensors_of(start)[at])
        if call_of(start).in_arena:
            # Views keep the bytes in use as well, so the end of the live range counts, not that of the node. Peers
            # also write a result that nothing reads, until the wait.
            elements = [user for user in start.users if user.target is operator.getitem and user.args[1] == at]
            ends = [self.range(element).end for element in elements]
            return Region(size, (number,), last_read=max(ends, default=intervals[number].wait))
        # The collective copies the input in. Nothing on the compute stream reads that copy, so it is free when the
        # collectives have passed.
        if producer is None:
            return Region(
                size, (number,), self.at[start] if self.copies_in_on_compute_stream(start, intervals) else None
            )
        return Region(size, (number,), self.first_write(producer), self.last_read(producer, start))

    def copies_in_on_compute_stream(self, start: Node, intervals: Sequence[CollectiveInterval]) -> bool:
        """Whether the compute stream copies the shards into the arena, see :class:`CopyEngineGather`."""
        return isinstance(start.target, CopyEngineGather) and can_write(intervals, self.at[start])

    def range(self, node: Node) -> LiveRange:
        """The live range of a tensor's storage."""
        # A single tensor has a single storage; only lists have several.
        (found,) = self.memory.of[node]
        return found

    def first_write(self, producer: Node) -> int:
        """Position at which the output is written. A getitem is written when its kernel runs."""
        return self.at[producer.args[0] if producer.target is operator.getitem else producer]  # type: ignore[index]

    def last_read(self, producer: Node, start: Node) -> int:
        """Position of the last node other than ``start`` that uses the storage of ``producer``; -1 if there is none.

        A collective uses its inputs until it completes, so its waits count, not its start.
        """
        # Readers through views, and after writes in place, hold the bytes too.
        users = {user for value in self.range(producer).values for user in value.users} - {start}
        ends = [self.at[end] for user in users for end in (waits_of(user) if is_collective(user) else [user])]
        return max(ends, default=-1)

    def producer(self, start: Node, at: int, intervals: Sequence[CollectiveInterval]) -> Node | None:
        """The producer that can write input ``at`` of ``start`` into the arena; None if the input must be copied."""
        if not call_of(start).reads_arena:
            return None
        operand, (_, dtype) = inputs_of(start)[at], arena_tensors_of(start)[at]
        # Through reshapes: a gradient is often flattened between its GEMM and its reduction.
        node = whole_source(operand)
        if "inplace" in node.meta:  # it shares its storage with the node that allocated it
            node = self.range(node).maker
        # What is used after the step cannot be in the arena: the next step overwrites it. What is read by its storage
        # would see the whole arena. A write before this step's first wait could overwrite bytes that peers still read.
        if (
            operand.meta["val"].dtype != dtype
            or not _accepts_output_buffer(node)
            or not _has_all_elements_of(operand, node)
            or node in self.escaping
            or read_by_storage(node)
            or not can_write(intervals, self.first_write(node))
        ):
            return None
        # No later node may write to the storage while peers read it: only views, and in-place additions before the
        # collective starts, are allowed.
        others = (value for value in self.range(node).values if value not in (node, node.args[0]))
        before = self.at[start]
        return node if all(looks_into(value) or self._is_added(value, before) for value in others) else None

    def _is_added(self, value: Node, before: int) -> bool:
        return "inplace" in value.meta and self.at[value] < before


def whole_source(node: Node) -> Node:
    """The node that ``node`` is a view of, as long as views show all elements in order: reshapes, not slices or
    transposes. Returns ``node`` itself if it is no such view."""
    while looks_into(node) and node.target is not operator.getitem:
        source = node.all_input_nodes[0]
        val = source.meta["val"]
        ordered = isinstance(val, torch.Tensor) and val.is_contiguous()
        if not (ordered and _has_all_elements_of(node, source)) or is_wait(node):
            break
        node = source
    return node


def _has_all_elements_of(tensor: Node, producer: Node) -> bool:
    """Whether ``tensor``, which shares the storage of ``producer``, has all of its elements in order. A view or an
    in-place result may also be a part of it, or transposed, and peers would then read the wrong bytes."""
    val, produced = tensor.meta["val"], producer.meta["val"]
    return val.is_contiguous() and val.dtype == produced.dtype and val.numel() == produced.numel()


def _accepts_output_buffer(node: Node) -> bool:
    """Whether the node produces a contiguous tensor and accepts an output buffer for it: a GEMM with ``out=``, or a
    generated kernel of fixed sizes. Outputs that continue an input in place have no buffer of their own."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not val.is_contiguous() or "inplace" in node.meta:
        return False
    if node.target in GEMMS:
        return True
    # A kernel of symbolic sizes has no constant size to place; an output that continues an input is that input's
    # memory.
    kernel, at = node.args if node.target is operator.getitem else (None, 0)
    call = kernel.target if isinstance(kernel, Node) else None
    return isinstance(call, KernelCall) and not call.symbols and call.outputs[at].name not in call.continued  # type: ignore
