"""A row in pieces, where masks say that its pieces are computed from different things.

Joined tensors, and the halves that a rotary embedding exchanges, are one row with a comparison of the position in every
element: it reads all candidates, behind masks, and takes one. Cut where the comparisons change, a point computes one
element of each piece instead: the comparisons are decided when the kernel is written, and what two pieces read is
loaded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from weft.inductor.axes import Place, move
from weft.inductor.codegen.canonical import is_position, simplified
from weft.inductor.codegen.ranges import Ranges
from weft.inductor.ir import Call, Const, Load, Nest, Store, Value, map_values, rewrite

_MOST_PIECES = 4
_SECTOR = 16  # elements: pieces of whole sectors of memory, 32 bytes of a half-precision type

# Where along its left operand's range a comparison with a number changes, from that number.
_CHANGES = {"lt": 0, "ge": 0, "le": 1, "gt": 1}


def cut_at_seams(nest: Nest) -> Nest:
    """A canonical nest with a store for each piece of its rows; the same nest where it reduces, where its rows have no
    pieces, or where loads would not become fewer."""
    for axis, size in enumerate(() if nest.reduces else nest.sizes):
        if not isinstance(size, int) or any(store.index.stride(axis) != 1 for store in nest.stores):
            continue
        length = math.gcd(size, *_seams(nest, axis, size))
        count = size // max(1, length)
        if 1 < count <= _MOST_PIECES and length % _SECTOR == 0:
            cut = _cut(nest, axis, count)
            fewer = _loads(cut) < count * _loads(nest)
            return cut if fewer and set(cut.writes) == set(nest.writes) else nest
    return nest


def _loads(nest: Nest) -> int:
    return sum(not is_position(load) for load in nest.reads)


def _seams(nest: Nest, axis: int, size: int) -> Iterator[int]:
    """The positions along an axis where a comparison changes."""
    for value in nest.values():
        if not isinstance(value, Call) or value.op not in _CHANGES:
            continue
        place, number = value.args
        if is_position(place) and isinstance(place, Load) and isinstance(number, Const) and place.axes == {axis}:
            seam = number.value + _CHANGES[value.op] - place.index.offset
            if place.index.stride(axis) == 1 and 0 < seam < size:
                yield int(seam)


def _cut(nest: Nest, axis: int, count: int) -> Nest:
    length = nest.sizes[axis] // count
    sizes = tuple(length if at == axis else size for at, size in enumerate(nest.sizes))
    places = {at: Place(((at, 1),)) for at in range(len(sizes))}
    stores: list[Store] = []
    for piece in range(count):
        stores += move(nest.stores, places | {axis: Place(((axis, 1),), constant=piece * length)})
    ranges = Ranges(sizes)
    new = rewrite([root for store in stores for root in store.values()], lambda value: _decided(value, ranges))
    stores = [map_values(store, new) for store in stores]
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
        if final in value.args:
            return final
        a, b = value.args
        return b if a is neutral and b.dtype == torch.bool else a if b is neutral and a.dtype == torch.bool else value
    if value.op == "not" and isinstance(value.args[0], Const):
        return _FALSE if value.args[0].value else _TRUE
    if value.op == "where" and isinstance(value.args[0], Const):
        return value.args[1] if value.args[0].value else value.args[2]
    return value


def _compared(value: Call, ranges: Ranges) -> Value:
    left, right = (ranges.of(arg) for arg in value.args)
    if left is None or right is None:
        return value
    if value.op in ("gt", "le"):  # a > b is b < a
        left, right = right, left
    below, other = (_TRUE, _FALSE) if value.op in ("lt", "gt") else (_FALSE, _TRUE)
    return below if left[1] < right[0] else other if left[0] >= right[1] else value
