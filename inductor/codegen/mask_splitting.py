"""Rows are split where masks change, so that no element tests its position.

Concatenated tensors, and the halves that a rotary embedding swaps, are one row whose every element compares its
position: it loads all candidates behind masks and selects one. Split at the positions where comparisons change, a point
of the loop computes one element of each piece. The comparisons are then known when the kernel is generated, and what
two pieces read is loaded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from weft.inductor.codegen.canonical import is_position, simplified
from weft.inductor.loop_ir.axes import AxisExpression, substitute_stores
from weft.inductor.loop_ir.ir import Call, Const, Load, Nest, Store, Value, rewrite_stores
from weft.inductor.loop_ir.value_ranges import Ranges

_MAX_PIECES = 4  # pieces that comparisons cut an axis into; the body is generated once for each. A choice.
_SECTOR = 16  # elements of a memory sector: 32 bytes, the unit of DRAM traffic, of a half-precision type

# Where along its left operand's range a comparison with a number changes, from that number.
_CHANGES = {"lt": 0, "ge": 0, "le": 1, "gt": 1}


def split_at_mask_boundaries(nest: Nest) -> Nest:
    """A canonical nest with a store for each piece of its rows.

    Returns the same nest where it has reductions, where no mask changes along its rows, or where the split nest would
    not have fewer loads.
    """
    # A reduction runs over the whole row: cut in pieces, it would need one accumulator for all of them.
    for axis, size in enumerate(() if nest.reduces else nest.sizes):
        # Along rows only: there a comparison is made for every element of a vector. Across them it is one for each
        # program.
        if not isinstance(size, int) or any(store.index.stride(axis) != 1 for store in nest.stores):
            continue
        # Pieces of equal length share one loop; the greatest common divisor has a boundary at each change.
        # Without boundaries this is the whole size, and `count` is 1.
        length = math.gcd(size, *_boundaries(nest, axis, size))
        count = size // max(1, length)
        # Two pieces that shared a sector of memory would both move it.
        if 1 < count <= _MAX_PIECES and length % _SECTOR == 0:
            cut = _cut(nest, axis, count)
            # A store whose mask never holds is dropped in `cut`, but every buffer must still have a store.
            fewer = _loads(cut) < count * _loads(nest)
            # The first axis that qualifies decides: there is one contiguous axis at most in the stores.
            return cut if fewer and set(cut.writes) == set(nest.writes) else nest
    return nest


def _loads(nest: Nest) -> int:
    return sum(not is_position(load) for load in nest.reads)


def _boundaries(nest: Nest, axis: int, size: int) -> Iterator[int]:
    """The positions along an axis where a comparison changes."""
    for value in nest.values():
        if not isinstance(value, Call) or value.op not in _CHANGES:
            continue
        place, number = value.args
        # Conditions on other axes as well (a triangle) have no boundary that is the same for all rows.
        if is_position(place) and isinstance(place, Load) and isinstance(number, Const) and place.axes == {axis}:
            boundary = number.value + _CHANGES[value.op] - place.index.offset
            # A boundary at an end cuts nothing: the comparison is decided for the whole row.
            if place.index.stride(axis) == 1 and 0 < boundary < size:
                yield int(boundary)


def _cut(nest: Nest, axis: int, count: int) -> Nest:
    length = nest.sizes[axis] // count
    sizes = tuple(length if at == axis else size for at, size in enumerate(nest.sizes))
    places = {at: AxisExpression(((at, 1),)) for at in range(len(sizes))}
    stores: list[Store] = []
    for piece in range(count):
        # The same loop for all pieces, shifted by its constant: values that do not see the shift are one value.
        stores += substitute_stores(nest.stores, places | {axis: AxisExpression(((axis, 1),), constant=piece * length)})
    # Within a piece positions are bounded more tightly, which is what decides the comparisons.
    ranges = Ranges(sizes)
    stores = rewrite_stores(stores, lambda value: _decided(value, ranges))
    # By identity: constants are interned.
    plain = (replace(store, mask=None) if store.mask is _TRUE else store for store in stores)
    return simplified(Nest(sizes, tuple(store for store in plain if store.mask is not _FALSE)))


_TRUE, _FALSE = Const(True, torch.bool), Const(False, torch.bool)


def _decided(value: Value, ranges: Ranges) -> Value:
    """The value where a comparison in it is known."""
    if not isinstance(value, Call):
        return value
    if value.op in _CHANGES:
        return _compared(value, ranges)
    if value.op in ("and", "or"):
        neutral, final = (_TRUE, _FALSE) if value.op == "and" else (_FALSE, _TRUE)
        # Short-circuit of either side: no operand has effects.
        if final in value.args:
            return final
        a, b = value.args
        # The logical operators also take numbers and give a truth: a number cannot stand in for its result.
        return b if a is neutral and b.dtype == torch.bool else a if b is neutral and a.dtype == torch.bool else value
    if value.op == "not" and isinstance(value.args[0], Const):
        return _FALSE if value.args[0].value else _TRUE
    if value.op == "where" and isinstance(value.args[0], Const):
        # The branch not taken disappears with its loads.
        return value.args[1] if value.args[0].value else value.args[2]
    return value


def _compared(value: Call, ranges: Ranges) -> Value:
    # Integers only: a float has no range, so comparisons of data stay.
    left, right = (ranges.of(arg) for arg in value.args)
    if left is None or right is None:
        return value
    if value.op in ("gt", "le"):  # a > b is b < a
        left, right = right, left
    # `left` and `right` are now compared by < (or, for `ge` and `le`, by its negation).
    below, other = (_TRUE, _FALSE) if value.op in ("lt", "gt") else (_FALSE, _TRUE)
    return below if left[1] < right[0] else other if left[0] >= right[1] else value
