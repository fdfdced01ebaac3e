"""Reductions along dimensions of a tensor: sums, means, extremes, variances, norms.

Sums of halves are kept in float32, those of integers in int64, as eager does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.axes import integer
from weft.inductor.loop_ir.ir import Int, Position, Store, register_dtype
from weft.inductor.lowering.expressions import Expression, call, where
from weft.inductor.lowering.registry import Lowering, Node, Operand, base_of_views, register_lowering
from weft.inductor.lowering.split import StagedReduction

aten = torch.ops.aten


class ReducedOperand:
    """A reduction of one tensor: the whole space, its stages, and where results go.

    Args:
        split_views: whether a reduced dimension that a view merged from several becomes several axes again. The loops
            of its producer are then split alike. Not for argmax and argmin, which count positions along the dimension.
    """

    def __init__(self, out: Lowering, source: Any, dims: Any, *, split_views: bool = False) -> None:
        self.out, self.operand = out, out.operand(source)
        rank = len(self.operand.sizes)
        # None and an empty list both mean all dimensions, as in torch's sums. Operations that differ ask before
        # (`any`, argmax).
        listed = [dims] if isinstance(dims, int) else dims
        over = {dim % rank for dim in listed or range(rank)} if rank else set()
        # The axes that each dimension becomes: more than one where a view merged several.
        axes = [[dim] for dim in range(rank)]
        if split_views:
            self.operand, axes = _split_by_base(self.operand, base_of_views(out.operands, source), over)
        self.kept = [None if dim in over else axes[dim][0] for dim in range(rank)]
        self.over = tuple(axis for dim in sorted(over) for axis in axes[dim])
        self.x = Expression(self.operand.load(self.operand.index()))
        # The operand is the largest thing that is read: its strides say whether the reduction runs along memory or
        # across it.
        self.stages = StagedReduction(out, self.operand.sizes, self.over, *out.read_at(self.operand))

    def axes(self, result: int = 0) -> list[int | None]:
        """Which axis each dimension of a result is; results keep reduced dimensions or not."""
        # `keepdim` shows in the rank of the result, so no schema has to be asked for it.
        if len(self.out.fake(result).shape) == len(self.kept):
            return self.kept
        return [axis for axis in self.kept if axis is not None]

    def target(self, value: Expression, result: int = 0) -> Store:
        """The store of a result, in its type."""
        target = self.out.result(result)
        index = target.index(self.axes(result))
        # The only rounding: everything before it is in the register's type.
        return Store(target.buffer, index, value.to(self.out.fake(result).dtype).value)

    def reduce(self, kind: str, *args: Expression) -> list[Expression]:
        """The results of a reduction along the reduced dimensions."""
        # In the nest that finishes: what comes after (a division, a root) is computed once for each result.
        return [Expression(value) for value in self.stages.reduce(kind, *(arg.value for arg in args))]

    def count(self, dtype: torch.dtype) -> Expression:
        """How many elements are reduced to one."""
        return Expression(integer(self.stages.count)).to(dtype)


def _split_by_base(operand: Operand, base: Operand, dims: set[int]) -> tuple[Operand, list[list[int]]]:
    """``operand`` with each of ``dims`` as the dimensions of ``base`` that it is made of, and the axes of every
    dimension. What has symbolic sizes stays together."""
    # Strides identify a base's dimension in the view: merging adjacent dimensions keeps the inner one's stride.
    pairs = zip(base.sizes, base.strides, strict=True)
    whole = {stride: size for size, stride in pairs if isinstance(size, int) and isinstance(stride, int) and size > 1}
    sizes: list[Int] = []
    strides: list[Int] = []
    axes: list[list[int]] = []
    for dim, (size, stride) in enumerate(zip(operand.sizes, operand.strides, strict=True)):
        parts: list[Int] = []
        step = stride
        # From the innermost part out: each next dimension of the base starts where the product of those inside it
        # ends.
        while dim in dims and isinstance(size, int) and step in whole and math.prod(parts) < size:
            parts.insert(0, whole[step])
            step *= whole[step]
        # A view that cuts through a dimension of the base has no such parts, and stays one axis.
        parts = parts if parts and math.prod(parts) == size else [size]
        axes.append(list(range(len(sizes), len(sizes) + len(parts))))
        sizes += parts
        strides += [stride * math.prod(parts[at + 1 :]) for at in range(len(parts))]
    return replace(operand, sizes=tuple(sizes), strides=tuple(strides)), axes


def _accumulated(out: Lowering, dtype: torch.dtype) -> torch.dtype:
    """The type to add up in: that of the result, halves in float32."""
    wanted = register_dtype(dtype)
    # Integers in int64, as torch returns them: a sum of int8 would wrap after a few elements.
    return wanted if wanted.is_floating_point or wanted == torch.bool else torch.int64


@register_lowering(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def _sum(out: Lowering, node: Node) -> None:
    r = ReducedOperand(out, node.args[0], arguments(node).get("dim"), split_views=True)
    # Converted before it is added: `sum(dtype=float64)` of float32 has the digits of float64.
    (total,) = r.reduce("sum", r.x.to(_accumulated(out, out.fake().dtype)))
    if "mean" in str(node.target):
        # One division for each result. The count may be a size that is known at the call only.
        total = total / r.count(total.dtype)
    r.stages.finish([r.target(total)])


@register_lowering(aten.prod.default, aten.prod.dim_int)
def _prod(out: Lowering, node: Node) -> None:
    r = ReducedOperand(out, node.args[0], arguments(node).get("dim"))
    (product,) = r.reduce("prod", r.x.to(_accumulated(out, out.fake().dtype)))
    r.stages.finish([r.target(product)])


@register_lowering(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def _truth(out: Lowering, node: Node) -> bool:
    dims = arguments(node).get("dim")
    # Here an empty list means no dimension, unlike in sums; ATen knows.
    if dims == []:
        return False
    r = ReducedOperand(out, node.args[0], dims)
    (truth,) = r.reduce(node.target.__name__.partition(".")[0], r.x.to(torch.bool))  # type: ignore[union-attr]
    r.stages.finish([r.target(truth)])
    return True


def _kind(node: Node) -> str:
    """``max`` or ``min``, as the operation is called."""
    return "max" if "max" in str(node.target) else "min"


@register_lowering(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extreme(out: Lowering, node: Node) -> None:
    r = ReducedOperand(out, node.args[0], arguments(node).get("dim"))
    (extreme,) = r.reduce(_kind(node), r.x)
    r.stages.finish([r.target(extreme)])


@register_lowering(aten.max.dim, aten.min.dim)
def _extreme_and_position(out: Lowering, node: Node) -> bool:
    r = ReducedOperand(out, node.args[0], arguments(node)["dim"])
    # Accumulators of positions are written for numbers, so bools are left to ATen. A 0-dim tensor has nothing to
    # reduce.
    if r.x.dtype == torch.bool or not r.over:
        return False
    extreme, position = r.reduce(f"arg{_kind(node)}", r.x, Expression(Position(r.over[0])))
    r.stages.finish([r.target(extreme, 0), r.target(position, 1)])
    return True


@register_lowering(aten.argmax.default, aten.argmin.default)
def _position(out: Lowering, node: Node) -> bool:
    r = ReducedOperand(out, node.args[0], arguments(node)["dim"])
    if r.x.dtype == torch.bool or not r.over:
        return False
    # Over all dimensions the position counts in the flattened tensor, whatever its strides.
    _, position = r.reduce(f"arg{_kind(node)}", r.x, linear(r.operand.sizes, r.over))
    r.stages.finish([r.target(position)])
    return True


def linear(sizes: Any, axes: Any) -> Expression:
    """The position of a loop along several axes, counted as one axis (int64)."""
    # Horner's scheme over the sizes, as a row-major layout counts.
    total = Expression(Position(axes[0]))
    for axis in axes[1:]:
        total = total * Expression(integer(sizes[axis])) + Expression(Position(axis))
    return total


# ---- moments


def moments(r: ReducedOperand, x: Expression) -> tuple[Expression, Expression]:
    """The mean, and the sum of squared deviations from it, in the nest that finishes.

    With parts: those of each part first, combined by the formula of Chan, Golub and LeVeque (1983).
    """
    if r.stages.splits is None:
        (total,) = r.reduce("sum", x)
        # Two passes over the operand, written as such: in a loop code generation makes them one (Welford).
        mean = total / r.count(x.dtype)
        deviation = x - mean
        return mean, r.reduce("sum", deviation * deviation)[0]
    stages = r.stages
    # Parts differ in length where the last one is shorter; each mean belongs to its own count.
    count = Expression(stages.part_length()).to(x.dtype)
    # At least 1: with symbolic sizes a part may be empty, and 0 / 0 would poison the combination although its weight
    # is 0.
    mean = Expression(stages.reduce_part("sum", [x.value])[0]) / call("maximum", count, 1)
    deviation = Expression(stages.in_parts(x.value)) - mean
    # In the tail the operand loads as 0, whose deviation is not.
    squares = stages.mask_tail((deviation * deviation).value, 0)
    kept_mean = Expression(stages.store_partial(mean.value))
    kept_squares = Expression(stages.store_partial(stages.sum_part(squares)))
    # Equal lengths are a constant, and need no memory.
    kept_count = Expression(stages.store_partial(count.value)) if count.value.axes else count
    whole = Expression(stages.reduce_partials("sum", (kept_mean * kept_count).value)) / r.count(x.dtype)
    # Sums of squares are never subtracted from each other, which would cancel for a mean far from zero.
    off = kept_mean - whole
    return whole, Expression(stages.reduce_partials("sum", (kept_squares + off * off * kept_count).value))


@register_lowering(aten.var.correction, aten.std.correction)
def _var(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    r = ReducedOperand(out, node.args[0], args["dim"])
    variance = _variance(r, args["correction"])[1]
    r.stages.finish([r.target(call("sqrt", variance) if "std" in str(node.target) else variance)])
    return True


@register_lowering(aten.var_mean.correction, aten.std_mean.correction)
def _var_mean(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    r = ReducedOperand(out, node.args[0], args["dim"])
    mean, variance = _variance(r, args["correction"])
    spread = call("sqrt", variance) if "std" in str(node.target) else variance
    # Both results from one pass over the operand.
    r.stages.finish([r.target(spread, 0), r.target(mean, 1)])
    return True


def _variance(r: ReducedOperand, correction: Any) -> tuple[Expression, Expression]:
    """The mean and the variance; fewer elements than the correction needs give infinity or NaN, as in eager."""
    mean, squares = moments(r, r.x)
    # Bessel's correction is torch's default.
    free = r.count(squares.dtype) - (1 if correction is None else correction)
    return mean, squares / call("maximum", free, 0)


# ---- norms


@register_lowering(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def _norm(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    order = args.get("ord", args.get("p"))
    order = 2 if order is None else order
    r = ReducedOperand(out, node.args[0], args.get("dim"))
    # An integer tensor raises in eager.
    if not isinstance(order, (int, float)) or not r.x.is_float:
        return False
    # In the result's type, which `dtype=` may have widened.
    x = abs(r.x.to(out.fake().dtype))
    if math.isinf(order):
        # NaN wins in both, as in eager.
        (norm,) = r.reduce("max" if order > 0 else "min", x)
    elif order == 0:
        (norm,) = r.reduce("sum", where(x == 0, x.coerce(0), x.coerce(1)))
    elif order == 1:
        (norm,) = r.reduce("sum", x)
    elif order == 2:
        # Not scaled by the largest element: float32 overflows above 1e19 per element, as ATen's kernel does.
        norm = call("sqrt", r.reduce("sum", x * x)[0])
    else:
        norm = call("pow", r.reduce("sum", call("pow", x, order))[0], 1 / order)
    r.stages.finish([r.target(norm)])
    return True
