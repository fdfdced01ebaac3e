"""How computed values lie in memory, seen through the operations that compute them.

Eager gives each result a layout, and a graph records it. In a kernel most results are not stored: a reduction then
reads what its operand is computed from, which may lie in memory in another order. The gradient of an average of
images is recorded with rows of pixels innermost, and multiplied by an image with channels innermost.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.inductor.loop_ir.ir import Buffer, Index, Int, Nest
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
        if nest.reduces or len(nest.stores) != 1:
            return
        (store,) = nest.stores
        target = buffers[names[store.buffer]]
        rank = range(len(nest.sizes))
        if nest.sizes != target.sizes or any(store.index.stride(at) != _stride(target, at) for at in rank):
            return
        # What is broadcast is small. Of the others the widest move most bytes. Positions have no buffer.
        read = [(load.index, names[load.buffer]) for load in nest.reads]
        wide = [(index, name) for index, name in read if name in buffers and name not in self._broadcast]
        wide = [(index, name) for index, name in wide if _walks_all(index, nest)]
        if not wide:
            self._broadcast.add(target.name)
            return
        most = max(buffers[name].dtype.itemsize for _, name in wide)
        largest = [(index, buffers[name]) for index, name in wide if buffers[name].dtype.itemsize == most]
        found = [each for index, source in largest for each in self._read(index, source, len(rank))]
        self._strides[target.name] = tuple(dict.fromkeys(found))

    def strides(self, operand: Operand, buffers: Mapping[str, Buffer]) -> tuple[Strides, ...]:
        """The strides at which an operand is read: its own where it is a view, or no elementwise result."""
        buffer = buffers.get(operand.buffer)
        whole = buffer is not None and (buffer.sizes, buffer.strides) == (operand.sizes, operand.strides)
        own = (operand.strides,)
        return self._strides.get(operand.buffer, own) if whole else own

    def _read(self, index: Index, source: Buffer, rank: int) -> tuple[Strides, ...]:
        whole = len(source.sizes) == rank and all(index.stride(at) == _stride(source, at) for at in range(rank))
        own = (tuple(index.stride(at) for at in range(rank)),)
        return self._strides.get(source.name, own) if whole else own


def _walks_all(index: Index, nest: Nest) -> bool:
    """Whether an access changes along every axis of a nest."""
    return all(index.stride(axis) != 0 or size == 1 for axis, size in enumerate(nest.sizes))


def _stride(buffer: Buffer, axis: int) -> Int:
    """The stride of an index of the whole buffer, which has none along an axis of one element."""
    return 0 if buffer.sizes[axis] == 1 else buffer.strides[axis]
