"""Comparisons of positions with numbers of a row, in 32 bits wherever that is enough."""

from __future__ import annotations

import torch

from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.kernel_plan import KernelPlan
from weft.inductor.loop_ir.ir import Call, Const, Value
from weft.inductor.loop_ir.value_ranges import Ranges


def narrow_comparisons(value: Value, plan: KernelPlan, ranges: Ranges) -> Value:
    """``position == number`` with 32 bits, where the number (a label) is the same for a whole row.

    A number outside the row's positions is replaced, once a row, by one that equals no position; so its upper bits need
    not be compared for every element. A condition of the row that is and-ed with the comparison is treated likewise.
    """
    if not isinstance(value, Call) or value.op not in ("eq", "and"):
        return value
    # Equality is symmetric, and lowerings write it either way.
    for one, other in (value.args, value.args[::-1]):
        if value.op == "eq" and is_position(one) and other.dtype == torch.int64 and _constant_along(other, one, plan):
            found = ranges.of(one)
            # Strictly above the least int32, as `none` is one below the least position.
            if found is not None and found[0] > -(2**31) and found[1] < 2**31 and not isinstance(other, Const):
                least, most, none = (Const(bound, torch.int64) for bound in (*found, found[0] - 1))
                # Both ends with 64 bits: a label of 2**32 + 5 must not become 5.
                inside = Call("ge", (other, least), torch.bool), Call("le", (other, most), torch.bool)
                return _narrow(one, Call("and", inside, torch.bool), other, none)
        if value.op == "and" and isinstance(one, Call) and one.op == "eq" and one.args[1].dtype == torch.int32:
            place, narrow = one.args
            # Positions have 64 bits, and only what is written above compares them with 32.
            if is_position(place) and other.dtype == torch.bool and _constant_along(other, place, plan):
                inside, number, none = narrow.operands()[0].operands()
                return _narrow(place, Call("and", (other, inside), torch.bool), number, none)
    return value


def _constant_along(value: Value, place: Value, plan: KernelPlan) -> bool:
    """Whether a value is the same for all positions of a tile along which ``place`` differs."""
    tile = frozenset(plan.tile)
    # By dimensions of the tile, not by axes: a value that changes along a part of a merged dimension is a tile of it.
    return not plan.dims_of(place.axes) & tile <= plan.dims_of(value.axes)


def _narrow(place: Value, inside: Value, number: Value, none: Value) -> Value:
    # The only comparison of int64 with int32 in a nest. Later stages recognise it by that.
    narrow = Call("to", (Call("where", (inside, number, none), torch.int64),), torch.int32)
    return Call("eq", (place, narrow), torch.bool)
