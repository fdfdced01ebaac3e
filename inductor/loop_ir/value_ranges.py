"""Ranges of integer values over a loop nest, by interval arithmetic (Moore, 1966).

Used to compute positions with 32 bits wherever that is enough, to decide comparisons when a kernel is written, and to
prove that indices stay within their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.inductor.loop_ir.ir import Call, Const, Index, Int, Load, Position, Value, is_position

Range = tuple[int, int]


class Ranges:
    """The least and the greatest number that values over axes of ``sizes`` can be, where that is known."""

    def __init__(self, sizes: Sequence[Int]) -> None:
        self.sizes = sizes
        # By value, not by the path to it: operands are shared, and a chain of n sums of itself would take 2**n steps
        # otherwise.
        self._known: dict[Value, Range | None] = {}

    def of(self, value: Value) -> Range | None:
        """(least, greatest), None where a tensor or a symbol decides."""
        if value not in self._known:
            self._known[value] = self._find(value)
        return self._known[value]

    def fits(self, value: Value) -> bool:
        """Whether 32 bits are enough."""
        found = self.of(value)
        # Ranges are of exact integers, so a value that fits was not wrapped; whether its operands fit is asked for
        # each of them.
        return found is not None and found[0] >= -(2**31) and found[1] < 2**31

    def nonnegative(self, value: Value) -> bool:
        """Whether the value is never negative."""
        found = self.of(value)
        return found is not None and found[0] >= 0

    def of_index(self, index: Index) -> Range | None:
        """The range of an index without its indirect terms; None where a size, stride or offset is symbolic."""
        # A symbolic size has no upper bound here: int32 positions for it would wrap around for a large batch without
        # an error.
        spans = [(stride, self.sizes[axis]) for axis, stride in index.strides]
        if not isinstance(index.offset, int) or not all(isinstance(n, int) for span in spans for n in span):
            return None
        # Axes are independent, so the extremes of a sum are the sums of extremes: the bounds are exact, not only
        # safe.
        ends = [int(stride) * (int(size) - 1) for stride, size in spans]
        return index.offset + sum(min(0, end) for end in ends), index.offset + sum(max(0, end) for end in ends)

    def _find(self, value: Value) -> Range | None:
        if isinstance(value, Const):
            # A float constant is no range, whole or not: comparisons with it are made in floats, where whole numbers
            # round.
            return (int(value.value), int(value.value)) if not value.dtype.is_floating_point else None
        if isinstance(value, Position):
            return self.of_index(Index([(value.axis, 1)]))
        if isinstance(value, Load) and is_position(value):
            return self.of_index(value.index)
        if not isinstance(value, Call) or value.op not in _RULES:
            return None
        # The condition has no part in the range of a selection.
        # Every operation without a rule (shifts, casts, `abs`) gives None, which is always right.
        args = value.args[1:] if value.op == "where" else value.args
        found = [self.of(arg) for arg in args]
        known = [one for one in found if one is not None]
        return _RULES[value.op](*known) if len(known) == len(found) else None


# A bilinear function takes its extremes at corners of the box, so a product needs no case distinction by sign.
def _corners(apply: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        found = [apply(x, y) for x in a for y in b]
        return min(found), max(found)

    return rule


def _quotient(a: Range, b: Range) -> Range | None:
    # Only without negative numbers: floor and truncation agree there, and the ends of the range are monotonic.
    return (a[0] // b[1], a[1] // b[0]) if a[0] >= 0 and b[0] > 0 else None


def _remainder(a: Range, b: Range) -> Range | None:
    # Also at most the dividend: `position % size` below the size stays the position.
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
