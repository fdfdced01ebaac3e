"""The grammar of a lowered step: nests and calls in an order in which every buffer is whole before it is read.

It holds after lowering, after inlining and after fusion, and is checked after each where ``knobs.verify_graphs`` is on,
with every nest by itself (:func:`weft.inductor.loop_ir.verify.verify_nest`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from weft.capture.user_code import format_frame
from weft.errors import MalformedNest
from weft.inductor.graph.faults import Guard, unguarded
from weft.inductor.graph.sizes import symbols_of
from weft.inductor.loop_ir.bounds import extent, is_negative
from weft.inductor.loop_ir.ir import Buffer, Int, Nest, Store
from weft.inductor.loop_ir.verify import listing, overlap, points_stored, verify_nest
from weft.inductor.lowering.lowered_step import Extern, Lowered, NestItem, computed_nodes
from weft.inductor.lowering.registry import SEEDS

Node = torch.fx.Node


def verify_lowered(lowered: Lowered, items: Sequence[NestItem | Extern], stage: str, guard: Guard = unguarded) -> None:
    """Check the nests and calls of a step.

    Args:
        items: in the order in which they run.
        stage: of the compiler that made them, for the message.
        guard: the context in which each nest is checked.

    Raises:
        MalformedNest: a nest breaks the grammar of :func:`verify_nest`; an operand is no window on its buffer; a buffer
            is read before all its elements are stored, an element of it is stored twice, or a result never.
    """
    _StepVerifier(lowered, stage).run(items, guard)


def origin(nodes: Sequence[Node]) -> str:
    """The operations and the user's line that a nest comes from."""
    # The last node first: a fused nest is named after what it stores, and inlined operations come before.
    frames = (frame for node in nodes[::-1] for frame in node.meta.get("frames") or ())
    frame = next(frames, None)
    names = ", ".join(f"{node.name} ({node.target})" for node in nodes)
    return f"{names}, {format_frame(frame)}" if frame is not None else names


class _StepVerifier:
    def __init__(self, lowered: Lowered, stage: str) -> None:
        self.lowered, self.stage = lowered, stage
        # Of results too: what the data decides (`nonzero`) defines a symbol where the result appears.
        self.symbols = symbols_of(node.meta.get("val") for node in lowered.step.graph.nodes)
        # Inputs are whole from the start. `whole` only grows: a functional step never invalidates a buffer.
        self.whole = {node.name for node in lowered.step.placeholders} | {SEEDS}
        # Buffers that were read: storing to one of them later would change what an earlier reader should have seen.
        self.read: set[str] = set()
        self.stores: dict[str, list[tuple[Nest, Store]]] = {}

    def run(self, items: Sequence[NestItem | Extern], guard: Guard) -> None:
        self._windows()
        for item in items:
            # A call is trusted to write its results as a whole: there is no nest to look into.
            if isinstance(item, Extern):
                self._reads(item.reads & self.lowered.buffers.keys(), (item.node,))
                self.whole |= item.writes
                continue
            nodes, valid = computed_nodes(item), False
            with guard(nodes):
                self._nest(item.nest, nodes)
                valid = True
            if not valid:
                self.whole |= item.writes  # what reads them is not at fault
        operands = self.lowered.operands
        results = [node for node in self.lowered.step.results if isinstance(node, Node) and node in operands]
        for node in results:
            # A result that no nest stores would be returned as uninitialised memory.
            if not self._is_whole(operands[node].buffer):
                self._fail(f"result {node.name} is never computed as a whole", (node,))

    def _fail(self, what: str, nodes: Sequence[Node], nest: Nest | None = None, at: Any = None) -> NoReturn:
        raise MalformedNest(what, "" if nest is None else listing(nest, at), self.stage, origin(nodes))

    def _windows(self) -> None:
        """Every operand is a window on its buffer, of the same dtype."""
        for node, operand in self.lowered.operands.items():
            buffer = self.lowered.buffers[operand.buffer]
            if operand.dtype != buffer.dtype:
                self._fail(f"{node.name} is {operand.dtype}, its buffer {buffer.name} is {buffer.dtype}", (node,))
            # Negative strides do not occur in torch, so the last element is the one furthest out.
            last = operand.offset + sum((n - 1) * s for n, s in zip(operand.sizes, operand.strides, strict=True))
            if 0 not in operand.sizes and (is_negative(extent(buffer) - 1 - last) or is_negative(operand.offset)):
                self._fail(f"{node.name} is a window that reaches element {last} of {buffer.name}", (node,))

    def _nest(self, nest: Nest, nodes: tuple[Node, ...]) -> None:
        buffers = self.lowered.buffers
        verify_nest(nest, buffers, stage=self.stage, origin=origin(nodes), symbols=self.symbols)
        # What the nest stores itself is read at the same point; `verify_nest` has checked that.
        self._reads({load.buffer for load in nest.reads} - set(nest.writes), nodes, nest)
        for store in nest.stores:
            name = store.buffer
            # In a functional step each buffer is written once, by one or by several nests, before anybody reads it.
            if name in self.whole or name in self.read:
                self._fail(f"{name} is written after it was computed", nodes, nest, store)
            for earlier_nest, earlier in self.stores.get(name, ()):
                # Masks and indices from data are not decided here; within one nest, `verify_nest` has compared the
                # stores.
                plain = earlier_nest is not nest and _plain(earlier) and _plain(store)
                if plain and overlap(earlier, earlier_nest, store, nest):
                    self._fail(f"two nests store to one element of {name}", nodes, nest, store)
            self.stores.setdefault(name, []).append((nest, store))

    def _reads(self, names: Any, nodes: Sequence[Node], nest: Nest | None = None) -> None:
        for name in sorted(names):
            if not self._is_whole(name):
                load = None if nest is None else next((one for one in nest.reads if one.buffer == name), None)
                self._fail(f"{name} is read before all its elements are stored", nodes, nest, load)
            self.read.add(name)

    def _is_whole(self, name: str) -> bool:
        """Whether all elements of a buffer are stored: as many as it has, by stores that do not overlap."""
        if name in self.whole:
            return True
        stores = self.stores.get(name)
        if not stores:
            return False
        # Counting needs no geometry: stores that are injective and do not overlap cover a buffer exactly when there
        # are as many elements. A masked or indirect store is taken to complete it.
        if all(_plain(store) for _, store in stores):
            stored = sum(points_stored(nest, store) for nest, store in stores)
            missing = _elements(self.lowered.buffers[name]) - stored
            # Too few or too many; a symbolic difference of unknown sign passes.
            if is_negative(missing) or is_negative(-missing):
                return False
        self.whole.add(name)
        return True


def _plain(store: Store) -> bool:
    return store.mask is None and not store.index.indirect


def _elements(buffer: Buffer) -> Int:
    # An expanded dimension (stride 0) is one element in memory.
    return math.prod(size for size, stride in zip(buffer.sizes, buffer.strides, strict=True) if stride != 0)
