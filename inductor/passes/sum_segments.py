"""Sums of rows by index become one sort of the indices and sums of segments, or a product.

The gradient of an embedding, ``index_add`` of what experts computed, the gradient of picked rows: ATen sorts whole
rows' indices in ways of its own for some of these, and adds with atomics, in any order, for others. Here they are one
call, with the same bits at every run:

- :class:`weft.inductor.multi_tensor.segments.SegmentSum` for wide rows: work linear in the rows and in the table, and a
  sort of the indices, by ATen where they are very many;
- :class:`weft.inductor.multi_tensor.one_hot.OneHotSum` for narrow rows, where comparing every index with every place is
  less work than a sort: a bias for each pair of positions, looked up by their distance.

Left to ATen, whose work is linear too: tables and rows of sizes that are not known, many narrow rows for many places,
indices along other dimensions, counts (``scale_grad_by_freq``), whole numbers. Its ``index_add`` and ``scatter_add``
use atomics on a GPU, as the uncompiled step does. Where there are few places to add to,
:mod:`weft.inductor.lowering.gather` lets every place look at every row.

Changes numerics: sums are made in float32 in an order that sizes alone decide, and rounded once; values of narrow rows
count with 22 bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from weft.capture.graph import StepGraph, drop_dead
from weft.inductor.lowering.elementwise import arguments
from weft.inductor.lowering.gather import few_places
from weft.inductor.multi_tensor.one_hot import WIDEST, OneHotSum
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.packed_sort import packs
from weft.inductor.multi_tensor.segments import SegmentSum
from weft.inductor.multi_tensor.text import TRITON_DTYPES
from weft.inductor.passes.emitter import Emit, emitter
from weft.inductor.passes.lists import list_call

Node = torch.fx.Node

aten = torch.ops.aten

_NARROWEST = 32  # elements of a row that is worth a sort
_MOST_COMPARED = 2**27  # pairs of an index and a place: the time of a sort and its launches
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILLS = (aten.full.default, aten.full_like.default, aten.new_full.default)


def sum_segments(step: StepGraph) -> StepGraph:
    """Replace sums of rows by index, where many rows are summed in many places. Changes ``step``."""
    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.target in _SUMS:
            found = _SUMS[node.target](arguments(node))
            if found is not None and found.fits(node):
                found.replace(step.graph, node)
    drop_dead(step.graph)
    return step


class _Sum:
    """A sum of rows by index.

    Args:
        rows: the node of what is summed; its first dimensions are those of ``index``.
        index: the node of the indices.
        size: rows of the table.
        base: the node of what the sums are added to, None for zeros.
        wraps: whether an index below zero counts from the end.
        repeats: whether ``index`` repeats its first column in all others.
    """

    def __init__(
        self,
        rows: Node,
        index: Node,
        size: Any,
        base: Node | None = None,
        skipped: int = -1,
        scale: Any = 1,
        *,
        wraps: bool = False,
        repeats: bool = False,
    ) -> None:
        self.rows, self.index, self.size, self.base = rows, index, size, base
        self.skipped, self.scale = skipped, scale
        self.wraps, self.repeats = wraps, repeats

    def fits(self, node: Node) -> bool:
        """Whether kernels sum these tensors, and better than ATen."""
        rows, index, table = (used.meta["val"] for used in (self.rows, self.index, node))
        base = self.base.meta["val"] if self.base is not None else table
        indexed = index.shape[:1] if self.repeats else index.shape
        if not all(_is_static(val) for val in (rows, index, table, base)) or isinstance(self.scale, Node):
            return False
        if not all(val.is_contiguous() for val in (table, base)) or not (self.repeats or index.is_contiguous()):
            return False
        plain = rows.dtype == table.dtype == base.dtype and rows.dtype in TRITON_DTYPES
        whole = index.dtype in (torch.int32, torch.int64)
        alike = rows.shape == (*indexed, *table.shape[1:]) and table.shape[0] == self.size and base.shape == table.shape
        if not (plain and whole and alike and indexed) or rows.numel() == 0 or table.device != rows.device:
            return False
        if few_places(self.size, rows.numel()):
            return False
        if not self._compares():
            return math.prod(table.shape[1:]) >= _NARROWEST and rows.is_contiguous()
        return rows.is_contiguous() or (rows.dim() == 2 and len(indexed) == 1)

    def _compares(self) -> bool:
        """Whether comparing every index with every place is less work than a sort."""
        index = self.index.meta["val"]
        count = index.shape[0] if self.repeats else index.numel()
        return self.rows.meta["val"].numel() <= count * WIDEST and count * self.size <= _MOST_COMPARED

    def replace(self, graph: torch.fx.Graph, node: Node) -> None:
        """Let the users of ``node`` have the table that a segment sum makes."""
        val = node.meta["val"]
        width = math.prod(val.shape[1:])
        with graph.inserting_before(node):
            emit = emitter(graph, node)
            index = self._flat_index(emit)
            if not self._compares():
                indices: Any = self._sorted(emit, index)
                wraps = self.wraps and len(indices) == 1
                call: MultiTensor = SegmentSum(self.size, self.skipped, float(self.scale), wraps)
            else:
                indices = index
                call = OneHotSum(self.size, self.skipped, float(self.scale), self.wraps)
            rows = emit(aten.view.default, self.rows, [-1, width])
            base = [] if self._is_zero() else [emit(aten.view.default, self.base, [-1, width])]
            flat = val.new_empty(self.size, width)
            ((table,),) = list_call(graph, node, call, ([rows], indices, base), [[flat]])
            node.replace_all_uses_with(emit(aten.view.default, table, list(val.shape)))
        graph.erase_node(node)

    def _flat_index(self, emit: Emit) -> Node:
        """One index a row, contiguous."""
        index = self.index
        while self.repeats and index.meta["val"].dim() > 1:
            index = emit(aten.select.int, index, 1, 0)
        if not index.meta["val"].is_contiguous():
            index = emit(aten.clone.default, index, memory_format=torch.contiguous_format)
        return emit(aten.view.default, index, [-1])

    def _sorted(self, emit: Emit, index: Node) -> list[Node]:
        """The index alone where the call sorts it; else it in order, as int32, and where each came from."""
        val = index.meta["val"]
        if packs(len(val), self.size):
            return [index]
        if self.wraps:
            index = emit(aten.remainder.Scalar, index, self.size)
        if val.dtype != torch.int32:
            index = emit(aten._to_copy.default, index, dtype=torch.int32)
        both = emit(aten.sort.stable, index, stable=True)
        return [emit(operator.getitem, both, 0), emit(operator.getitem, both, 1)]

    def _is_zero(self) -> bool:
        if self.base is None or self.base.target in _ZEROS:
            return True
        return self.base.target in _FILLS and arguments(self.base)["fill_value"] == 0


def _is_static(val: torch.Tensor) -> bool:
    return all(type(size) is int for size in (*val.shape, *val.stride()))


def _embedding_backward(given: dict[str, Any]) -> _Sum | None:
    if given["scale_grad_by_freq"]:
        return None
    return _Sum(given["grad_output"], given["indices"], given["num_weights"], skipped=given["padding_idx"])


def _index_add(given: dict[str, Any]) -> _Sum | None:
    index, base = given["index"], given["self"]
    if given["dim"] != 0 or index.meta["val"].dim() != 1 or base.meta["val"].dim() == 0:
        return None
    return _Sum(given["source"], index, base.meta["val"].shape[0], base, scale=given["alpha"])


def _index_put(given: dict[str, Any]) -> _Sum | None:
    indices, base = given["indices"], given["self"]
    if not given["accumulate"] or len(indices) != 1 or base.meta["val"].dim() == 0:
        return None
    return _Sum(given["values"], indices[0], base.meta["val"].shape[0], base, wraps=True)


def _scatter_add(given: dict[str, Any]) -> _Sum | None:
    """Where all columns of a row go to one place, as ``index`` says by strides of zero."""
    index, base = given["index"], given["self"]
    val = index.meta["val"]
    repeated = all(stride == 0 for size, stride in zip(val.shape[1:], val.stride()[1:], strict=True) if size != 1)
    if given["dim"] != 0 or val.dim() < 2 or not repeated or val.shape != given["src"].meta["val"].shape:
        return None
    return _Sum(given["src"], index, base.meta["val"].shape[0], base, repeats=True)


_SUMS: dict[Any, Callable[[dict[str, Any]], _Sum | None]] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.scatter_add.default: _scatter_add,
}
