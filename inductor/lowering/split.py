"""Reductions in two stages: where one would leave most of a GPU idle, parts are reduced first, then their results.

The rule (``parts_of``), for ``S`` multiprocessors:

* Along memory ("rows": what is reduced lies together). Every result is a program. Fewer than ``S`` results are split,
  as long as a part keeps 1024 elements.
* Across memory ("columns": the reduced axes are the slow ones, as in a bias gradient). A program has 64 columns; with
  fewer than ``2 * S`` programs the rows are split into about ``S`` to ``2 * S`` parts (32 rows or more in each where
  there are more than ``S`` parts), each making one row of partial results. A kernel over the same rows, such as a
  norm's backward, can then make them on its way.

Splits are exact: the number of parts is a product of divisors of the reduced sizes, so that loops of other kernels can
be split alike. Only where the divisors leave less than half of the parts wanted (primes, symbolic sizes) the last part
is shorter and masked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.utils._sympy.functions import FloorDiv

from weft.inductor.axes import Place, integer, magnitude, move_values
from weft.inductor.ir import Call, Const, Index, Int, Load, Part, Position, Reduce, Store, Value, rewrite
from weft.inductor.lowering.registry import Lowering
from weft.inductor.ops import REDUCTIONS

_ROW_LEAST = 1024  # elements of a part along memory
_COLUMNS = 64  # of a program across memory
_COLUMN_ROWS = 32  # rows of a part, where there are more parts than multiprocessors
_FEWEST_ROWS = 4  # rows of a part, ever


class Cut(NamedTuple):
    """A reduced axis as ``outer`` parts of ``inner`` elements; ``ragged`` where that is more than the axis has."""

    outer: Int
    inner: Int
    ragged: bool = False


def parts_of(
    sizes: Sequence[Int], over: Sequence[int], strides: Sequence[Int], multiprocessors: int
) -> dict[int, Cut] | None:
    """How a reduction over the axes ``over`` of a space of ``sizes`` is cut; None where one stage does.

    Args:
        strides: of the largest operand, by axis.
    """
    low, high = _wanted(sizes, over, strides, multiprocessors)
    if high < 2:
        return None
    slow_first = sorted(over, key=lambda axis: -magnitude(strides[axis]))
    fixed = [axis for axis in slow_first if isinstance(sizes[axis], int)]
    best = max(_products([sizes[axis] for axis in fixed], high), key=lambda d: (math.prod(d), d), default=())
    if math.prod(best) * 2 > low:
        return {axis: Cut(d, sizes[axis] // d) for axis, d in zip(fixed, best, strict=True)}
    longest = max(over, key=lambda axis: magnitude(sizes[axis]))
    size = sizes[longest]
    if isinstance(size, int):
        inner = -(-size // high)
        return {longest: Cut(-(-size // inner), inner, ragged=True)}
    return {longest: Cut(high, FloorDiv(size + high - 1, high), ragged=True)}


def _wanted(sizes: Sequence[Int], over: Sequence[int], strides: Sequence[Int], processors: int) -> tuple[int, int]:
    """The least and most parts."""
    wide = [axis for axis, size in enumerate(sizes) if size != 1 and strides[axis] != 0]
    if not wide:
        return 1, 1
    reduced = math.prod(magnitude(sizes[axis]) for axis in over)
    kept = math.prod(magnitude(size) for axis, size in enumerate(sizes) if axis not in over)
    if min(wide, key=lambda axis: magnitude(strides[axis])) in over:
        if kept >= processors:
            return 1, 1
        high = int(min(2 * processors / kept, reduced / _ROW_LEAST))
        return min(int(processors / kept), high), high
    if kept >= 2 * processors * _COLUMNS:
        return 1, 1
    high = int(min(max(processors, min(reduced / _COLUMN_ROWS, 2 * processors)), reduced / _FEWEST_ROWS))
    return (min(processors, high), high) if high >= processors / 2 else (1, 1)


def _products(sizes: Sequence[Int], most: int) -> Iterator[tuple[int, ...]]:
    """Choices of a divisor of each size with a product of at most ``most``."""
    divisors = [[d for d in range(1, min(int(n), most) + 1) if n % d == 0] for n in sizes]
    return (choice for choice in itertools.product(*divisors) if math.prod(choice) <= most)


class Stages:
    """A reduction in one nest, or in two with the parts' results in between.

    Attributes:
        sizes, over: the nest that finishes: axes are those of the whole space, reduced ones as long as there are parts.
        count: how many elements are reduced to one.
    """

    def __init__(self, out: Lowering, sizes: Sequence[Int], over: Sequence[int], like: Index) -> None:
        """Args:
        sizes, over: the whole space and the axes to reduce.
        like: where the largest operand is read, which decides the split.
        """
        self.out, self.whole = out, tuple(sizes)
        strides = [like.stride(axis) for axis in range(len(sizes))]
        self.cuts = parts_of(sizes, over, strides, out.multiprocessors)
        self.over = tuple(sorted(over))
        self.count: Int = math.prod(sizes[axis] for axis in over)
        self.sizes = self.whole
        self._stores: list[Store] = []
        if self.cuts is not None:
            self.sizes = tuple(self._parts(axis) if axis in over else size for axis, size in enumerate(sizes))

    def _parts(self, axis: int) -> Int:
        cut = (self.cuts or {}).get(axis)
        return 1 if cut is None else cut.outer

    def reduce(self, kind: str, *args: Value) -> list[Value]:
        """The results of a reduction of values of the whole space, in the nest that finishes."""
        if self.cuts is None:
            return _results(kind, args, self.over)
        inside = self.inside(kind, args)
        return _results(kind, [self.keep(part) for part in inside], self.over)

    def inside(self, kind: str, args: Sequence[Value]) -> list[Value]:
        """The results of one part, in the nest over parts."""
        guarded = [self.guarded(self.moved(arg), _identity(kind, at, arg)) for at, arg in enumerate(args)]
        return _results(kind, guarded, self._inner[1])

    def keep(self, value: Value) -> Value:
        """Store a value of a part; what the nest that finishes reads."""
        target = self.out.temporary(f"part{len(self.out.buffers)}", value.dtype, self.sizes)
        self._stores.append(Store(target.buffer, target.index(), value))
        return target.load(target.index())

    def summed(self, value: Value) -> Value:
        """The sum of values of the nest over parts, one a part."""
        return Reduce("sum", (value,), self._inner[1], value.dtype)

    def over_parts(self, kind: str, value: Value) -> Value:
        """The reduction of kept values over the parts."""
        return Reduce(kind, (value,), self.over, value.dtype)

    def finish(self, stores: Sequence[Store]) -> None:
        """Add the nests: of parts, where there are any, and the one that finishes."""
        if self._stores:
            self.out.nest(self._inner[0], self._stores)
        self.out.nest(self.sizes, stores)

    @property
    def _inner(self) -> tuple[tuple[Int, ...], tuple[int, ...]]:
        """Sizes of the nest over parts, and the axes it reduces."""
        assert self.cuts is not None
        sizes = [*self.sizes, *(cut.inner for cut in self.cuts.values())]
        for axis in self.over:
            if axis not in self.cuts:
                sizes[axis] = self.whole[axis]
        rest = [axis for axis in self.over if axis not in self.cuts]
        return tuple(sizes), (*rest, *range(len(self.whole), len(sizes)))

    def moved(self, value: Value) -> Value:
        """A value of the whole space in the nest over parts."""
        assert self.cuts is not None
        places = {axis: Place(((axis, 1),)) for axis in range(len(self.whole))}
        for inner, (axis, cut) in enumerate(self.cuts.items(), len(self.whole)):
            places[axis] = Place(((axis, cut.inner), (inner, 1)))
        return move_values([value], places)[value]

    def guarded(self, value: Value, other: bool | int | float) -> Value:
        """The value where the nest over parts is inside the whole space, ``other`` outside of it."""
        mask = self._mask()
        if mask is None:
            return value

        def guard(old: Value) -> Value:
            if not isinstance(old, Load):
                return old
            inside = mask if old.mask is None else Call("and", (mask, old.mask), torch.bool)
            return Load(old.buffer, old.index, old.dtype, inside, old.other)

        return Call("where", (mask, rewrite([value], guard)[value], Const(other, value.dtype)), value.dtype)

    def _mask(self) -> Value | None:
        for inner, (axis, cut) in enumerate((self.cuts or {}).items(), len(self.whole)):
            if cut.ragged:
                start = Call("mul", (Position(axis), integer(cut.inner)), torch.int64)
                at = Call("add", (start, Position(inner)), torch.int64)
                return Call("lt", (at, integer(self.whole[axis])), torch.bool)
        return None

    def held(self) -> Value:
        """How many elements a part has (int64), in the nest over parts."""
        mask = self._mask()
        _, inner = self._inner
        if mask is None:
            return integer(math.prod(self._inner[0][axis] for axis in inner))
        one = Call("where", (mask, Const(1, torch.int64), Const(0, torch.int64)), torch.int64)
        spread = math.prod(self._inner[0][axis] for axis in inner if axis < len(self.whole))
        counted = Reduce("sum", (one,), [axis for axis in inner if axis >= len(self.whole)], torch.int64)
        return counted if spread == 1 else Call("mul", (counted, integer(spread)), torch.int64)


def _results(kind: str, args: Sequence[Value], over: Sequence[int]) -> list[Value]:
    reduce = Reduce(kind, tuple(args), over, args[0].dtype)
    if REDUCTIONS[kind].results == 1:
        return [reduce]
    return [Part(reduce, at, arg.dtype) for at, arg in enumerate(args)]


def _identity(kind: str, at: int, arg: Value) -> bool | int | float:
    """What an element that is left out counts as."""
    if kind.startswith("arg") and at == 1:
        return 2**63 - 1
    number = REDUCTIONS[kind].identity[at]
    if arg.dtype == torch.bool:
        return number != 0 if math.isfinite(number) else number > 0
    if arg.dtype.is_floating_point:
        return number
    if math.isfinite(number):
        return int(number)
    limits = torch.iinfo(arg.dtype)
    return limits.max if number > 0 else limits.min
