"""Copies, casts, and constant tensors: full, zeros, ones, arange, eye."""

from __future__ import annotations

from typing import Any

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.ir import Position
from weft.inductor.lowering.elementwise import load_operand, store_result
from weft.inductor.lowering.expressions import Expression, call, constant
from weft.inductor.lowering.registry import Lowering, Node, register_lowering

aten = torch.ops.aten

# A cast rounds even where its result stays in a register: `x.bfloat16().float()` must not be x. A chain of other
# operations on halves keeps float32, which is a documented change of bits; a cast is what the user asked for.
_ROUNDS = {torch.bfloat16: "round_bfloat16", torch.float16: "round_float16"}


@register_lowering(aten._to_copy.default, aten.clone.default)
def _copy(out: Lowering, node: Node) -> None:
    # A change of layout alone (`clone(memory_format=...)`) is a copy too: result and source have their own strides.
    store_result(out, cast(out, node.args[0]))


@register_lowering(aten.copy.default)
def _copy_from(out: Lowering, node: Node) -> bool:
    source = node.args[1]
    if not isinstance(source, Node) or not isinstance(source.meta["val"], torch.Tensor):
        return _filled(out, source)
    store_result(out, cast(out, source))
    return True


def cast(out: Lowering, source: Any) -> Expression:
    """A tensor at each element of the result, rounded as a cast to the result's dtype rounds it."""
    source_dtype, dtype = source.meta["val"].dtype, out.fake().dtype
    # In the source's own register type: an int64 must not pass through float32 on its way to float64.
    value = load_operand(out, source, source_dtype)
    # From float64 two roundings, to float32 and then to the half. ATen has the same two (`static_cast<float>`).
    if dtype in _ROUNDS and source_dtype != dtype:
        return call(_ROUNDS[dtype], value.to(torch.float32))
    return value.to(dtype)


@register_lowering(
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
    aten.scalar_tensor.default,
    aten.fill.Scalar,
)
def _full(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    # Each schema names its value differently. `fill` keeps the shape of a tensor whose elements it never reads.
    return _filled(out, next(args[name] for name in ("fill_value", "s", "value") if name in args))


@register_lowering(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def _zeros(out: Lowering, node: Node) -> bool:
    return _filled(out, 0)


@register_lowering(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(out: Lowering, node: Node) -> bool:
    return _filled(out, 1)


def _filled(out: Lowering, number: Any) -> bool:
    if isinstance(number, complex):
        return False
    dtype = out.fake().dtype
    # A number known at compile time is rounded by torch now; a number of the step is rounded by the store.
    known = isinstance(number, (bool, int, float))
    store_result(out, constant(number, dtype) if known else load_operand(out, number, dtype))
    return True


@register_lowering(aten.fill.Tensor)
def _fill_tensor(out: Lowering, node: Node) -> None:
    store_result(out, load_operand(out, node.args[1], out.fake().dtype))


@register_lowering(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    start, step, dtype = args.get("start", 0), args.get("step", 1), out.fake().dtype
    # Eager counts in double on the CPU, in the type of the sum on a GPU; with whole numbers all agree.
    if dtype.is_floating_point and not all(isinstance(number, int) for number in (start, step)):
        return False
    position = Expression(Position(0))
    # In int64, not by repeated addition: exact, and each element is independent of the others.
    store_result(out, (position * step + start).to(dtype))
    return True


@register_lowering(aten.eye.default, aten.eye.m)
def _eye(out: Lowering, node: Node) -> bool:
    # Stored as 0 and 1 of the result's dtype.
    store_result(out, Expression(Position(0)) == Expression(Position(1)))
    return True
