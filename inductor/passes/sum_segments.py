"""Sums of rows by index become multi-tensor calls with the same bits in every run.

These are the gradient of an embedding, ``index_add`` of the experts' outputs, and the gradient of indexed rows. ATen
sorts for some of them and uses atomics, in any order, for others. Here they become one of two calls:

- :class:`weft.inductor.multi_tensor.segment_sum.SegmentSum` for wide rows: a sort of the indices, by ATen where they
  are very many, then work linear in the rows and in the table.
- :class:`weft.inductor.multi_tensor.one_hot.OneHotSum` for narrow rows, where comparing every index with every row of
  the table is less work than a sort: a bias for each pair of positions, looked up by their distance.

Scattered sums along the last dimension are another operation, see :mod:`weft.inductor.passes.shared_index`.

Left to ATen: tables and rows of unknown size, many narrow rows for many places, indices along other dimensions, counts
(``scale_grad_by_freq``) and integers. ATen's ``index_add`` and ``scatter_add`` use atomics on a GPU, as in the
uncompiled step. Tables of few rows are left to :mod:`weft.inductor.lowering.gather`.

Changes results: rows are summed in float32, in an order that only sizes decide, and rounded once. OneHotSum reads
values with 22 bits of significand.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph, drop_dead
from weft.inductor.graph.aliasing import is_lazy
from weft.inductor.graph.emitter import Emit, emitter
from weft.inductor.graph.fake_values import replace_uses
from weft.inductor.graph.operations import arguments
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.lowering.gather import few_places
from weft.inductor.multi_tensor.chunked_kernel import COLUMN_DTYPES
from weft.inductor.multi_tensor.one_hot import MAX_COLUMNS, OneHotSum
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.packed_sort import fits_packed_sort
from weft.inductor.multi_tensor.segment_sum import SegmentSum
from weft.inductor.passes.shared_index import SharedScatterSum
from weft.inductor.passes.tensor_lists import is_static, multi_tensor_call

Node = torch.fx.Node

aten = torch.ops.aten

_NARROWEST = 32  # elements of a row that is worth a sort
_MOST_COMPARED = 2**27  # pairs of an index and a place: the time of a sort and its launches
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILLS = (aten.full.default, aten.full_like.default, aten.new_full.default)


@changes_bits("rows are summed in float32, in an order that sizes decide, and rounded once")
def sum_segments(step: StepGraph) -> StepGraph:
    """Replace sums of rows by index by multi-tensor calls, where there are many rows and places. Changes ``step``."""
    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.target in _SUMS:
            segment_sum = _SUMS[node.target](arguments(node))
            if segment_sum is not None and segment_sum.is_faster(node):
                segment_sum.replace(step.graph, node)
    drop_dead(step.graph)
    return step


class _Sum:
    """A sum of rows by index.

    Args:
        rows: the summands; the first dimensions are those of ``index``.
        index: the row of the result that each summand is added to.
        size: rows of the result.
        base: what the sums are added to; None for zeros.
        skipped: an index whose summands are dropped; -1 for none.
        scale: factor of the summands.
        wraps: whether a negative index counts from the end.
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

    def is_faster(self, node: Node) -> bool:
        """Whether multi-tensor kernels support these tensors and are faster than ATen."""
        rows, index, table = (used.meta["val"] for used in (self.rows, self.index, node))
        base = self.base.meta["val"] if self.base is not None else table
        indexed = index.shape[:1] if self.repeats else index.shape
        if not is_static((rows, index, table, base)) or isinstance(self.scale, Node) or is_lazy(rows) or is_lazy(base):
            return False
        if not all(val.is_contiguous() for val in (table, base)) or not (self.repeats or index.is_contiguous()):
            return False
        plain = rows.dtype == table.dtype == base.dtype and rows.dtype in COLUMN_DTYPES
        whole = index.dtype in (torch.int32, torch.int64)
        consistent = rows.shape == (*indexed, *table.shape[1:]) and base.shape == table.shape
        consistent = consistent and table.shape[0] == self.size
        if not (plain and whole and consistent and indexed) or rows.numel() == 0 or table.device != rows.device:
            return False
        if few_places(self.size, rows.numel()):
            return False
        if not self._compares():
            return math.prod(table.shape[1:]) >= _NARROWEST and rows.is_contiguous()
        shape, stride = rows.shape, rows.stride()
        by_index, by_column = slice(len(indexed)), slice(len(indexed), None)
        return _is_one_dim(shape[by_index], stride[by_index]) and _is_one_dim(shape[by_column], stride[by_column])

    def _compares(self) -> bool:
        """Whether comparing every index with every place is less work than a sort."""
        index = self.index.meta["val"]
        count = index.shape[0] if self.repeats else index.numel()
        return self.rows.meta["val"].numel() <= count * MAX_COLUMNS and count * self.size <= _MOST_COMPARED

    def replace(self, graph: torch.fx.Graph, node: Node) -> None:
        """Replace ``node`` by a multi-tensor call."""
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
            base = [] if self.base is None or _is_zero(self.base) else [emit(aten.view.default, self.base, [-1, width])]
            flat = val.new_empty(self.size, width)
            ((table,),) = multi_tensor_call(graph, node, call, ([rows], indices, base), [[flat]])
            replace_uses(graph, node, emit(aten.view.default, table, list(val.shape)))
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
        """The index alone where the call sorts it; else the sorted index as int32, and the permutation."""
        val = index.meta["val"]
        if fits_packed_sort(len(val), self.size):
            return [index]
        if self.wraps:
            index = emit(aten.remainder.Scalar, index, self.size)
        if val.dtype != torch.int32:
            index = emit(aten._to_copy.default, index, dtype=torch.int32)
        both = emit(aten.sort.stable, index, stable=True)
        return [emit(operator.getitem, both, 0), emit(operator.getitem, both, 1)]


def _is_one_dim(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a view makes one dimension of these, from outermost to innermost."""
    dims = [dim for dim in zip(sizes, strides, strict=True) if dim[0] != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(dims))


def _is_zero(base: Node) -> bool:
    return base.target in _ZEROS or (base.target in _FILLS and arguments(base)["fill_value"] == 0)


def _embedding_backward(arguments: dict[str, Any]) -> _Sum | None:
    if arguments["scale_grad_by_freq"]:
        return None
    return _Sum(
        arguments["grad_output"], arguments["indices"], arguments["num_weights"], skipped=arguments["padding_idx"]
    )


def _index_add(arguments: dict[str, Any]) -> _Sum | None:
    index, base, scale = arguments["index"], arguments["self"], arguments["alpha"]
    if arguments["dim"] != 0 or index.meta["val"].dim() != 1 or base.meta["val"].dim() == 0:
        return None
    if isinstance(scale, float) and not math.isfinite(scale):  # sums of no rows, which are 0, are scaled too
        return None
    return _Sum(arguments["source"], index, base.meta["val"].shape[0], base, scale=scale)


def _index_put(arguments: dict[str, Any]) -> _Sum | None:
    indices, base = arguments["indices"], arguments["self"]
    if not arguments["accumulate"] or len(indices) != 1 or base.meta["val"].dim() == 0:
        return None
    return _Sum(arguments["values"], indices[0], base.meta["val"].shape[0], base, wraps=True)


def _scatter_add(arguments: dict[str, Any]) -> _Sum | SharedScatterSum | None:
    """Only where all columns of a row have one index, or many lines share a row of it, which ``index`` expresses by
    strides of 0."""
    index, base = arguments["index"], arguments["self"]
    val = index.meta["val"]
    if SharedScatterSum.matches(arguments) and _is_zero(base):
        return SharedScatterSum(arguments["src"], index)
    repeated = all(stride == 0 for size, stride in zip(val.shape[1:], val.stride()[1:], strict=True) if size != 1)
    if arguments["dim"] != 0 or val.dim() < 2 or not repeated or val.shape != arguments["src"].meta["val"].shape:
        return None
    return _Sum(arguments["src"], index, base.meta["val"].shape[0], base, repeats=True)


_SUMS: dict[Any, Callable[[dict[str, Any]], _Sum | SharedScatterSum | None]] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.scatter_add.default: _scatter_add,
}
