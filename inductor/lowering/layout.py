"""Operations that only move elements: concatenation, padding, flips, triangles, and slices written into a base.

A concatenation of many tensors is one nest for each, which stores its slice: a slice that one kernel computes is then
stored in place. A concatenation of very many small tensors, such as the norms of all gradients, stays with ATen, which
needs one launch for all. Everything else is a load at another index, masked where there is no element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.loop_ir.axes import integer
from weft.inductor.loop_ir.ir import Index, Int, Position
from weft.inductor.lowering.elementwise import load_operand, store_result
from weft.inductor.lowering.expressions import Expression, constant, logical_and, where, within
from weft.inductor.lowering.registry import Lowering, Node, Operand, register_lowering

aten = torch.ops.aten


_MAX_SELECTED = 4  # parts that one nest selects from: each point loads from all of them, behind masks
_MIN_PARTS_FOR_ATEN = 16  # with more small parts, the launches of a nest each would take longer than ATen's one
_SMALL_PART_ELEMENTS = 16384  # elements of a part whose copy takes no longer than its launch


@register_lowering(aten.cat.default)
def _cat(out: Lowering, node: Node) -> bool:
    tensors, dim = node.args[0], arguments(node)["dim"]
    assert isinstance(tensors, (list, tuple))
    target, start = out.result(), 0
    dim = dim % len(target.sizes)
    # Torch still lets a 1-d empty tensor be concatenated with anything.
    parts = [t for t in tensors if len(out.operand(t).sizes) == len(target.sizes) and out.operand(t).sizes[dim] != 0]
    if any(size == 0 for size in target.sizes):
        return False
    # Boundaries must be known: the selection compares positions with them, and code generation splits rows there
    # (`codegen/mask_splitting.py`).
    if len(parts) <= _MAX_SELECTED and all(isinstance(out.operand(part).sizes[dim], int) for part in parts):
        _select_part(out, parts, dim)
        return True
    if len(parts) > _MIN_PARTS_FOR_ATEN and all(_small(out.operand(part)) for part in parts):
        return False
    for tensor in parts:
        sizes = out.operand(tensor).sizes
        value = Expression(out.value(tensor, sizes)).to(target.dtype).value
        # Nests that store disjoint parts of one buffer: what computes a part may store it in place.
        out.store(value, sizes, offset=start * target.strides[dim])
        start = start + sizes[dim]
    return True


def _small(part: Operand) -> bool:
    # A symbolic size may be large, and counts as large.
    known = [size for size in part.sizes if isinstance(size, int)]
    return len(known) == len(part.sizes) and math.prod(known) < _SMALL_PART_ELEMENTS


def _select_part(out: Lowering, parts: Sequence[Any], dim: int) -> None:
    """A few parts are read by position, in one nest: their readers can compute a join, which siblings that each write
    a part do not allow."""
    dtype, rank = out.fake().dtype, len(out.result().sizes)
    position = Expression(Position(dim))
    joined: Expression | None = None
    start = sum(out.operand(part).sizes[dim] for part in parts)
    # From the last: the final `where` asks for the first part, and the last part needs no question.
    for part in reversed(parts):
        operand = out.operand(part)
        start = start - operand.sizes[dim]
        inside = logical_and(position >= start, position < start + operand.sizes[dim])
        # Masked even in the last branch: outside of a part, its index lies outside of its buffer.
        load = operand.load(_at(operand, range(rank), {dim: -start}), inside.value, 0)
        value = Expression(load).to(dtype)
        joined = value if joined is None else where(inside, value, joined)
    assert joined is not None
    store_result(out, joined)


@register_lowering(aten.constant_pad_nd.default)
def _pad(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    source, pads = out.operand(args["self"]), list(args["pad"])
    known = all(isinstance(pad, int) for pad in pads) and not isinstance(args["value"], torch.fx.Node)
    if not known:
        return False
    # `pad` lists pairs from the last dimension on, before and after.
    rank, shifts, guards = len(source.sizes), {}, []
    for at in range(len(pads) // 2):
        axis, before, after = rank - 1 - at, pads[2 * at], pads[2 * at + 1]
        shifts[axis] = -before
        # Negative padding crops: a position is then inside by itself, and needs no mask.
        if before > 0 or after > 0:
            guards.append(within(Expression(Position(axis)) - before, source.sizes[axis]))
    index = _at(source, range(rank), shifts)
    if not guards:
        store_result(out, Expression(source.load(index)))
    else:
        mask = functools.reduce(logical_and, guards)
        # The padding value is selected, instead of being the load's `other`: as a constant it is rounded to the dtype
        # first.
        load = Expression(source.load(index, mask.value, 0))
        store_result(out, where(mask, load, constant(args["value"], out.fake().dtype)))
    return True


@register_lowering(aten.flip.default)
def _flip(out: Lowering, node: Node) -> bool:
    source = out.operand(node.args[0])
    dims = {dim % len(source.sizes) for dim in node.args[1]}  # type: ignore[union-attr, operator]
    index = source.index()
    # A negative stride from the last element on. Torch has no such tensors; an index may.
    strides = [(axis, -stride if axis in dims else stride) for axis, stride in index.strides]
    last = sum((source.sizes[axis] - 1) * stride for axis, stride in index.strides if axis in dims)
    store_result(out, Expression(source.load(Index(strides, index.offset + last))))
    return True


# ---- a part written into a base


@register_lowering(aten.slice_scatter.default)
def _slice_scatter(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    base, part = out.operand(args["self"]), out.operand(args["src"])
    dim = args["dim"] % len(base.sizes)
    start = _bounded(args["start"], base.sizes[dim])
    # With steps, an element would be inside by the remainder of its position; too rare.
    if start is None or args["step"] != 1:
        return False
    position = Expression(Position(dim))
    inside = logical_and(position >= start, position < Expression(integer(start + part.sizes[dim])))
    index = _at(part, range(len(base.sizes)), {dim: -start})
    return _written(out, args["self"], part, index, inside)


@register_lowering(aten.select_scatter.default)
def _select_scatter(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    base, part = out.operand(args["self"]), out.operand(args["src"])
    dim = args["dim"] % len(base.sizes)
    at = args["index"]
    if not isinstance(at, int) or not isinstance(base.sizes[dim], int):
        return False
    # Python's remainder makes a negative index count from the end.
    inside = Expression(Position(dim)) == at % base.sizes[dim]
    axes = [axis for axis in range(len(base.sizes)) if axis != dim]
    return _written(out, args["self"], part, part.index(axes), inside)


def _written(out: Lowering, base: Any, part: Operand, index: Index, inside: Expression) -> bool:
    dtype = out.fake().dtype
    # A new base as a whole: this is how a capture writes an assignment through a view
    # (`capture/record/functional_ops.py`).
    new = Expression(part.load(index, inside.value, 0)).to(dtype)
    store_result(out, where(inside, new, load_operand(out, base, dtype)))
    return True


def _bounded(start: Any, size: Int) -> int | None:
    """The first position of a slice; None where it is not known."""
    if start is None:
        return 0
    if not isinstance(start, int) or (not isinstance(size, int) and start < 0):
        return None
    # Slices are clamped, as Python's are.
    return min(max(start + size, 0) if start < 0 else start, size) if isinstance(size, int) else start


def _at(operand: Operand, axes: Sequence[int], shifts: dict[int, Int]) -> Index:
    """The element at the nest's axes, each moved by ``shifts``."""
    index = operand.index(axes)
    offset = index.offset
    for dim, shift in shifts.items():
        if operand.sizes[dim] != 1:
            offset = offset + shift * operand.strides[dim]
    return Index(index.strides, offset)


@register_lowering(aten.tril.default, aten.triu.default)
def _triangle(out: Lowering, node: Node) -> bool:
    args = arguments(node)
    rank, diagonal = len(out.result().sizes), args["diagonal"]
    if not isinstance(diagonal, int):
        return False
    row, column = Expression(Position(rank - 2)), Expression(Position(rank - 1))
    kept = column - row <= diagonal if node.target is aten.tril.default else column - row >= diagonal
    x = load_operand(out, args["self"], out.fake().dtype)
    store_result(out, where(kept, x, x.coerce(0)))
    return True
