"""What whole numbers a value can be: so that positions are computed with 32 bits wherever that is enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.plan import Plan
from weft.inductor.ir import Call, Const, Index, Int, Load, Value

Range = tuple[int, int]


class Ranges:
    """The least and the greatest number that values over axes of ``sizes`` can be, where that is known."""

    def __init__(self, sizes: Sequence[Int]) -> None:
        self.sizes = sizes
        self._known: dict[Value, Range | None] = {}

    def of(self, value: Value) -> Range | None:
        """(least, greatest), None where a tensor or a symbol decides."""
        if value not in self._known:
            self._known[value] = self._find(value)
        return self._known[value]

    def fits(self, value: Value) -> bool:
        """Whether 32 bits are enough."""
        found = self.of(value)
        return found is not None and found[0] >= -(2**31) and found[1] < 2**31

    def natural(self, value: Value) -> bool:
        """Whether the value is never negative."""
        found = self.of(value)
        return found is not None and found[0] >= 0

    def _find(self, value: Value) -> Range | None:
        if isinstance(value, Const):
            return (int(value.value), int(value.value)) if not value.dtype.is_floating_point else None
        if isinstance(value, Load) and is_position(value):
            return self._of_index(value.index)
        if not isinstance(value, Call) or value.op not in _RULES:
            return None
        args = value.args[1:] if value.op == "where" else value.args
        found = [self.of(arg) for arg in args]
        known = [one for one in found if one is not None]
        return _RULES[value.op](*known) if len(known) == len(found) else None

    def _of_index(self, index: Index) -> Range | None:
        spans = [(stride, self.sizes[axis]) for axis, stride in index.strides]
        if not isinstance(index.offset, int) or not all(isinstance(n, int) for span in spans for n in span):
            return None
        ends = [int(stride) * (int(size) - 1) for stride, size in spans]
        return index.offset + sum(min(0, end) for end in ends), index.offset + sum(max(0, end) for end in ends)


def _corners(apply: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        found = [apply(x, y) for x in a for y in b]
        return min(found), max(found)

    return rule


def _quotient(a: Range, b: Range) -> Range | None:
    return (a[0] // b[1], a[1] // b[0]) if a[0] >= 0 and b[0] > 0 else None


def _remainder(a: Range, b: Range) -> Range | None:
    return (0, min(a[1], b[1] - 1)) if a[0] >= 0 and b[0] > 0 else None


_RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(lambda x, y: x * y),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "where": lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "floordiv": _quotient,
    "truncdiv": _quotient,
    "mod": _remainder,
    "fmod": _remainder,
}


def with_narrow_numbers(value: Value, plan: Plan, ranges: Ranges) -> Value:
    """``position == number``, where the number is one of a row such as its label, with a number of 32 bits: one that is
    no position of the row is replaced, once a row, by one that no position is. So is every number where a condition of
    the row that the comparison is joined with does not hold."""
    if not isinstance(value, Call) or value.op not in ("eq", "and"):
        return value
    for one, other in (value.args, value.args[::-1]):
        if value.op == "eq" and is_position(one) and other.dtype == torch.int64 and _steadier(other, one, plan):
            found = ranges.of(one)
            if found is not None and found[0] > -(2**31) and found[1] < 2**31 and not isinstance(other, Const):
                least, most, none = (Const(bound, torch.int64) for bound in (*found, found[0] - 1))
                inside = Call("ge", (other, least), torch.bool), Call("le", (other, most), torch.bool)
                return _narrow(one, Call("and", inside, torch.bool), other, none)
        if value.op == "and" and isinstance(one, Call) and one.op == "eq" and one.args[1].dtype == torch.int32:
            place, narrow = one.args
            # Positions have 64 bits, and only what is written above compares them with 32.
            if is_position(place) and other.dtype == torch.bool and _steadier(other, place, plan):
                inside, number, none = narrow.operands()[0].operands()
                return _narrow(place, Call("and", (other, inside), torch.bool), number, none)
    return value


def _steadier(value: Value, place: Value, plan: Plan) -> bool:
    """Whether a value is the same for elements of a tile that are at different places."""
    tile = frozenset(plan.tile)
    return not plan.dims_of(place.axes) & tile <= plan.dims_of(value.axes)


def _narrow(place: Value, inside: Value, number: Value, none: Value) -> Value:
    narrow = Call("to", (Call("where", (inside, number, none), torch.int64),), torch.int32)
    return Call("eq", (place, narrow), torch.bool)
