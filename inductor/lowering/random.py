"""Random numbers in kernels: Philox, with a seed for each operation, drawn once a step, and the element's position.

A kernel may so compute them anywhere, and again. They differ from the numbers that ATen's kernels draw.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.record.functional_ops import written_arguments
from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.ir import Call
from weft.inductor.lowering.elementwise import load_operand, store_result
from weft.inductor.lowering.expressions import Expression, where
from weft.inductor.lowering.reductions import linear
from weft.inductor.lowering.registry import Lowering, Node, number, register_lowering

aten = torch.ops.aten


def random_values(out: Lowering, kind: str, result: int = 0) -> Expression:
    """A float32 for each element of a result: ``rand`` is uniform in [0, 1), ``randn`` normal."""
    # The number depends on the seed and the element's position alone, not on blocks or programs: fusion,
    # recomputation and another GPU give the same numbers.
    sizes = out.result(result).sizes
    # The position in the shape, not in memory: a layout must not change the numbers.
    at = linear(sizes, range(len(sizes))) if sizes else Expression(out.seed()).coerce(0)
    return Expression(Call(kind, (out.seed(), at.value), torch.float32))


def _functional(op: Any) -> Any:
    """What a capture writes for an in-place operation."""
    # The capture replaces in-place operations by functional forms, which are operations of weft's own.
    found = written_arguments(op)
    assert found is not None
    return found.functional


@register_lowering(aten.native_dropout.default)
def _dropout(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    p = args["p"]
    # p = 1 is left to ATen: 1 / (1 - p) is infinite, and infinity times 0 NaN. So is a p that is no probability, for
    # which ATen raises. A p that changes is neither: that is another capture.
    if args["train"] is False or not (isinstance(p, Node) or 0 <= p < 1):
        return False
    # The backward reads the mask, so it is stored in any case, and what uses it here reads it too.
    store_result(out, random_values(out, "rand", 1) >= p, result=1)
    mask = out.result(1)
    # A load of what was just stored: fused, it becomes the value in a register; else it reads a byte instead of
    # repeating Philox.
    kept = Expression(mask.load(mask.index()))
    x = load_operand(out, args["input"], out.fake().dtype)
    store_result(out, where(kept, x * _of_float64(1 / (1 - _float64(p)), x), 0))
    return True


@register_lowering(aten.bernoulli.p, _functional(aten.bernoulli_.float))
def _bernoulli(out: Lowering, node: Node) -> bool:
    p: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    if _own_generator(node) or not (isinstance(p, Node) or 0 <= p <= 1):  # ATen raises
        return False
    # `rand` is below 1, so p = 1 gives ones only, and never below 0, so p = 0 gives zeros only.
    store_result(out, random_values(out, "rand") < p)
    return True


@register_lowering(aten.rand.default, aten.rand_like.default, aten.randn.default, aten.randn_like.default)
def _standard(out: Lowering, node: Node) -> bool:
    # A half rounds numbers just below 1 up to 1, and a double has more digits than are drawn.
    # Normal numbers of halves are left to ATen here with them.
    kind = "randn" if "randn" in str(node.target) else "rand"
    if out.fake().dtype != torch.float32 or _own_generator(node):
        return False
    store_result(out, random_values(out, kind))
    return True


@register_lowering(aten.uniform.default)
def _uniform(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    low, high = args["from"], args["to"]
    if out.fake().dtype != torch.float32 or _own_generator(node):
        return False
    if not (isinstance(low, Node) or isinstance(high, Node) or low <= high):  # ATen raises
        return False
    drawn = random_values(out, "rand")
    store_result(out, drawn * _of_float64(_float64(high) - _float64(low), drawn) + low)
    return True


@register_lowering(aten.normal_functional.default)
def _normal(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    mean, std = args["mean"], args["std"]
    # A half may be rounded from float32 here: a normal distribution has no bound that rounding could reach.
    if out.fake().dtype == torch.float64 or _own_generator(node):
        return False
    store_result(out, random_values(out, "randn") * std + mean)
    return True


def _float64(value: Any) -> Any:
    """A number, or a number node as the float64 that it is at a call: for arithmetic as eager's host does it."""
    return Expression(number(value)) if isinstance(value, Node) else value


def _of_float64(value: Any, like: Expression) -> Any:
    """The result of such arithmetic in the type of another value."""
    return value.to(like.dtype) if isinstance(value, Expression) else value


def _own_generator(node: Node) -> bool:
    # A user's generator has a state that eager advances; seeds come from the default generator.
    return node.kwargs.get("generator") is not None
