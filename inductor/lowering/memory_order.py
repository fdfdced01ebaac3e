"""How computed values lie in memory, seen through the operations that compute them.

Eager gives each result a layout, and a graph records it. In a kernel most results are not stored: a reduction then
reads what its operand is computed from, which may lie in memory in another order. The gradient of an average of
images is recorded with rows of pixels innermost, and multiplied by an image with channels innermost.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from weft.inductor.loop_ir.ir import Buffer, Int, Nest
from weft.inductor.lowering.registry import Operand

Strides = tuple[Int, ...]


class MemoryOrders:
    """The strides at which elementwise results are read, where those differ from their own. A result has several where
    it is computed from tensors that lie across each other."""

    def __init__(self) -> None:
        self._strides: dict[str, tuple[Strides, ...]] = {}
        self._broadcast: set[str] = set()  # results of which all operands are broadcast, and so small

    def note(self, nest: Nest, names: Mapping[str, str], buffers: Mapping[str, Buffer]) -> None:
        """Record how the result of a numbered nest is read; ``names`` are those of its buffers. Only elementwise nests
        without a reduction are looked through."""
        found = _elementwise(nest)
        if found is None:
            return
        stored, own, loads = found
        target = buffers[names[stored]]
        if nest.sizes != target.sizes or own != _strides(target):
            return
        # What is broadcast is small. Of the others the widest move most bytes. Positions have no buffer.
        read = [(names[buffer], strides) for buffer, strides in loads]
        wide = [(buffers[name], strides) for name, strides in read if name in buffers and name not in self._broadcast]
        if not wide:
            self._broadcast.add(target.name)
            return
        most = max(source.dtype.itemsize for source, _ in wide)
        largest = [
            each for source, strides in wide if source.dtype.itemsize == most for each in self._read(source, strides)
        ]
        self._strides[target.name] = tuple(dict.fromkeys(largest))

    def strides(self, operand: Operand, buffers: Mapping[str, Buffer]) -> tuple[Strides, ...]:
        """The strides at which an operand is read: its own where it is a view, or no elementwise result."""
        buffer = buffers.get(operand.buffer)
        whole = buffer is not None and (buffer.sizes, buffer.strides) == (operand.sizes, operand.strides)
        own = (operand.strides,)
        return self._strides.get(operand.buffer, own) if whole else own

    def _read(self, source: Buffer, strides: Strides) -> tuple[Strides, ...]:
        """The strides at which a buffer is read, where a nest reads it at these."""
        own = (strides,)
        return self._strides.get(source.name, own) if strides == _strides(source) else own


@functools.lru_cache(maxsize=1024)
def _elementwise(nest: Nest) -> tuple[str, Strides, tuple[tuple[str, Strides], ...]] | None:
    """Of a nest with one store and no reduction: the buffer that it stores to, the strides by axis, and the same of the
    loads that change along all axes. None for other nests."""
    if nest.reduces or len(nest.stores) != 1:
        return None
    (store,) = nest.stores
    rank = range(len(nest.sizes))
    strides_of = lambda index: tuple([index.stride(axis) for axis in rank])
    loads = [(load.buffer, strides_of(load.index)) for load in nest.reads]
    whole = lambda strides: all(stride != 0 or size == 1 for stride, size in zip(strides, nest.sizes, strict=True))
    return store.buffer, strides_of(store.index), tuple([load for load in loads if whole(load[1])])


def _strides(buffer: Buffer) -> Strides:
    """The strides of an index of the whole buffer, which has none along an axis of one element."""
    return tuple([0 if size == 1 else stride for size, stride in zip(buffer.sizes, buffer.strides, strict=True)])
