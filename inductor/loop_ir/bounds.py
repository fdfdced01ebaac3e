"""Whether an access of a loop nest stays within its buffer.

An index is a linear form over *atoms*: axes, and integer values that are not linear themselves, such as the quotient
that finds a pooling window. What a mask says about linear forms (``2 * d0 - 3 >= 0``) limits them. Interval arithmetic
over atoms and limits gives bounds that are never too narrow: bounds within the buffer prove the access safe.

Wider bounds prove nothing, as limits may be correlated in a way that intervals do not see. A fault is only what has a
*witness*: a point of the loop where the mask holds and the element lies outside of the buffer. So no alarm is false. An
index that data decides counts as 0, which every table has; symbolic sizes are compared as expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch

from weft.inductor.loop_ir.ir import Buffer, Call, Const, Index, Int, Load, Position, Value, is_position, ordered
from weft.inductor.loop_ir.ops import OPS
from weft.inductor.loop_ir.value_ranges import Ranges

# Points at which a possible fault is evaluated. All points of small loops are; of others, those next to a limit.
_MAX_POINTS = 1 << 14

Atom = int | Value
Form = dict[Atom, int]  # the coefficient of each atom
Limits = dict[tuple[tuple[Atom, int], ...], tuple[float, float]]  # the least and the greatest value of a form


def extent(buffer: Buffer) -> Int:
    """Elements from the first of a buffer to behind its last."""
    # Not the product of the sizes: a transposed or padded buffer reaches further, one with a stride of 0 less far.
    pairs = zip(buffer.sizes, buffer.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs if size != 1)


def is_negative(number: Int) -> bool:
    """Whether a size or a difference of sizes is provably negative."""
    # False means "not shown", so every caller treats a symbolic size as possibly fine. Symbols of sizes are
    # nonnegative.
    return number < 0 if isinstance(number, int) else bool(sympy.expand(number).is_negative)


def fault(index: Index, mask: Value | None, sizes: Sequence[Int], buffer: Buffer) -> str | None:
    """How an access leaves its buffer, None where it does not or where that is not provable.

    Args:
        index: element of the buffer, over axes of ``sizes``.
        mask: where the access happens; everywhere without one.
    """
    length = extent(buffer)
    # Only the axes of the index count: others do not move it, whatever their size.
    numbers = (length, *index.numbers, *(sizes[axis] for axis in index.axes))
    if not all(isinstance(number, int) for number in numbers):
        # What a mask or data rules out is not known with symbolic sizes, so only plain accesses are proved wrong.
        return None if mask is not None or index.indirect else _symbolic_fault(index, sizes, length)
    assert isinstance(length, int)
    # The cheap proof first: points are evaluated only where it fails.
    bounds = _Bounds(sizes, mask)
    low, high = bounds.of(index)
    if low >= 0 and high < length:
        return None
    return _witness(index, mask, bounds, length)


def _symbolic_fault(index: Index, sizes: Sequence[Int], length: Int) -> str | None:
    # Both ends of the reach: a flip walks backwards, so that its start is its largest element.
    last, first = index.offset, index.offset
    for axis, stride in index.strides:
        # A symbolic stride without a known sign could extend either end, so nothing is shown.
        reach = stride * (sizes[axis] - 1)
        if isinstance(stride, int) and stride < 0:
            first = first + reach
        elif sympy.sympify(stride).is_nonnegative:
            last = last + reach
        else:
            return None
    if is_negative(first):
        return f"it reaches element {sympy.expand(first)}"
    return f"it reaches element {sympy.expand(last)} of {length}" if is_negative(length - 1 - last) else None


class _Bounds:
    """Bounds of linear forms at the points where a mask holds."""

    def __init__(self, sizes: Sequence[Int], mask: Value | None) -> None:
        self.sizes = sizes
        self.ranges = Ranges(sizes)
        # By form without its constant, so that `d0 >= 1` and `d0 < 5` are one entry, an interval.
        self.limits: Limits = {}
        for condition in [] if mask is None else _conditions(mask):
            self._limit(condition)

    def of(self, index: Index) -> tuple[float, float]:
        """The least and the greatest element; an indirect term that data decides counts as 0."""
        form: Form = dict(index.strides)  # type: ignore[arg-type]
        offset = index.offset
        for value, stride in index.indirect:
            # An indirect value with finite bounds is arithmetic of axes (a pooling window), which a mask may limit:
            # it is judged like a stride. An infinite bound would make every gather from a table unprovable.
            terms, constant = linear(value)
            if all(math.isfinite(bound) for bound in self._form(terms)):
                _add(form, terms, stride)  # type: ignore[arg-type]
                offset += constant * stride
        low, high = self._form(form)
        return low + offset, high + offset  # type: ignore[operator]

    def bounded(self, value: Value) -> bool:
        """Whether axes and the mask decide a value's range, not data."""
        return all(math.isfinite(bound) for bound in self._form(linear(value)[0]))

    def _limit(self, condition: Call) -> None:
        # A comparison of two forms limits their difference: `2 * d0 < d1 + 3` is about `2 * d0 - d1`.
        left, right = (linear(arg) for arg in condition.args)
        form = dict(left[0])
        _add(form, right[0], -1)
        if not form:
            return
        low, high = _COMPARED[condition.op](right[1] - left[1])
        key = _key(form)
        known = self.limits.get(key, (-math.inf, math.inf))
        self.limits[key] = max(low, known[0]), min(high, known[1])

    def _form(self, form: Form, used: frozenset[Any] = frozenset()) -> tuple[float, float]:
        """Bounds of a form: the best of those from the ranges of its atoms, and of those from a limit of a multiple of
        some of its atoms and the bounds of what is left."""
        low = high = 0.0
        for atom, factor in form.items():
            ends = [factor * end for end in self._atom(atom)]
            low, high = low + min(ends), high + max(ends)
        # A limited sum replaces its atoms as a whole. `d0 + d1` limited to the picture's width is narrower than the
        # ranges of d0 and d1 added: a padded pooling window is proved inside this way only.
        for key, limit in self.limits.items():
            part = dict(key)
            # Floor division can be inexact; the comparison of all coefficients below refuses such a factor.
            first, coefficient = key[0]
            factor = form.get(first, 0) // coefficient
            if key in used or factor == 0 or any(form.get(atom) != factor * c for atom, c in part.items()):
                continue
            rest = {atom: c for atom, c in form.items() if atom not in part}
            # Each limit is used once on a path, so the recursion ends.
            least, most = self._form(rest, used | {key})
            # The limit of a form and the plain bounds of its atoms both hold, so their intersection does.
            own = self._form(part, used | {key})
            ends = [factor * max(limit[0], own[0]), factor * min(limit[1], own[1])]
            low, high = max(low, min(ends) + least), min(high, max(ends) + most)
        return low, high

    def _atom(self, atom: Atom) -> tuple[float, float]:
        if isinstance(atom, int):
            size = self.sizes[atom]
            # Axes of the index have known sizes here; those of a mask alone need not.
            return (0, size - 1) if isinstance(size, int) else (0, math.inf)
        return self.ranges.of(atom) or (-math.inf, math.inf)


def linear(value: Value) -> tuple[Form, int]:
    """An integer value as a linear form and a constant."""
    if isinstance(value, Position):
        return {value.axis: 1}, 0
    if isinstance(value, Const) and not value.dtype.is_floating_point:
        return {}, int(value.value)
    if isinstance(value, Load) and _is_static_position(value):
        return dict(value.index.strides), value.index.offset  # type: ignore[return-value]
    if isinstance(value, Call) and value.op in ("add", "sub"):
        (form, constant), (other, more) = map(linear, value.args)
        sign = -1 if value.op == "sub" else 1
        form = dict(form)
        _add(form, other, sign)
        return form, constant + sign * more
    if isinstance(value, Call) and value.op == "mul":
        # A product stays linear where one side is a constant. A product of two axes is an atom of its own.
        for (form, constant), (other, factor) in (map(linear, value.args), map(linear, value.args[::-1])):
            if not other:
                return {atom: c * factor for atom, c in form.items() if factor}, constant * factor
    # Everything else is an atom: linear forms treat it as one unknown.
    return {value: 1}, 0


def _is_static_position(load: Load) -> bool:
    strides = (stride for _, stride in load.index.strides)
    return is_position(load) and all(isinstance(number, int) for number in (load.index.offset, *strides))


def _is_no_integer(value: Value) -> bool:
    return value.dtype.is_floating_point or value.dtype == torch.bool


def _add(form: Form, other: Form, factor: int) -> None:
    for atom, coefficient in other.items():
        form[atom] = form.get(atom, 0) + factor * coefficient
        if form[atom] == 0:
            del form[atom]


def _key(form: Form) -> tuple[tuple[Atom, int], ...]:
    # A canonical order, so that equal forms are one key. Values sort by text: identity differs from run to run.
    return tuple(sorted(form.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]))))


# Limits of ``left - right`` without its constant, from the constant, for each comparison.
_COMPARED: dict[str, Callable[[int], tuple[float, float]]] = {
    "lt": lambda n: (-math.inf, n - 1),
    "le": lambda n: (-math.inf, n),
    "ge": lambda n: (n, math.inf),
    "gt": lambda n: (n + 1, math.inf),
    "eq": lambda n: (n, n),
}


def _conditions(mask: Value) -> Iterator[Call]:
    """Comparisons of integers that all hold where the mask does."""
    # Only conjunctions: what an "or" or a "not" says is left out, which makes limits wider, never wrong. Comparisons
    # of floats round, and "ne" limits no interval.
    if isinstance(mask, Call) and mask.op == "and":
        for arg in mask.args:
            yield from _conditions(arg)
    elif isinstance(mask, Call) and mask.op in _COMPARED and not any(map(_is_no_integer, mask.args)):
        yield mask


# ---- witnesses


def _witness(index: Index, mask: Value | None, bounds: _Bounds, length: int) -> str | None:
    # Axes of the mask take part, as a point counts only where the mask holds.
    terms = [(value, stride) for value, stride in index.indirect if bounds.bounded(value)]
    used = set(index.axes).union(*(value.axes for value, _ in terms), mask.axes if mask is not None else ())
    if not all(isinstance(bounds.sizes[axis], int) for axis in used):
        return None
    axes = sorted(used)
    points = _points(axes, bounds)
    at = dict(zip(axes, points.unbind(1), strict=True))
    values = _PointValues(at, len(points))
    element = torch.full([len(points)], index.offset, dtype=torch.int64)
    for axis, stride in index.strides:
        element = element + at[axis] * stride
    for value, stride in terms:
        # Without a tensor's elements there is no point that proves a fault.
        known = values.of(value)
        if known is None:
            return None
        element = element + known * stride
    holds = values.of(mask) if mask is not None else torch.ones(len(points), dtype=torch.bool)
    if holds is None:
        return None
    # A witness is checked with the mask's own arithmetic, so a fault is never an artefact of the intervals.
    outside = (holds & ((element < 0) | (element >= length))).nonzero()
    if not len(outside):
        return None
    first = int(outside[0])
    where = ", ".join(f"d{axis} = {int(column[first])}" for axis, column in at.items())
    return f"it reaches element {int(element[first])} of {length}{' at ' if where else ''}{where}"


def _points(axes: Sequence[int], bounds: _Bounds) -> torch.Tensor:
    """Points of a loop, [points, axes]: all of a small loop, else its corners and what is next to limits of a mask."""
    sizes = [int(bounds.sizes[axis]) for axis in axes]
    candidates: list[Iterable[int]] = [range(size) for size in sizes]
    if math.prod(sizes) > _MAX_POINTS:
        # A linear form takes its extremes at corners; a mask moves these to its limits.
        candidates = [sorted(_near_limits(axis, size, bounds)) for axis, size in zip(axes, sizes, strict=True)]
        if math.prod(len(list(one)) for one in candidates) > _MAX_POINTS:
            # Too many limits: corners alone may miss a fault, which the verifier then does not report; it reports no
            # false one.
            candidates = [{0, size - 1} for size in sizes]
    columns = [torch.tensor(sorted(one), dtype=torch.int64) for one in candidates]
    if not columns:
        return torch.zeros(1, 0, dtype=torch.int64)
    return torch.cartesian_prod(*columns).reshape(-1, len(columns))


def _near_limits(axis: int, size: int, bounds: _Bounds) -> set[int]:
    found = {0, size - 1}
    for key, limit in bounds.limits.items():
        factor = abs(dict(key).get(axis, 0))
        # A limit `factor * d <= end` bends the form near `end / factor`: the points around it are where a shift by
        # one shows.
        for end in limit if factor else ():
            if math.isfinite(end):
                # Wrong limits are mostly off by one.
                found |= {int(end) // factor + step for step in (-1, 0, 1)}
    return {position for position in found if 0 <= position < size}


class _PointValues:
    """Values at given points, by the eager form of each operation; None where a tensor's elements are needed."""

    def __init__(self, at: dict[int, torch.Tensor], points: int) -> None:
        self.at, self.points = at, points

    def of(self, root: Value) -> torch.Tensor | None:
        # All points at once, as one vector: a Python loop over 16384 points for each access would dominate a compile.
        known: dict[Value, torch.Tensor | None] = {}
        for value in ordered([root]):
            known[value] = self._value(value, [known[operand] for operand in value.operands()])
        return known[root]

    def _value(self, value: Value, operands: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        if isinstance(value, Position):
            return self.at[value.axis]
        if isinstance(value, Const):
            return torch.full([self.points], value.value, dtype=value.dtype)
        if isinstance(value, Load) and _is_static_position(value):
            total = torch.full([self.points], value.index.offset, dtype=torch.int64)
            return sum((self.at[axis] * stride for axis, stride in value.index.strides), start=total)
        if not isinstance(value, Call) or value.op in ("rand", "randn") or any(one is None for one in operands):
            return None
        return OPS[value.op].eager(*operands).to(value.dtype)
