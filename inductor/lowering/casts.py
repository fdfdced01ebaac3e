"""Copies, casts, and tensors of one number or of positions."""

from __future__ import annotations

from typing import Any

import torch

from weft.inductor.ir import Position
from weft.inductor.lowering.elementwise import arguments, loaded, put, storable
from weft.inductor.lowering.expressions import Expression, call, constant
from weft.inductor.lowering.registry import Lowering, Node, lowers

aten = torch.ops.aten

_ROUNDS = {torch.bfloat16: "round_bfloat16", torch.float16: "round_float16"}


@lowers(aten._to_copy.default, aten.clone.default)
def _copy(out: Lowering, node: Node) -> bool:
    source = node.args[0]
    if not storable(out):
        return False
    put(out, cast(out, source))
    return True


@lowers(aten.copy.default)
def _copy_from(out: Lowering, node: Node) -> bool:
    if not storable(out):
        return False
    put(out, cast(out, node.args[1]))
    return True


def cast(out: Lowering, source: Any) -> Expression:
    """A tensor at each element of the result, with exactly the bits that a cast to the result's type leaves."""
    given, wanted = source.meta["val"].dtype, out.fake().dtype
    value = loaded(out, source, given)
    if wanted in _ROUNDS and given != wanted:
        return call(_ROUNDS[wanted], value.to(torch.float32))
    return value.to(wanted)


@lowers(
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
    aten.scalar_tensor.default,
    aten.fill.Scalar,
)
def _full(out: Lowering, node: Node) -> bool:
    given = arguments(node)
    return _filled(out, next(given[name] for name in ("fill_value", "s", "value") if name in given))


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def _zeros(out: Lowering, node: Node) -> bool:
    return _filled(out, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(out: Lowering, node: Node) -> bool:
    return _filled(out, 1)


def _filled(out: Lowering, number: Any) -> bool:
    if isinstance(number, complex) or not storable(out):
        return False
    dtype = out.fake().dtype
    if isinstance(number, (bool, int, float)):
        put(out, constant(number, dtype))
    else:
        put(out, loaded(out, number, dtype))
    return True


@lowers(aten.fill.Tensor)
def _fill_tensor(out: Lowering, node: Node) -> bool:
    if not storable(out):
        return False
    put(out, loaded(out, node.args[1], out.fake().dtype))
    return True


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(out: Lowering, node: Node) -> bool:
    given = arguments(node)
    start, step, dtype = given.get("start", 0), given.get("step", 1), out.fake().dtype
    # Eager counts in double on the CPU, in the type of the sum on a GPU; with whole numbers all agree.
    if dtype.is_floating_point and not all(isinstance(number, int) for number in (start, step)):
        return False
    position = Expression(Position(0))
    put(out, (position * step + start).to(dtype))
    return True


@lowers(aten.eye.default, aten.eye.m)
def _eye(out: Lowering, node: Node) -> bool:
    put(out, Expression(Position(0)) == Expression(Position(1)))
    return True
