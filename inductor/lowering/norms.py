"""Layer normalisation, forward and backward.

The gradients of weight and bias are sums over rows, split as :mod:`weft.inductor.lowering.split` says, so that the
kernel of the input's gradient, which loops over the same rows, can compute the partial sums too.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.axes import integer
from weft.inductor.loop_ir.ir import Int, Reduce, Store
from weft.inductor.lowering.expressions import Expression, call
from weft.inductor.lowering.registry import Lowering, Node, register_lowering
from weft.inductor.lowering.split import StagedReduction

aten = torch.ops.aten


class _Rows:
    """A tensor whose trailing dimensions are normalised, as a space of rows: its axes, and values in it."""

    def __init__(self, out: Lowering, x: Any, normalized: int) -> None:
        self.out, self.x = out, out.operand(x)
        self.sizes = self.x.sizes
        self.rank = len(self.sizes)
        # `normalized_shape` names trailing dimensions by their number.
        self.inner = tuple(range(self.rank - normalized, self.rank))
        # Statistics of halves are float32 in eager too, which stores mean and rstd of them in float32.
        self.dtype = torch.float64 if self.x.dtype == torch.float64 else torch.float32

    def full(self, arg: Any) -> Expression:
        """A tensor of the whole space, or one that broadcasts to it."""
        # Weights align at the trailing dimensions, mean and rstd keep reduced ones as size 1: broadcasting covers
        # both.
        return Expression(self.out.value(arg, self.sizes)).to(self.dtype)

    def total(self, value: Expression) -> Expression:
        """The sum along each row."""
        # Not staged: there are as many programs as rows, and rows of a normalisation are short enough for one.
        return Expression(Reduce("sum", (value.value,), self.inner, self.dtype))

    def mean(self, value: Expression) -> Expression:
        width: Int = math.prod(self.sizes[axis] for axis in self.inner)
        return self.total(value) / Expression(integer(width)).to(self.dtype)

    def target(self, result: int, value: Expression) -> Store:
        target = self.out.result(result)
        return Store(target.buffer, target.index(), value.to(self.out.fake(result).dtype).value)


@register_lowering(aten.native_layer_norm.default)
def _layer_norm(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    rows = _Rows(out, args["input"], len(args["normalized_shape"]))
    x = rows.full(args["input"])
    mean = rows.mean(x)
    # Deviations from the mean, not the difference of two sums of squares, which cancels.
    deviation = x - mean
    rstd = call("rsqrt", rows.mean(deviation * deviation) + args["eps"])
    result = deviation * rstd
    if args["weight"] is not None:
        result = result * rows.full(args["weight"])
    if args["bias"] is not None:
        result = result + rows.full(args["bias"])
    # One nest: mean and rstd come along at the rows' points only, since their indices have no inner axis.
    out.nest(rows.sizes, [rows.target(0, result), rows.target(1, mean), rows.target(2, rstd)])
    return True


@register_lowering(aten.native_layer_norm_backward.default)
def _layer_norm_backward(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    rows = _Rows(out, args["input"], len(args["normalized_shape"]))
    grad = rows.full(args["grad_out"])
    rstd = rows.full(args["rstd"])
    # Recomputed from the input, which forward kept anyway, instead of kept as a tensor of its own.
    normal = (rows.full(args["input"]) - rows.full(args["mean"])) * rstd
    # A frozen weight, or an input that needs no gradient, has no result.
    wanted = [out.fake(result) is not None for result in range(3)]
    if wanted[0]:
        inner = grad if args["weight"] is None else grad * rows.full(args["weight"])
        # The projection that removes from the gradient what mean and variance absorb: its mean, and its part along x.
        dx = rstd * (inner - rows.mean(inner) - normal * rows.mean(inner * normal))
        # A nest apart from the column sums: fusion joins the two where a kernel supports both kinds of reduction.
        out.nest(rows.sizes, [rows.target(0, dx)])
    _column_sums(rows, args["grad_out"], [(1, grad * normal)] * wanted[1] + [(2, grad)] * wanted[2])
    return True


def _column_sums(rows: _Rows, grad: Node, sums: list[tuple[int, Expression]]) -> None:
    """Sums over all rows, each into a result of its own, in nests that they share. ``grad`` is of the whole space, as
    the rows are."""
    out = rows.out
    outer = [axis for axis in range(rows.rank) if axis not in rows.inner]
    # Both sums have one split, so that one kernel computes them over the same parts.
    stages = StagedReduction(out, rows.sizes, outer, *out.read_at(rows.x), *out.read_at(out.operand(grad)))
    stores = []
    for result, value in sums:
        (total,) = stages.reduce("sum", value.value)
        target = out.result(result)
        index = target.index(list(rows.inner))
        stores.append(Store(target.buffer, index, Expression(total).to(out.fake(result).dtype).value))
    if stores:
        stages.finish(stores)
