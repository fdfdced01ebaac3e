"""Gathers by index tensors, their gradients (sums of rows by index), and assignments by a mask.

A sum by index is lowered where the result has few rows: every row of the result reads all indices, which is
deterministic and takes one kernel. For more rows :mod:`weft.inductor.passes.sum_segments` or ATen's kernels sort the
indices first, so that the work stays linear in the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.axes import integer, size_hint
from weft.inductor.loop_ir.ir import Index, Int, Position, Store, Value, register_dtype
from weft.inductor.lowering.elementwise import store_result
from weft.inductor.lowering.expressions import Expression, checked_index, constant, where
from weft.inductor.lowering.registry import Lowering, Node, Operand, convert, register_lowering
from weft.inductor.lowering.split import StagedReduction

aten = torch.ops.aten

# Comparing every index this often still costs about as much as reading the rows from memory once.
_MAX_PLACES = 8
_MAX_COMPARISONS = 2**24  # comparisons of an index with a place that take the time of a few launches


def _picked(operand: Operand, axes: Sequence[int | None], dim: int, at: Value) -> Expression:
    """The element at the nest's axes, at position ``at`` along dimension ``dim``."""
    index = operand.index([None if d == dim else axis for d, axis in enumerate(axes)])
    # Along a dimension of size 1 only 0 is legal, and the operand has no stride there.
    indirect = [(checked_index(at, operand.sizes[dim]), operand.strides[dim])] if operand.sizes[dim] != 1 else []
    return Expression(operand.load(Index(index.strides, index.offset, indirect)))


# Offsets are int64: the product of an int32 index with a stride overflows for tables of 2**31 elements.
def _whole(value: Value) -> Value:
    return convert(value, torch.int64)


@register_lowering(aten.embedding.default)
def _embedding(out: Lowering, node: Node) -> None:
    table = out.operand(node.args[0])
    sizes = out.result().sizes
    # Not wrapped: negative numbers are no rows of an embedding in eager either.
    at = _whole(out.value(node.args[1], sizes[:-1]))
    store_result(out, _picked(table, [None, len(sizes) - 1], 0, at))


@register_lowering(aten.index_select.default)
def _index_select(out: Lowering, node: Node) -> bool:
    source, index = out.operand(node.args[0]), out.operand(node.args[2])
    if not source.sizes:
        return False
    dim = arguments(node)["dim"] % len(source.sizes)
    # Along the gathered axis alone. A 0-dim index stands for one of length 1.
    at = _whole(index.load(index.index([dim] * len(index.sizes))))
    store_result(out, _picked(source, range(len(source.sizes)), dim, at))
    return True


@register_lowering(aten.gather.default)
def _gather(out: Lowering, node: Node) -> bool:
    source = out.operand(node.args[0])
    sizes = out.result().sizes
    # Index and source may differ in size along other dimensions; loops run over the index's, as torch says.
    if not sizes or len(source.sizes) != len(sizes):
        return False
    at = _whole(out.value(node.args[2], sizes))
    store_result(out, _picked(source, range(len(sizes)), arguments(node)["dim"] % len(sizes), at))
    return True


@register_lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    source, indices = out.operand(args["self"]), list(args["indices"])
    sizes = out.result().sizes
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    # A mask selects by position, and the data decides how many elements: no loop has that size.
    if any(indices[dim].meta["val"].dtype in (torch.bool, torch.uint8) for dim in dims):
        return False
    depth = max(len(out.operand(indices[dim]).sizes) for dim in dims)
    # NumPy's rule: dimensions of adjacent indices stand where the first was, those of separated ones come first.
    together = dims == list(range(dims[0], dims[-1] + 1))
    first = dims[0] if together else 0
    axes = list(range(first, first + depth))
    rest = iter([axis for axis in range(len(sizes)) if axis not in axes])
    plain = [None if dim in dims else next(rest) for dim in range(len(source.sizes))]
    index = source.index(plain)
    indirect = []
    for dim in dims:
        # Indices broadcast against each other, over axes that they share.
        at = out.value(indices[dim], [sizes[axis] for axis in axes], axes)
        if source.sizes[dim] != 1:
            position = _wrapped(at, source.sizes[dim])
            unsafe = node.target is aten._unsafe_index.Tensor  # of decompositions, which know their positions
            position = position if unsafe else checked_index(position, source.sizes[dim])
            indirect.append((position, source.strides[dim]))
    store_result(out, Expression(source.load(Index(index.strides, index.offset, indirect))))
    return True


def _wrapped(at: Value, size: Int) -> Value:
    """A position that counts from the end where it is negative."""
    position = Expression(_whole(at))
    # `aten.index` counts from the end for negative numbers; `gather` and `embedding` do not.
    return where(position < 0, position + Expression(integer(size)), position).value


# ---- sums of rows that have one index


def few_places(places: float, elements: float) -> bool:
    """Whether comparing each of ``elements`` with each of ``places`` is cheap."""
    return places <= _MAX_PLACES or places * elements <= _MAX_COMPARISONS


class _SumByIndex:
    """Adds up rows by index in a nest over places (axis 0), then the rows' own axes.

    Args:
        rows: the tensor whose elements are added up; its dimensions are axes 1, 2, ...
        places: how many there are along the result's summed dimension.
        over: dimensions of ``rows`` along which there is one index each.
    """

    def __init__(self, out: Lowering, rows: Any, sizes: Sequence[Int], places: Int, over: Sequence[int]) -> None:
        self.out, self.rows, self.places = out, rows, places
        # Places are the outermost axis: each of its points is a row of the result, and looks at every index.
        self.row_sizes = tuple(sizes)
        self.sizes = (places, *sizes)
        self.over = [dim + 1 for dim in over]

    def few(self) -> bool:
        # The work is places times elements, where a sort would be linear: fine for a table of token types, ruinous
        # for a vocabulary.
        return few_places(size_hint(self.places), math.prod(map(size_hint, self.row_sizes)))

    def index(self, indices: Any) -> Expression:
        """Index tensors at each point; they have the leading dimensions of the rows."""
        rank = len(self.out.operand(indices).sizes)
        return Expression(_whole(self.out.value(indices, self.row_sizes[:rank], range(1, rank + 1))))

    def store(self, at: Expression, axes: Sequence[int], base: Any = None, scale: Any = 1) -> None:
        """Finish. ``axes``: which axis each dimension of the result is; ``base``: a tensor that is added to."""
        dtype = self.out.fake().dtype
        # Sums of halves are rounded once; ATen's atomic additions round at each.
        wide = register_dtype(dtype) if dtype.is_floating_point else torch.int64
        # No atomics: every run adds the same elements in the same order.
        mine = at == Expression(Position(0))
        operand = self.out.operand(self.rows)
        row = operand.index(range(len(self.sizes) - len(operand.sizes), len(self.sizes)))
        stages = StagedReduction(self.out, self.sizes, self.over, row)
        # Masked, so rows of other places cost a comparison and no memory traffic.
        value = Expression(operand.load(row, mine.value, 0)).to(wide) * scale
        if not math.isfinite(scale):  # 0 times it is NaN
            value = where(mine, value, 0)
        total = Expression(stages.reduce("sum", value.value)[0])
        if base is not None:
            start = self.out.operand(base)
            total = total + Expression(start.load(start.index(axes))).to(wide)
        target = self.out.result()
        stages.finish([Store(target.buffer, target.index(axes), total.to(dtype).value)])


@register_lowering(aten.embedding_dense_backward.default)
def _embedding_backward(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    rows = out.operand(args["grad_output"]).sizes
    sums = _SumByIndex(out, args["grad_output"], rows, out.result().sizes[0], range(len(rows) - 1))
    # Frequencies would need a count of each index first.
    if args["scale_grad_by_freq"] or not sums.few():
        return False
    at = sums.index(args["indices"])
    if args["padding_idx"] >= 0:
        # -1 is no place, so those rows are added nowhere.
        at = where(at == args["padding_idx"], at.coerce(-1), at)
    sums.store(at, [0, len(rows)])
    return True


@register_lowering(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    indices, target = list(args["indices"]), out.result().sizes
    if indices[-1] is not None and indices[-1].meta["val"].dtype == torch.bool:
        return _masked_put(out, args)
    values = out.operand(args["values"])
    if _one_place_a_row(indices, target) and len(values.sizes) < 2:
        at = _wrapped(out.value(indices[1], target[:1], [0]), target[1])
        value = Expression(values.load(values.index([0] if values.sizes == target[:1] else [None] * len(values.sizes))))
        _put_at(out, args["self"], 1, at, value, args["accumulate"])
        return True
    # Without accumulation the last of several values for one element would win, in an order that eager leaves
    # undefined too; ATen's own choice is kept.
    if not args["accumulate"] or len(indices) != 1 or indices[0].meta["val"].dtype == torch.uint8:
        return False
    indexed = out.operand(indices[0]).sizes
    # `values` broadcasts to the indexed dimensions, then the rest of the target's.
    sizes = (*indexed, *target[1:])
    sums = _SumByIndex(out, args["values"], sizes, target[0], range(len(indexed)))
    if not sums.few():
        return False
    at = Expression(checked_index(_wrapped(sums.index(indices[0]).value, target[0]), target[0]))
    sums.store(at, [0, *range(len(indexed) + 1, len(sizes) + 1)], args["self"])
    return True


def _one_place_a_row(indices: Sequence[Any], target: Sequence[Int]) -> bool:
    """Whether ``x[indices]`` of a matrix is one element of each row: ``x[torch.arange(rows), columns]``."""
    if len(target) != 2 or len(indices) != 2 or None in indices:
        return False
    rows, columns = indices
    every = rows.target in (aten.arange.default, aten.arange.start, aten.arange.start_step)
    given = {"start": 0, "step": 1, **arguments(rows)} if every else {}
    if not every or (given["start"], given["step"], given["end"]) != (0, 1, target[0]):
        return False
    # Of bytes, an index is a mask.
    whole = all(index.meta["val"].dtype in (torch.int32, torch.int64) for index in indices)
    return whole and columns.meta["val"].shape == rows.meta["val"].shape


def _put_at(out: Lowering, base: Any, dim: int, at: Value, value: Expression, accumulate: bool = False) -> None:
    """``base`` with ``value`` at position ``at`` along ``dim``, one position for each point of the other dimensions: a
    choice at each element, which other kernels compute in passing. One-hot rows are of this kind."""
    x = Expression(out.value(base, out.result().sizes))
    at = checked_index(at, out.result().sizes[dim])
    here = Expression(at) == Expression(Position(dim))
    store_result(out, where(here, x + value if accumulate else value, x))


@register_lowering(aten.scatter.value, aten.scatter.src)
def _scatter(out: Lowering, node: Node) -> bool:
    """Along a dimension where the index has one position, as in ``zeros.scatter(1, labels[:, None], 1.0)``."""
    args = arguments(node)
    target, index = out.result().sizes, out.operand(args["index"])
    dim = args["dim"] % max(len(target), 1)
    # A smaller index would leave the other points of the target alone.
    one = [1 if axis == dim else size for axis, size in enumerate(target)]
    if not target or list(index.sizes) != one:
        return False
    axes = [None if axis == dim else axis for axis in range(len(target))]
    at = _whole(index.load(index.index(axes)))
    if "src" in args:
        source = out.operand(args["src"])
        value = Expression(source.load(source.index(axes)))
    elif isinstance(args["value"], (bool, int, float)):
        value = constant(args["value"], out.fake().dtype)
    else:  # a complex number, or one that the data decides
        return False
    _put_at(out, args["self"], dim, at, value)
    return True


def _masked_put(out: Lowering, args: dict[str, Any]) -> bool:
    """``x[mask] = values`` where each selected element has the same values: a choice at each element.

    ATen lists the selected positions first, and the host waits for their number.
    """
    *before, mask = args["indices"]
    values, sizes = out.operand(args["values"]), out.result().sizes
    masked = range(len(before), len(before) + len(out.operand(mask).sizes))
    # Dimensions of `values` are, from the last: those behind the mask, one for the selected elements, those before it.
    behind = len(sizes) - masked.stop
    of_selected = len(values.sizes) - behind - 1
    if any(index is not None for index in before) or (of_selected >= 0 and values.sizes[of_selected] != 1):
        return False
    axes = [*range(masked.start), None, *range(masked.stop, len(sizes))]
    value = Expression(values.load(values.index(axes[len(axes) - len(values.sizes) :])))
    x = Expression(out.value(args["self"], sizes))
    # The mask has no other axes, so it is read once for all elements behind one selected position.
    chosen = Expression(out.value(mask, [sizes[axis] for axis in masked], masked))
    store_result(out, where(chosen, x + value if args["accumulate"] else value, x))
    return True


@register_lowering(aten.index_add.default)
def _index_add(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    target, rows = out.result().sizes, out.operand(args["source"]).sizes
    # Along other dimensions sums by index are rare.
    if args["dim"] != 0 or not target or not isinstance(args["alpha"], (int, float)):
        return False
    sums = _SumByIndex(out, args["source"], rows, target[0], [0])
    if not sums.few() or len(out.operand(args["index"]).sizes) != 1:
        return False
    at = Expression(checked_index(sums.index(args["index"]).value, target[0]))
    sums.store(at, [0, *range(2, len(rows) + 1)], args["self"], args["alpha"])
    return True


@register_lowering(aten.scatter_add.default)
def _scatter_add(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    target, rows = out.result().sizes, out.operand(args["src"]).sizes
    dim = args["dim"] % max(len(target), 1)
    others = [axis for axis in range(len(target)) if axis != dim]
    # torch lets index be smaller than source and target; then only a part of the source counts.
    same = out.operand(args["index"]).sizes == rows and all(rows[axis] == target[axis] for axis in others)
    if not target or not same:
        return False
    sums = _SumByIndex(out, args["src"], rows, target[dim], [dim])
    if not sums.few():
        return False
    axes = [0 if axis == dim else axis + 1 for axis in range(len(target))]
    sums.store(Expression(checked_index(sums.index(args["index"]).value, target[dim])), axes, args["self"])
    return True
