"""Softmax, log-softmax, and the negative log-likelihood loss.

A log-softmax is two nests: the logarithm of the sum of exponentials of each row, then ``x - lse`` at every element. The
second costs no more to compute than to read. Its readers (the loss reads one element of a row, the backward reads all)
therefore inline it, and it is stored only if an ATen kernel reads it.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.ir import Index, Position, Reduce, Store, register_dtype
from weft.inductor.lowering.elementwise import load_operand, store_result
from weft.inductor.lowering.expressions import Expression, call, checked_index, constant, logical_and, where
from weft.inductor.lowering.registry import Lowering, Node, Operand, register_lowering
from weft.inductor.lowering.split import StagedReduction

aten = torch.ops.aten


def _row_reduction(kind: str, x: Expression, dim: int) -> Expression:
    return Expression(Reduce(kind, (x.value,), (dim,), x.dtype))


def _softmax_operand(out: Lowering, node: Node) -> tuple[Expression, int] | None:
    """The float values to take a softmax of, and the dimension; None where the case is not covered."""
    source, dim = node.args[0], node.args[1]
    fake = out.fake()
    assert isinstance(source, Node)
    assert isinstance(dim, int)
    # A 0-dim softmax is 1; integers raise in eager. Both are too rare for loops.
    if not fake.shape or not source.meta["val"].is_floating_point():
        return None
    # In the result's type, which `half_to_float` makes float32.
    return load_operand(out, source, fake.dtype), dim % len(fake.shape)


@register_lowering(aten._softmax.default)
def _softmax(out: Lowering, node: Node) -> bool:
    computed = _softmax_operand(out, node)
    if computed is None:
        return False
    x, dim = computed
    # The maximum is subtracted first, so that no exponential overflows. A row of -inf alone gives NaN, as in eager.
    # Whether the two reductions run in one pass (online softmax) is code generation's choice: it knows whether the
    # row fits.
    powers = call("exp", x - _row_reduction("max", x, dim))
    store_result(out, powers / _row_reduction("sum", powers, dim))
    return True


@register_lowering(aten._log_softmax.default)
def _log_softmax(out: Lowering, node: Node) -> bool:
    computed = _softmax_operand(out, node)
    if computed is None:
        return False
    x, dim = computed
    # The maximum is subtracted first, so that no exponential overflows.
    greatest = _row_reduction("max", x, dim)
    lse = greatest + call("log", _row_reduction("sum", call("exp", x - greatest), dim))
    # One number a row, kept in memory: with it `x - lse` is elementwise, and its readers can compute it for
    # themselves.
    sizes = list(out.result().sizes)
    kept = out.temporary("lse", x.dtype, [1 if axis == dim else size for axis, size in enumerate(sizes)])
    out.nest(sizes, [Store(kept.buffer, kept.index(), lse.value)])
    store_result(out, x - Expression(kept.load(kept.index())))
    return True


@register_lowering(aten._softmax_backward_data.default)
def _softmax_backward(out: Lowering, node: Node) -> bool:
    operands = _backward(out, node)
    if operands is None:
        return False
    grad, result, dim = operands
    product = grad * result
    # result * (grad - sum(grad * result)), multiplied out as ATen does it.
    store_result(out, product - result * _row_reduction("sum", product, dim))
    return True


@register_lowering(aten._log_softmax_backward_data.default)
def _log_softmax_backward(out: Lowering, node: Node) -> bool:
    operands = _backward(out, node)
    if operands is None:
        return False
    grad, result, dim = operands
    store_result(out, grad - call("exp", result) * _row_reduction("sum", grad, dim))
    return True


def _backward(out: Lowering, node: Node) -> tuple[Expression, Expression, int] | None:
    grad, result, dim = node.args[0], node.args[1], node.args[2]
    assert isinstance(result, Node)
    assert isinstance(dim, int)
    fake = out.fake()
    if not fake.shape:
        return None
    # The type of the forward's result, which the gradient has as well.
    dtype = result.meta["val"].dtype
    return load_operand(out, grad, dtype), load_operand(out, result, dtype), dim % len(fake.shape)


# ---- the loss of classes

_NONE, _MEAN = 0, 1


def _labels_and_weights(
    out: Lowering, target: Any, weight: Any, ignored: int, dtype: torch.dtype
) -> tuple[Expression, ...]:
    """For each row (axis 0): the class, whether the row counts, and its weight."""
    operand = out.operand(target)
    rows = Index() if not operand.sizes else operand.index([0])
    label = Expression(operand.load(Index(rows.strides, operand.offset))).to(torch.int64)
    is_counted = label != ignored
    if weight is None:
        return label, is_counted, where(is_counted, constant(1, dtype), 0)
    table = out.operand(weight)
    # Masked: an ignored label may be no class, and its weight is 0.
    at = checked_index(label.value, table.sizes[0], is_counted.value)
    index = Index((), table.offset, [(at, table.strides[0])])
    return label, is_counted, Expression(table.load(index, is_counted.value, 0)).to(dtype)


@register_lowering(aten.nll_loss_forward.default)
def _nll_loss(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    scores, reduction = out.operand(args["self"]), args["reduction"]
    # A single sample without a batch dimension; ATen takes it.
    if len(scores.sizes) != 2:
        return False
    dtype = out.fake().dtype
    wide = register_dtype(dtype)
    label, is_counted, weight = _labels_and_weights(out, args["target"], args["weight"], args["ignore_index"], wide)
    rows = scores.index([0, None])
    # One element of each row, though the operand has all classes: fusion computes it beside the row's log-softmax.
    at = checked_index(label.value, scores.sizes[1], is_counted.value)
    picked = Index(rows.strides, scores.offset, [(at, scores.strides[1])])
    # An ignored label may be outside of the classes (-100 by default), so it must not be loaded.
    score = Expression(scores.load(picked, is_counted.value, 0)).to(wide)
    loss = -(score * weight)
    if reduction == _NONE:
        out.store(loss.to(dtype).value, scores.sizes[:1])
        # Without a mean nobody divides by the total weight.
        store_result(out, constant(0, out.fake(1).dtype), result=1)
        return True
    # The sum of weights is a nest of its own: the backward needs it, and could not share a kernel with the scores'
    # softmax if it had to wait for the losses.
    # Without a counted row it is 0, and the mean is 0 / 0 = NaN, as in eager.
    total = _summed(out, scores, rows, weight.to(out.fake(1).dtype), 1)
    divisor = Expression(total.load(total.index())).to(wide) if reduction == _MEAN else None
    _summed(out, scores, rows, loss, 0, divisor)
    return True


def _summed(
    out: Lowering, scores: Operand, rows: Index, value: Expression, at: int, divisor: Expression | None = None
) -> Operand:
    """Store the sum of a value of each row as result ``at``."""
    # The stride of the scores' rows decides the split: the sum is over rows that other kernels walk.
    stages = StagedReduction(out, scores.sizes[:1], (0,), rows)
    (total,) = stages.reduce("sum", value.value)
    result = Expression(total) if divisor is None else Expression(total) / divisor
    target = out.result(at)
    stages.finish([Store(target.buffer, target.index(), result.to(target.dtype).value)])
    return target


@register_lowering(aten.nll_loss_backward.default)
def _nll_loss_backward(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    sizes, reduction = out.result().sizes, args["reduction"]
    if len(sizes) != 2:
        return False
    wide = register_dtype(out.fake().dtype)
    label, is_counted, weight = _labels_and_weights(out, args["target"], args["weight"], args["ignore_index"], wide)
    grad = Expression(out.value(args["grad_output"], sizes[:1])).to(wide)
    if reduction == _MEAN:
        grad = grad / Expression(out.value(args["total_weight"], ())).to(wide)
    # Dense over all classes, since the gradient is a dense tensor; codegen finds that a row has one term
    # (`canonical.py`) and drops loops over classes.
    here = logical_and(is_counted, Expression(Position(1)) == label)
    store_result(out, where(here, -(grad * weight), 0))
    return True
