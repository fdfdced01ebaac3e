"""How computed values lie in memory, seen through the operations that compute them.

Eager gives each result a layout, and a graph records it. In a kernel most results are not stored: a reduction then
reads what its operand is computed from, which may lie in memory in another order. The gradient of an average of
images is recorded with rows of pixels innermost, and multiplied by an image with channels innermost.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.inductor.loop_ir.ir import Buffer, Int, Load, Nest
from weft.inductor.lowering.registry import Operand

Strides = tuple[Int, ...]


class MemoryOrders:
    """The strides at which elementwise results are read, where those differ from their own. A result has several where
    it is computed from tensors that lie across each other."""

    def __init__(self) -> None:
        self._strides: dict[str, tuple[Strides, ...]] = {}
        self._broadcast: set[str] = set()  # results of which all operands are broadcast, and so small

    def note(self, nest: Nest, buffers: Mapping[str, Buffer]) -> None:
        """Record how the result of a nest is read. Only elementwise nests without a reduction are looked through."""
        if nest.reduces or len(nest.stores) != 1:
            return
        (store,) = nest.stores
        target = buffers[store.buffer]
        rank = range(len(nest.sizes))
        if nest.sizes != target.sizes or any(store.index.stride(at) != _stride(target, at) for at in rank):
            return
        # What is broadcast is small. Of the others the widest move most bytes. Positions have no buffer.
        wide = [load for load in nest.reads if load.buffer in buffers and load.buffer not in self._broadcast]
        wide = [load for load in wide if all(load.index.stride(at) != 0 or nest.sizes[at] == 1 for at in rank)]
        if not wide:
            self._broadcast.add(target.name)
            return
        most = max(buffers[load.buffer].dtype.itemsize for load in wide)
        largest = [load for load in wide if buffers[load.buffer].dtype.itemsize == most]
        found = [each for load in largest for each in self._read(load, buffers[load.buffer], len(rank))]
        self._strides[target.name] = tuple(dict.fromkeys(found))

    def strides(self, operand: Operand, buffers: Mapping[str, Buffer]) -> tuple[Strides, ...]:
        """The strides at which an operand is read: its own where it is a view, or no elementwise result."""
        buffer = buffers.get(operand.buffer)
        whole = buffer is not None and (buffer.sizes, buffer.strides) == (operand.sizes, operand.strides)
        own = (operand.strides,)
        return self._strides.get(operand.buffer, own) if whole else own

    def _read(self, load: Load, source: Buffer, rank: int) -> tuple[Strides, ...]:
        whole = len(source.sizes) == rank and all(load.index.stride(at) == _stride(source, at) for at in range(rank))
        own = (tuple(load.index.stride(at) for at in range(rank)),)
        return self._strides.get(source.name, own) if whole else own


def _stride(buffer: Buffer, axis: int) -> Int:
    """The stride of an index of the whole buffer, which has none along an axis of one element."""
    return 0 if buffer.sizes[axis] == 1 else buffer.strides[axis]
