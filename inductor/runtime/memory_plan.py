"""Memory planning: the offset of each value of a program in one block of device memory, the arena.

A CUDA graph keeps all memory that its program ever allocated, and a caching allocator, which does not know the next
request, uses more than the peak of live bytes: for a step of Llama 1B on one GPU 11.2 GiB beside the inputs, with a
peak of 9.2 GiB. All live ranges are known when the program is written, so each value gets its offset then.

Finding offsets is dynamic storage allocation, which is NP-hard. Greedy by size (Pisarchyk and Lee, Efficient Memory
Management for Deep Neural Net Inference, 2020) places the largest value first, each into the smallest gap that fits it
between the values that are live together with it. On training steps this is within 1% to 2% of the peak of live bytes;
where it is not, other orders are tried.

The arena holds outputs that can be written to a given address: of generated kernels, GEMMs, multi-tensor kernels and
peer collectives, with sizes known at compile time. Torch's allocator provides the rest: what the step returns, outputs
of other ATen kernels, and values that an operation reads through their storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.graph.aliasing import addresses_storage, sources, storages
from weft.inductor.graph.live_range import BLOCK, LiveInterval, peak_bytes
from weft.inductor.graph.node_order import waits_of
from weft.inductor.graph.sizes import spanned
from weft.inductor.passes.tensor_lists import is_static
from weft.inductor.runtime.multi_tensor import Launcher
from weft.inductor.runtime.placement import Memory, Placement, Variable, leaves
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

aten = torch.ops.aten
# Library calls whose ``out`` form writes straight to the given address, without a copy.
GEMMS: tuple[OpOverload, ...] = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
)

# The program is divided into this many segments of positions. A new value is compared only with values of the segments
# that it is live in, not with all values placed before it.
_SEGMENTS = 64
# An arena at most this fraction above the lower bound (the peak of live bytes) is accepted without trying other orders.
_SIZE_TOLERANCE = 0.02


class ArenaSpan(NamedTuple):
    """A tensor in the arena: ``offset`` in bytes, sizes and strides in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


Spans = ArenaSpan | list["Spans"] | None


@dataclass(frozen=True)
class MemoryPlan:
    """The arena of a program.

    Attributes:
        size: bytes of the arena.
        peak_live: largest sum of bytes of arena values that are live at one position; a lower bound of ``size``.
        total: sum of the bytes of all values in the arena.
        spans: for each node with outputs in the arena a span, or a list shaped like its outputs; None for outputs that
            come from torch's allocator.
        device: device of the arena; None where no value lies in it.
    """

    size: int
    peak_live: int
    total: int
    spans: dict[Node, Spans]
    device: torch.device | None


def plan_memory(step: StepGraph, placement: Placement) -> MemoryPlan:
    """Plan the arena of the program that runs ``step`` with this ``placement``."""
    # From the placement, not from the graph: writes in place and reused variables are decided there, and they extend
    # live ranges.
    candidates = _ArenaCandidates(step, placement)
    trees = [(node, tree) for node in step.graph.nodes if (tree := candidates.spans_of(node)) is not None]
    intervals = candidates.intervals
    offsets = pack(intervals)
    # ``intervals`` has one entry per span, appended in the order in which ``_with_offsets`` consumes the offsets.
    remaining = iter(offsets)
    spans: dict[Node, Spans] = {node: _with_offsets(tree, remaining) for node, tree in trees}
    size = _arena_size(intervals, offsets)
    total = sum(interval.size for interval in intervals)
    return MemoryPlan(size, peak_bytes(intervals), total, spans, candidates.device)


def new_arena(size: int, device: torch.device) -> torch.Tensor:
    """An uninitialised arena: a uint8 tensor of shape [size] on ``device``."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def part(
    arena: torch.Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of these sizes and strides (elements) at ``offset`` bytes in the storage of ``arena``.

    ``offset`` must be a multiple of the element size of ``dtype``.
    """
    view = torch.empty(0, dtype=dtype, device=arena.device)
    return view.set_(arena.untyped_storage(), offset // dtype.itemsize, sizes, strides)


# ---- candidates


class _ArenaCandidates:
    """The outputs of a placed step that can lie in an arena.

    Attributes:
        intervals: live intervals of the spans that :meth:`spans_of` has returned so far, in that order.
        device: device of the first span; tensors on other devices are no candidates. None before the first span.
    """

    def __init__(self, step: StepGraph, placement: Placement) -> None:
        self.intervals: list[LiveInterval] = []
        self.device: torch.device | None = None
        self._placement = placement
        order = list(step.graph.nodes)
        self._at = {node: position for position, node in enumerate(order)}
        self._last = len(order) - 1
        # The copies and clones that the placement added are no nodes of the graph, so ``Memory.busy_until`` does not
        # count them as reads. Without this a value could be overwritten before it is copied into an updated input.
        self._read_late: dict[Memory, int] = {}
        for copy in placement.copies:
            self._read(copy.source, copy.after)
        for _, old in placement.final_clones:
            self._read(old, self._last)
        # The next call overwrites the arena, so nothing that the step returns may lie in it. An operation that reads
        # the whole storage of its operand (as_strided) would see the other values of the arena.
        excluded = [leaf for leaf in placement.returned if isinstance(leaf, Variable)]
        for node in order:
            if addresses_storage(node):
                excluded += leaves(placement.trees[node.args[0]])  # type: ignore[index]
        self._excluded = {leaf.memory.root for leaf in excluded if leaf.memory is not None}

    def spans_of(self, node: Node) -> Spans:
        """Spans with offset 0 for the outputs of ``node`` that can lie in the arena; None where none can."""
        # A write goes to memory that exists, and an elided node has no statement that could take an address.
        if node in self._placement.writes or node in self._placement.elided or node.op != "call_function":
            return None
        if node.target in GEMMS:
            # Into a tensor of other strides, `out=` would compute elsewhere and copy.
            val = node.meta["val"]
            fits = "arena_slots" not in node.meta and is_static([val]) and val.is_contiguous()
            return self._span(val, self._placement.trees[node], node) if fits else None
        if isinstance(node.target, Launcher) and not node.target.effects.writes:
            lists = zip(node.meta["val"], self._trees(node), strict=True)
            return [[self._span(val, tree, node) for val in vals] for vals, tree in lists]
        if getattr(node.target, "takes_out", False):
            # A peer collective writes its outputs until its last wait, also those that no node reads after that.
            until = max((self._at[wait] for wait in waits_of(node)), default=self._last)
            outputs = zip(node.meta["val"], self._trees(node), strict=True)
            return [self._span(val, tree, node, until) for val, tree in outputs]
        if not isinstance(node.target, KernelCall) or node.target.symbols:
            return None
        call, slots = node.target, node.meta.get("arena_slots") or [None] * len(node.meta["val"])
        results = zip(node.meta["val"], self._trees(node), call.outputs, slots, strict=True)
        # A continued buffer already has its memory, and an output with a slot lies in the symmetric arena.
        return [
            None if buffer.name in call.continued or slot is not None else self._span(val, tree, node)
            for val, tree, buffer, slot in results
        ]

    def _trees(self, node: Node) -> list[Any]:
        tree = self._placement.trees[node]
        return tree if isinstance(tree, list) else [tree] * len(node.meta["val"])

    def _span(self, val: torch.Tensor, tree: Any, node: Node, until: int = 0) -> ArenaSpan | None:
        memories = {leaf.memory.root for leaf in leaves(tree) if leaf.memory is not None}
        # One memory: a value that may lie in either of two has no address of its own.
        if len(memories) != 1 or not is_static([val]) or not val.numel() or self._shares(val, node):
            return None
        (memory,) = memories
        # One device: its first value decides which. A step on a GPU has only small tensors on the CPU.
        if memory.inputs or memory in self._excluded or val.device != (self.device or val.device):
            return None
        self.device = val.device
        span = ArenaSpan(0, tuple(val.shape), tuple(val.stride()), val.dtype)
        # The live range is that of the memory, not of the node's own value: views and in-place results extend it.
        end = max(memory.busy_until, self._at[node], self._read_late.get(memory, 0), until)
        size = spanned(span.sizes, span.strides) * span.dtype.itemsize
        # Whole blocks keep every offset a multiple of 512 bytes, which is the alignment that torch's allocator gives
        # and that vectorised loads and library kernels rely on.
        self.intervals.append(LiveInterval(-(-size // BLOCK) * BLOCK, self._at[node], end))
        return span

    def _shares(self, val: torch.Tensor, node: Node) -> bool:
        """Whether ``val`` lies in the storage of an operand, or not at the start of its own."""
        operands = set().union(*(storages(used) for used in sources(node)))
        return torch_adapter.storage_key(val) in operands or val.storage_offset() != 0

    def _read(self, leaf: Variable, position: int) -> None:
        if leaf.memory is not None:
            memory = leaf.memory.root
            self._read_late[memory] = max(position, self._read_late.get(memory, 0))


def _with_offsets(tree: Spans, offsets: Iterator[int]) -> Spans:
    if isinstance(tree, list):
        return [_with_offsets(item, offsets) for item in tree]
    return None if tree is None else tree._replace(offset=next(offsets))


# ---- offsets


def pack(intervals: Sequence[LiveInterval]) -> list[int]:
    """An offset (bytes) for each interval, such that intervals that overlap in time share no byte.

    Tries a few placement orders. Returns the smallest arena found, or the first within 2% of the peak of live bytes.
    Time is linear in the number of intervals times how many of them are live in one of 64 segments of the program.
    """
    best: list[int] = []
    # Each order costs as much as the first. A few percent of memory are worth that, less is not.
    smallest, enough = math.inf, peak_bytes(intervals) * (1 + _SIZE_TOLERANCE)
    for key in _PLACEMENT_ORDERS:
        offsets = _greedy_offsets(intervals, key)
        if (end := _arena_size(intervals, offsets)) < smallest:
            best, smallest = offsets, end
        if smallest <= enough:
            break
    return best


_Key = Callable[[LiveInterval], tuple[int, ...]]

# Largest size first; largest size times duration first; earliest start first. Ties keep the
# order of the graph, because sorting is stable, so all ranks get the same offsets.
_PLACEMENT_ORDERS: tuple[_Key, ...] = (
    lambda interval: (-interval.size, interval.start),
    lambda interval: (-interval.size * (interval.end - interval.start + 1), interval.start),
    lambda interval: (interval.start, -interval.size),
)


def _greedy_offsets(intervals: Sequence[LiveInterval], key: _Key) -> list[int]:
    """Offsets from placing the intervals in the order of ``key``, each into the smallest gap that fits it."""
    offsets = [0] * len(intervals)
    starts, ends = [interval.start for interval in intervals], [interval.end for interval in intervals]
    blocks: list[tuple[int, int]] = [(0, 0)] * len(intervals)  # offset and bytes of those that are placed
    last = max(ends, default=0)
    length = last // _SEGMENTS + 1
    placed: list[set[int]] = [set() for _ in range(last // length + 1)]  # numbers of placed intervals, by segment
    for number in sorted(range(len(intervals)), key=lambda number: key(intervals[number])):
        start, end, size = starts[number], ends[number], intervals[number].size
        first, final = start // length, end // length
        # In the segments between its first and its last, it overlaps whatever is live there.
        conflicts = set().union(*placed[first + 1 : final])
        # Both ends are inclusive: a kernel may write its output before it has read all operands, so an operand that is
        # read last at position p and an output written at p must not overlap.
        for segment in {first, final}:
            conflicts.update([other for other in placed[segment] if starts[other] <= end and start <= ends[other]])
        # Best fit keeps large gaps for large values, as in the paper.
        offsets[number] = _smallest_gap(size, sorted([blocks[other] for other in conflicts]))
        blocks[number] = offsets[number], size
        for segment in placed[first : final + 1]:
            segment.add(number)
    return offsets


def _arena_size(intervals: Sequence[LiveInterval], offsets: Sequence[int]) -> int:
    """Bytes of an arena with the intervals at these offsets."""
    return max((offset + interval.size for offset, interval in zip(offsets, intervals, strict=True)), default=0)


def _smallest_gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """Offset of the smallest gap of at least ``size`` bytes between ``taken`` blocks (offset, bytes), else their end.

    ``taken`` is sorted by offset. Blocks may overlap each other, because each was live at another time.
    """
    end, best, smallest = 0, -1, 0
    for offset, length in taken:
        gap = offset - end
        if gap >= size and (best < 0 or gap < smallest):
            best, smallest = end, gap
        end = max(end, offset + length)
    return end if best < 0 else best
