"""Softmax, its logarithm, and the losses of classes built on it.

A log-softmax is two nests: the logarithm of the sum of exponentials of each row, then ``x - lse`` at every element. The
second costs no more to compute than to read, so that its readers (the loss picks one element of a row, the backward
reads all) compute it from ``x``, and it is never in memory unless an ATen kernel wants it.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.inductor.ir import Index, Position, Reduce, Store, register_dtype
from weft.inductor.lowering.elementwise import arguments, loaded, put, storable
from weft.inductor.lowering.expressions import Expression, both, call, constant, where
from weft.inductor.lowering.registry import Lowering, Node, Operand, lowers
from weft.inductor.lowering.split import Stages

aten = torch.ops.aten


def _reduced(kind: str, x: Expression, dim: int) -> Expression:
    return Expression(Reduce(kind, (x.value,), (dim,), x.dtype))


def _computed(out: Lowering, node: Node) -> tuple[Expression, int] | None:
    """The float values to take a softmax of, and the dimension; None where the case is not covered."""
    source, dim = node.args[0], node.args[1]
    fake = out.fake()
    assert isinstance(source, Node)
    assert isinstance(dim, int)
    if not fake.shape or not storable(out) or not source.meta["val"].is_floating_point():
        return None
    return loaded(out, source, fake.dtype), dim % len(fake.shape)


@lowers(aten._softmax.default)
def _softmax(out: Lowering, node: Node) -> bool:
    computed = _computed(out, node)
    if computed is None:
        return False
    x, dim = computed
    powers = call("exp", x - _reduced("max", x, dim))
    put(out, powers / _reduced("sum", powers, dim))
    return True


@lowers(aten._log_softmax.default)
def _log_softmax(out: Lowering, node: Node) -> bool:
    computed = _computed(out, node)
    if computed is None:
        return False
    x, dim = computed
    greatest = _reduced("max", x, dim)
    lse = greatest + call("log", _reduced("sum", call("exp", x - greatest), dim))
    sizes = list(out.result().sizes)
    kept = out.temporary("lse", x.dtype, [1 if axis == dim else size for axis, size in enumerate(sizes)])
    out.nest(sizes, [Store(kept.buffer, kept.index(), lse.value)])
    put(out, x - Expression(kept.load(kept.index())))
    return True


@lowers(aten._softmax_backward_data.default)
def _softmax_backward(out: Lowering, node: Node) -> bool:
    given = _backward(out, node)
    if given is None:
        return False
    grad, result, dim = given
    product = grad * result
    put(out, product - result * _reduced("sum", product, dim))
    return True


@lowers(aten._log_softmax_backward_data.default)
def _log_softmax_backward(out: Lowering, node: Node) -> bool:
    given = _backward(out, node)
    if given is None:
        return False
    grad, result, dim = given
    put(out, grad - call("exp", result) * _reduced("sum", grad, dim))
    return True


def _backward(out: Lowering, node: Node) -> tuple[Expression, Expression, int] | None:
    grad, result, dim = node.args[0], node.args[1], node.args[2]
    assert isinstance(result, Node)
    assert isinstance(dim, int)
    fake = out.fake()
    if not fake.shape or not storable(out):
        return None
    dtype = result.meta["val"].dtype
    return loaded(out, grad, dtype), loaded(out, result, dtype), dim % len(fake.shape)


# ---- the loss of classes

_NONE, _MEAN = 0, 1


def _labelled(out: Lowering, target: Any, weight: Any, ignored: int, dtype: torch.dtype) -> tuple[Expression, ...]:
    """For each row (axis 0): the class, whether the row counts, and its weight."""
    operand = out.operand(target)
    rows = Index() if not operand.sizes else operand.index([0])
    label = Expression(operand.load(Index(rows.strides, operand.offset))).to(torch.int64)
    counts = label != ignored
    if weight is None:
        return label, counts, where(counts, label.to(dtype) * 0 + 1, 0)
    table = out.operand(weight)
    index = Index((), table.offset, [(label.value, table.strides[0])])
    return label, counts, Expression(table.load(index, counts.value, 0)).to(dtype)


@lowers(aten.nll_loss_forward.default)
def _nll_loss(out: Lowering, node: Node) -> bool:
    given = arguments(node)
    scores, reduction = out.operand(given["self"]), given["reduction"]
    if len(scores.sizes) != 2:
        return False
    dtype = out.fake().dtype
    wide = register_dtype(dtype)
    label, counts, weight = _labelled(out, given["target"], given["weight"], given["ignore_index"], wide)
    rows = scores.index([0, None])
    picked = Index(rows.strides, scores.offset, [(label.value, scores.strides[1])])
    score = Expression(scores.load(picked, counts.value, 0)).to(wide)
    loss = -(score * weight)
    if reduction == _NONE:
        out.store(loss.to(dtype).value, scores.sizes[:1])
        put(out, constant(0, out.fake(1).dtype), result=1)
        return True
    # The sum of weights is a nest of its own: the backward needs it, and could not share a kernel with the scores'
    # softmax if it had to wait for the losses.
    total = _summed(out, scores, rows, weight.to(out.fake(1).dtype), 1)
    divisor = Expression(total.load(total.index())).to(wide) if reduction == _MEAN else None
    _summed(out, scores, rows, loss, 0, divisor)
    return True


def _summed(
    out: Lowering, scores: Operand, rows: Index, value: Expression, at: int, divisor: Expression | None = None
) -> Operand:
    """Store the sum of a value of each row as result ``at``."""
    stages = Stages(out, scores.sizes[:1], (0,), rows)
    (total,) = stages.reduce("sum", value.value)
    result = Expression(total) if divisor is None else Expression(total) / divisor
    target = out.result(at)
    stages.finish([Store(target.buffer, target.index(), result.to(target.dtype).value)])
    return target


@lowers(aten.nll_loss_backward.default)
def _nll_loss_backward(out: Lowering, node: Node) -> bool:
    given = arguments(node)
    sizes, reduction = out.result().sizes, given["reduction"]
    if len(sizes) != 2 or not storable(out):
        return False
    wide = register_dtype(out.fake().dtype)
    label, counts, weight = _labelled(out, given["target"], given["weight"], given["ignore_index"], wide)
    grad = Expression(out.value(given["grad_output"], sizes[:1])).to(wide)
    if reduction == _MEAN:
        grad = grad / Expression(out.value(given["total_weight"], ())).to(wide)
    here = both(counts, Expression(Position(1)) == label)
    put(out, where(here, -(grad * weight), 0))
    return True
