"""Where the values of a program lie in one block of memory, its arena.

A recording keeps all the memory that its program ever used, and an allocator that does not know what comes next uses
more than is held at once: for a step of Llama 1B on one GPU 11.2 GiB beside its inputs, of which no more than 9.2 are
held at any time. Here all lives are known, so each value gets its offset beforehand.

Finding offsets is dynamic storage allocation, which is NP-hard. Greedy by size (Pisarchyk and Lee, Efficient Memory
Management for Deep Neural Net Inference, 2020) places the largest value first, each into the smallest gap that it fits
between those that are alive with it; on training steps that is within a percent or two of what is held at once, and
where it is not, other orders are tried.

In the arena lies what a node makes that can be told where: the results of generated kernels, matrix products,
multi-tensor kernels and collectives over peers, of sizes known beforehand. What the step hands out, what other
kernels of ATen make, and what they read by its storage, comes from torch's allocator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.inductor.kernel_call import KernelCall
from weft.inductor.liveness import BLOCK, bytes_over_time
from weft.inductor.multi_tensor.launcher import Launcher
from weft.inductor.passes.lists import static
from weft.inductor.passes.order import waits_of
from weft.inductor.runtime.geometry import addresses_storage, sources, storages
from weft.inductor.runtime.placement import Leaf, Memory, Placement, leaves
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

aten = torch.ops.aten
# They write a result where they are told to at no cost: libraries do.
PRODUCTS: tuple[OpOverload, ...] = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
)

# Stretches of the program by which values are found that are alive together.
_STRETCHES = 64
# The part of what is alive at once by which an arena may be larger without another being tried.
_HARDLY = 0.02


class Life(NamedTuple):
    """A value's bytes, and the positions of the first and the last node during which it is alive, both included."""

    size: int
    start: int
    end: int


class Span(NamedTuple):
    """Where in the arena a tensor lies, ``offset`` in bytes."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


Spans = Span | list["Spans"] | None


@dataclass(frozen=True)
class MemoryPlan:
    """The arena of a program.

    Attributes:
        size: bytes.
        held: the most bytes in it that are held at once: no plan is smaller.
        made: bytes of all values that lie in it.
        spans: for nodes that are told where to put results a span, or a list as their results are, with None for what
            comes from torch's allocator.
        device: where it is; None where nothing lies in it.
    """

    size: int
    held: int
    made: int
    spans: dict[Node, Spans]
    device: torch.device | None


def plan_memory(step: StepGraph, placement: Placement) -> MemoryPlan:
    """Plan the arena of the program that runs ``step`` as it is placed."""
    lives = _Lives(step, placement)
    found = [(node, tree) for node in step.graph.nodes if (tree := lives.results(node)) is not None]
    offsets = pack(lives.found)
    left = iter(offsets)
    spans: dict[Node, Spans] = {node: _spans(tree, left) for node, tree in found}
    size = _end(lives.found, offsets)
    made = sum(life.size for life in lives.found)
    return MemoryPlan(size, most_held(lives.found), made, spans, lives.device)


def new_arena(size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes on ``device``."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def part(
    arena: torch.Tensor, offset: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor that lies ``offset`` bytes into ``arena``."""
    made = torch.empty(0, dtype=dtype, device=arena.device)
    return made.set_(arena.untyped_storage(), offset // dtype.itemsize, sizes, strides)


# ---- lives


class _Lives:
    """What of a placed step can lie in an arena.

    Attributes:
        found: the lives of the tensors that :meth:`results` has given so far, in its order.
        device: where they are: that of the first one, what is elsewhere is left out. None before that.
    """

    def __init__(self, step: StepGraph, placement: Placement) -> None:
        self.found: list[Life] = []
        self.device: torch.device | None = None
        self._placement = placement
        order = list(step.graph.nodes)
        self._at = {node: position for position, node in enumerate(order)}
        self._last = len(order) - 1
        self._read_late: dict[Memory, int] = {}
        for copy in placement.copies:
            self._read(copy.source, copy.after)
        for _, old in placement.kept:
            self._read(old, self._last)
        alone = [leaf for leaf in placement.returned if isinstance(leaf, Leaf)]
        for node in order:
            if addresses_storage(node):
                alone += leaves(placement.trees[node.args[0]])  # type: ignore[index]
        self._alone = {leaf.memory.root for leaf in alone if leaf.memory is not None}

    def results(self, node: Node) -> Spans:
        """The results of ``node`` that can lie in the arena, their offsets not known yet; None where none can."""
        if node in self._placement.writes or node in self._placement.free or node.op != "call_function":
            return None
        if node.target in PRODUCTS:
            val = node.meta["val"]
            fits = "place" not in node.meta and static([val]) and val.is_contiguous()
            return self._span(val, self._placement.trees[node], node) if fits else None
        if isinstance(node.target, Launcher) and not node.target.effects.writes:
            lists = zip(node.meta["val"], self._trees(node), strict=True)
            return [[self._span(val, tree, node) for val in vals] for vals, tree in lists]
        if getattr(node.target, "takes_out", False):  # a collective over peers, which writes until it is waited for
            until = max((self._at[wait] for wait in waits_of(node)), default=self._last)
            made = zip(node.meta["val"], self._trees(node), strict=True)
            return [self._span(val, tree, node, until) for val, tree in made]
        if not isinstance(node.target, KernelCall) or node.target.symbols:
            return None
        call, place = node.target, node.meta.get("place") or [None] * len(node.meta["val"])
        made = zip(node.meta["val"], self._trees(node), call.outputs, place, strict=True)
        return [
            None if buffer.name in call.continued or elsewhere is not None else self._span(val, tree, node)
            for val, tree, buffer, elsewhere in made
        ]

    def _trees(self, node: Node) -> list[Any]:
        tree = self._placement.trees[node]
        return tree if isinstance(tree, list) else [tree] * len(node.meta["val"])

    def _span(self, val: torch.Tensor, tree: Any, node: Node, until: int = 0) -> Span | None:
        memories = {leaf.memory.root for leaf in leaves(tree) if leaf.memory is not None}
        if len(memories) != 1 or not static([val]) or not val.numel() or self._shares(val, node):
            return None
        (memory,) = memories
        if memory.inputs or memory in self._alone or val.device != (self.device or val.device):
            return None
        self.device = val.device
        span = Span(0, tuple(val.shape), tuple(val.stride()), val.dtype)
        end = max(memory.busy_until, self._at[node], self._read_late.get(memory, 0), until)
        self.found.append(Life(-(-_bytes(span) // BLOCK) * BLOCK, self._at[node], end))
        return span

    def _shares(self, val: torch.Tensor, node: Node) -> bool:
        """Whether a result is no memory of its own."""
        given = set().union(*(storages(used) for used in sources(node)))
        return torch_adapter.storage_key(val) in given or val.storage_offset() != 0

    def _read(self, leaf: Leaf, position: int) -> None:
        if leaf.memory is not None:
            memory = leaf.memory.root
            self._read_late[memory] = max(position, self._read_late.get(memory, 0))


def _bytes(span: Span) -> int:
    """From the first byte of a tensor to its last one."""
    steps = ((size - 1) * stride for size, stride in zip(span.sizes, span.strides, strict=True))
    return (sum(steps) + 1) * span.dtype.itemsize


def _spans(tree: Spans, offsets: Iterator[int]) -> Spans:
    if isinstance(tree, list):
        return [_spans(item, offsets) for item in tree]
    return None if tree is None else tree._replace(offset=next(offsets))


# ---- offsets


def pack(lives: Sequence[Life]) -> list[int]:
    """Offsets at which values that are alive together have no byte in common: of a few orders in which values are
    placed those of the smallest arena, or of the first that is hardly larger than what is alive at once.

    Takes time linear in the values times how many of them are alive in a 64th of the program.
    """
    best: list[int] = []
    smallest, enough = math.inf, most_held(lives) * (1 + _HARDLY)
    for key in _ORDERS:
        offsets = _packed(lives, key)
        if (end := _end(lives, offsets)) < smallest:
            best, smallest = offsets, end
        if smallest <= enough:
            break
    return best


_Key = Callable[[Life], tuple[int, ...]]

# The largest first, those that are large for long, those that begin first.
_ORDERS: tuple[_Key, ...] = (
    lambda life: (-life.size, life.start),
    lambda life: (-life.size * (life.end - life.start + 1), life.start),
    lambda life: (life.start, -life.size),
)


def _packed(lives: Sequence[Life], key: _Key) -> list[int]:
    """Each value in the smallest gap that those before it leave."""
    offsets = [0] * len(lives)
    last = max((life.end for life in lives), default=0)
    length = last // _STRETCHES + 1
    placed: list[list[int]] = [[] for _ in range(last // length + 1)]
    for number in sorted(range(len(lives)), key=lambda number: key(lives[number])):
        size, start, end = lives[number]
        here = placed[start // length : end // length + 1]
        near = {
            other for stretch in here for other in stretch if lives[other].start <= end and start <= lives[other].end
        }
        offsets[number] = _smallest_gap(size, sorted((offsets[other], lives[other].size) for other in near))
        for stretch in here:
            stretch.append(number)
    return offsets


def _end(lives: Sequence[Life], offsets: Sequence[int]) -> int:
    """Bytes of an arena in which values lie there."""
    return max((offset + life.size for offset, life in zip(offsets, lives, strict=True)), default=0)


def _smallest_gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """Where the smallest gap of at least ``size`` bytes begins between stretches (offset, bytes), which may overlap."""
    end, best, smallest = 0, -1, 0
    for offset, length in taken:
        gap = offset - end
        if gap >= size and (best < 0 or gap < smallest):
            best, smallest = end, gap
        end = max(end, offset + length)
    return end if best < 0 else best


def most_held(lives: Sequence[Life]) -> int:
    """The most bytes that are alive at once."""
    return max(bytes_over_time(lives, max((life.end for life in lives), default=0) + 1))
