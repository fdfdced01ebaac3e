"""Live ranges of the storages of a step in a given order of its nodes, and the live bytes at each node.

In: a StepGraph and an order. Out: a :class:`Liveness`. The unit is the *storage*: views of it, and in-place operations
on it, share it, as their fakes do. Inputs are live during the whole step, outputs from the node that makes them to the
end, everything else from the node that makes it through the last one that reads it. A collective reads until it has
been waited for. Values in a symmetric arena (:mod:`weft.inductor.transports.arena_layout`) count as 0 bytes, because
the arena is allocated all the time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_wait
from weft.capture.node_meta import source_line
from weft.capture.sizes_in_bytes import format_bytes
from weft.inductor.graph.aliasing import copies, effects_of, looks_into
from weft.inductor.graph.live_range import BLOCK, LiveInterval, bytes_over_time
from weft.inductor.graph.operations import argument_at
from weft.inductor.graph.sizes import tensors_in
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

_MOST_NAMED = 20  # storages that an explanation lists. A choice.


@dataclass(eq=False)
class LiveRange(LiveInterval):
    """The live interval of one storage. Its ``size`` is 0 where only the data decides.

    Attributes:
        maker: the node that makes it (a placeholder for an input's).
        values: the nodes whose results lie in it, views included.
    """

    maker: Node
    values: list[Node] = field(default_factory=list)

    @property
    def is_input(self) -> bool:
        """Whether the storage is alive before the step begins."""
        return self.maker.op == "placeholder"


@dataclass(eq=False)
class Liveness:
    """The memory of a step over its nodes.

    Attributes:
        order: the nodes, as they run.
        ranges: its storages, in the order they are made.
        of: the storages that each node's results lie in.
        unknown: nodes that make storages whose size only the data decides.
    """

    order: list[Node]
    ranges: list[LiveRange]
    of: dict[Node, list[LiveRange]]
    unknown: list[Node]

    @cached_property
    def over_time(self) -> list[int]:
        """Bytes alive while each node runs, aligned with ``order``."""
        return bytes_over_time(self.ranges, len(self.order))

    @property
    def peak(self) -> int:
        """Most bytes alive at once."""
        return max(self.over_time, default=0)

    @property
    def peak_at(self) -> int:
        """Position of the first node during which ``peak`` bytes are alive."""
        return self.over_time.index(self.peak)

    def alive(self, at: int) -> list[LiveRange]:
        """Storages alive while node number ``at`` runs, largest first."""
        return sorted((r for r in self.ranges if r.start <= at <= r.end), key=lambda r: -r.size)

    def explain(self, at: int | None = None) -> str:
        """The largest storages at a position (default: the peak), a line each, with the user's line that made them."""
        at = self.peak_at if at is None else at
        alive = self.alive(at)
        lines = [f"{format_bytes(self.over_time[at])} in {len(alive)} storages at {self.order[at].name}"]
        for found in alive[:_MOST_NAMED]:
            lines.append(f"{format_bytes(found.size):>12}  {found.maker.name}  {source_line(found.maker)}".rstrip())
        return "\n".join(lines)


def liveness(step: StepGraph, order: Sequence[Node] | None = None, *, rounded: bool = True) -> Liveness:
    """Live ranges of all storages of ``step``, in time linear in its nodes.

    Args:
        order: a topological order of all nodes, the output last (default: as they stand in the graph).
        rounded: count each storage in whole blocks of 512 bytes, as CUDA's allocator does.
    """
    order = list(step.graph.nodes) if order is None else list(order)
    walk = _Walk(order, rounded)
    for position, node in enumerate(order):
        walk.visit(position, node)
    return Liveness(order, list(walk.ranges.values()), walk.of, walk.unknown)


class _Walk:
    def __init__(self, order: list[Node], rounded: bool) -> None:
        self.last = len(order) - 1
        self.rounded = rounded
        self.ranges: dict[int, LiveRange] = {}
        self.of: dict[Node, list[LiveRange]] = {}
        self.unknown: list[Node] = []
        self.same_as: dict[int, int] = {}

    def visit(self, position: int, node: Node) -> None:
        of = self.of
        # An element reads nothing. Counted as a reader of its list, it would keep all tensors of a coalesced result
        # alive.
        if node.target is not operator.getitem:
            for used in node.all_input_nodes:
                for known in of[used]:
                    if known.end < position:
                        known.end = position
        if node.op == "output":
            return
        # The communication stream reads its operands until the wait: the allocator must not hand out their memory
        # before.
        if is_wait(node):
            self._extend_inputs(node, position)
        if "inplace" in node.meta or looks_into(node):
            self._unite(node)
        found: dict[int, LiveRange] = {}
        for at, tensor in enumerate(_tensors(node.meta.get("val"))):
            key = torch_adapter.storage_key(tensor)
            key = self.same_as.get(key, key)
            known = self.ranges.get(key)
            if known is None:
                known = self.ranges[key] = self._new(position, node, tensor)
                known.size = 0 if _in_arena(node, at) else known.size
            found[key] = known
        of[node] = list(found.values())
        for known in of[node]:
            known.values.append(node)
            if known.end < position:
                known.end = position

    def _new(self, position: int, node: Node, tensor: torch.Tensor) -> LiveRange:
        size = torch_adapter.hint(tensor.untyped_storage().nbytes())
        if size is None:
            self.unknown.append(node)
        size = size or 0
        if self.rounded:
            size = -(-size // BLOCK) * BLOCK
        # Inputs belong to the caller, who holds them for the whole call.
        return LiveRange(size, position, self.last if node.op == "placeholder" else position, node)

    def _unite(self, node: Node) -> None:
        """Let fake storages that are one storage when the step runs count as one.

        These are the storages of a node that makes a view, picks from a list, or may run in place.

        Fakes of one capture share storages by themselves; those of nodes that a pass put in the place of others do not.
        """
        if _shares_as_fakes(node):
            return
        for operand, result in _same_memory(node):
            if (key := torch_adapter.storage_key(result)) == torch_adapter.storage_key(operand):
                continue
            if self.same_as.get(key, key) != (of := self._key(operand)):
                self.same_as[key] = of

    def _key(self, tensor: torch.Tensor) -> int:
        key = torch_adapter.storage_key(tensor)
        return self.same_as.get(key, key)

    def _extend(self, node: Node, position: int) -> None:
        for known in self.of[node]:
            if known.end < position:
                known.end = position

    def _extend_inputs(self, wait: Node, position: int) -> None:
        start = wait.args[0]
        assert isinstance(start, Node)
        picked = start.args[0] if start.target is operator.getitem else start
        if isinstance(picked, Node) and is_collective(picked):
            for used in picked.all_input_nodes:
                self._extend(used, position)


def _in_arena(node: Node, at: int) -> bool:
    """Whether result number ``at`` lies in memory that ranks share, which is there from before the step."""
    place = node.meta.get("arena_slots")
    if place is not None:
        return place[at] is not None
    # Operations have no such attribute, and take long to say so.
    return not isinstance(node.target, OpOverload) and getattr(node.target, "in_arena", False)


def _shares_as_fakes(node: Node) -> bool:
    """Whether the fake of a view, or of an element of a list, already has the storage of what it is taken from: so it
    is for nearly all nodes, and found sooner than by :func:`_same_memory`."""
    operand, val = node.args[0] if node.args else None, node.meta.get("val")
    if "inplace" in node.meta or not isinstance(operand, Node) or not isinstance(val, torch.Tensor):
        return False
    source: Any = operand.meta.get("val")
    if node.target is operator.getitem:
        index = node.args[1]
        source = source[index] if isinstance(source, (list, tuple)) and isinstance(index, int) else None
    if source is val:
        return True
    # The layout first: others than strided have no storage.
    strided = isinstance(source, torch.Tensor) and source.layout is val.layout is torch.strided
    return strided and torch_adapter.storage_key(source) == torch_adapter.storage_key(val)


def _same_memory(node: Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a tensor given to ``node`` and one of its results that lies in the same storage. ``node`` makes a view,
    picks from a list, or may run in place."""
    val = node.meta.get("val")
    # The executor runs it in place where that is safe. A node that a pass made can have a fake in memory of its own.
    if "inplace" in node.meta:
        what = effects_of(node.meta["inplace"])
        assert what is not None
        written = [argument_at(node, at, name) for at, name in what.writes]
        results = val if isinstance(val, (list, tuple)) and what.fresh + len(what.writes) > 1 else [val]
        pairs = zip(_tensors(torch.fx.node.map_arg(written, _val)), _tensors(results[what.fresh :]), strict=False)
    elif node.target is operator.getitem:
        operand, index = _val(node.args[0]), node.args[1]
        picked = [operand[index]] if isinstance(operand, (list, tuple)) and isinstance(index, int) else []
        pairs = zip(_tensors(picked), _tensors(val), strict=False)
    else:
        operand = _tensors(_val(node.all_input_nodes[0]))[:1]
        pairs = ((operand[0], result) for result in ([] if copies(node) else _tensors(val)))
    yield from pairs


def _val(node: Any) -> Any:
    return node.meta.get("val")


def _tensors(val: object) -> list[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        return [val] if val.layout is torch.strided else []
    return [tensor for tensor in tensors_in(val) if tensor.layout is torch.strided]
