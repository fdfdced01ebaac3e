"""Reductions in two stages: where one would leave most of a GPU idle, parts are reduced first, then their results.

The rule (``choose_split``), for ``S`` multiprocessors:

* Along memory ("rows": the reduced axes are contiguous). Every result is a program. Fewer than ``S`` results are split,
  as long as a part keeps 1024 elements.
* Across memory ("columns": the reduced axes are the outer ones, as in a bias gradient), also where half of the large
  operands lie so: a program of one column would use one element of each sector of them. A program has 64 columns. With
  fewer than ``2 * S`` programs the rows are split into about ``S`` to ``2 * S`` parts, and where these have few columns
  into as many as make ``8 * S`` programs (at least 32 rows in each if there are more than ``S`` parts); each part gives
  one row of partial results. A kernel over the same rows, such as a norm's backward, can then compute them too.

Splits are exact: the number of parts is a product of divisors of the reduced sizes, so that the loops of other kernels
can be split alike. If divisors give less than half of the wanted parts (primes, symbolic sizes), the last part is
shorter and its tail is masked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.utils._sympy.functions import FloorDiv

from weft.inductor.loop_ir.axes import AxisExpression, integer, size_hint, substitute_values
from weft.inductor.loop_ir.ir import (
    Call,
    Index,
    Int,
    Position,
    Reduce,
    ReductionResult,
    Store,
    Value,
)
from weft.inductor.loop_ir.ops import REDUCTIONS, extreme
from weft.inductor.lowering.registry import Lowering, masked

_MIN_ROW_PART = 1024  # elements of a part along memory
_COLUMNS = 64  # of a program across memory
# Programs of a multiprocessor that sum columns in parts. Measured on an H200 in steps of EfficientNet, with at most two
# parts a multiprocessor and with these: sums of 1.6 million rows of 96 take 398 and 236 us, all its kernels 15.87 and
# 15.41 ms. A program of four warps that loops over its rows waits for memory most of the time.
_COLUMN_PROGRAMS = 8
_MIN_COLUMN_ROWS = 32  # rows of a part, where there are more parts than multiprocessors
_MIN_ROWS = 4  # rows of a part, ever


class AxisSplit(NamedTuple):
    """A reduced axis as ``outer`` parts of ``inner`` elements; ``masked_tail`` where that is more than the axis has."""

    outer: Int
    inner: Int
    masked_tail: bool = False


def choose_split(
    sizes: Sequence[Int], over: Sequence[int], reads: Sequence[Sequence[Int]], multiprocessors: int
) -> dict[int, AxisSplit] | None:
    """How a reduction over the axes ``over`` of a space of ``sizes`` is split; None where one stage does.

    Args:
        reads: of each of the largest operands, the strides by axis at which it is read; the first is the largest.
    """
    # Hints stand for symbolic sizes, so the choice depends on the graph and the GPU alone, never on a batch at run
    # time.
    low, high = _part_bounds(sizes, over, reads, multiprocessors)
    if high < 2:
        return None
    # Ties go to parts along the axis with the largest stride: each part then stays contiguous in memory.
    slow_first = sorted(over, key=lambda axis: -size_hint(reads[0][axis]))
    static = [axis for axis in slow_first if isinstance(sizes[axis], int)]
    # As many parts as fit under the bound: more parts mean more programs.
    best = max(_products([sizes[axis] for axis in static], high), key=lambda d: (math.prod(d), d), default=())
    # Exact splits match the loops of other kernels; a masked tail is the way out where there are few divisors.
    if math.prod(best) * 2 > low:
        return {axis: AxisSplit(d, sizes[axis] // d) for axis, d in zip(static, best, strict=True)}
    # One masked axis is enough, and two would need a mask over both.
    longest = max(over, key=lambda axis: size_hint(sizes[axis]))
    size = sizes[longest]
    if isinstance(size, int):
        inner = -(-size // high)
        # Rounded up twice, so that no part is empty: 100 elements in 8 parts are 7 of 13 and one of 9.
        return {longest: AxisSplit(-(-size // inner), inner, masked_tail=True)}
    # With a symbolic size the number of parts is fixed; short tensors leave some of them empty.
    return {longest: AxisSplit(high, FloorDiv(size + high - 1, high), masked_tail=True)}


def _part_bounds(
    sizes: Sequence[Int], over: Sequence[int], reads: Sequence[Sequence[Int]], processors: int
) -> tuple[int, int]:
    """The least and most parts."""
    contiguous = [_contiguous_axis(sizes, strides) for strides in reads]
    if contiguous[0] is None:
        return 1, 1
    reduced = math.prod(size_hint(sizes[axis]) for axis in over)
    kept = math.prod(size_hint(size) for axis, size in enumerate(sizes) if axis not in over)
    # The axis along which memory is contiguous is reduced: rows.
    if sum(axis is None or axis in over for axis in contiguous) * 2 > len(contiguous):
        # Each result is a program, so the GPU is full; a second launch would only add its overhead.
        if kept >= processors:
            return 1, 1
        # Parts below 1024 elements cost more in partial results than they gain in programs.
        high = int(min(2 * processors / kept, reduced / _MIN_ROW_PART))
        return min(int(processors / kept), high), high
    # Columns share programs, 64 to each.
    if kept >= 2 * processors * _COLUMNS:
        return 1, 1
    # A part of fewer rows than _MIN_ROWS would write nearly as much as it reads.
    most = max(2, _COLUMN_PROGRAMS // max(1, math.ceil(kept / _COLUMNS))) * processors
    high = int(min(max(processors, min(reduced / _MIN_COLUMN_ROWS, most)), reduced / _MIN_ROWS))
    return (min(processors, high), high) if high >= processors / 2 else (1, 1)


def _contiguous_axis(sizes: Sequence[Int], strides: Sequence[Int]) -> int | None:
    # Axes of one element and broadcast axes say nothing about memory.
    wide = [axis for axis, size in enumerate(sizes) if size != 1 and strides[axis] != 0]
    return min(wide, key=lambda axis: size_hint(strides[axis]), default=None)


def _products(sizes: Sequence[Int], most: int) -> Iterator[tuple[int, ...]]:
    """Choices of a divisor of each size with a product of at most ``most``."""
    # `most` is a few times the multiprocessors, so this is a few hundred divisions for each axis.
    divisors = [[d for d in range(1, min(int(n), most) + 1) if n % d == 0] for n in sizes]
    return (choice for choice in itertools.product(*divisors) if math.prod(choice) <= most)


class StagedReduction:
    """A reduction in one nest, or in two with partial results in between.

    Attributes:
        reads: the strides of the largest operand by axis.
        sizes, over: of the nest of the second stage. Its axes are those of the whole space; a reduced axis is as long
            as there are parts along it.
        count: how many elements are reduced to one.
    """

    def __init__(self, out: Lowering, sizes: Sequence[Int], over: Sequence[int], *largest: Index) -> None:
        """Decide the split.

        Args:
            sizes, over: the whole space and the axes to reduce.
            largest: the indices at which the largest operands are read; their strides decide the split.
        """
        self.out, self.whole = out, tuple(sizes)
        # Every nest of the operation is split alike.
        reads = [[index.stride(axis) for axis in range(len(sizes))] for index in largest]
        self.splits = choose_split(sizes, over, reads, out.multiprocessors)
        self.reads = reads[0]
        self.over = tuple(sorted(over))
        self.count: Int = math.prod(sizes[axis] for axis in over)
        self.sizes = self.whole
        self._stores: list[Store] = []
        if self.splits is not None:
            self.sizes = tuple(self._parts(axis) if axis in over else size for axis, size in enumerate(sizes))

    def _parts(self, axis: int) -> Int:
        split = (self.splits or {}).get(axis)
        return 1 if split is None else split.outer

    def reduce(self, kind: str, *args: Value) -> list[Value]:
        """The results of a reduction of values of the whole space, in the nest of the second stage."""
        if self.splits is None:
            return _results(kind, args, self.over)
        # The same kind twice: a sum of sums, a maximum of maxima. Means and variances are not of that sort; see
        # `moments`.
        parts = self.reduce_part(kind, args)
        return _results(kind, [self.store_partial(part) for part in parts], self.over)

    def reduce_part(self, kind: str, args: Sequence[Value]) -> list[Value]:
        """The results of one part, in the nest of the first stage."""
        # Points in the tail must not change the result, so they get the neutral element of the reduction.
        masked = [self.mask_tail(self.in_parts(arg), _neutral_element(kind, at, arg)) for at, arg in enumerate(args)]
        return _results(kind, masked, self._inner[1])

    def store_partial(self, value: Value) -> Value:
        """Store a partial result, and return the load of it in the nest of the second stage."""
        # In the register's type: a partial sum that was rounded to a half would lose what float32 kept. The number of
        # buffers makes the name unique within the node.
        target = self.out.temporary(f"part{len(self.out.buffers)}", value.dtype, self.sizes, self._order_of_parts())
        self._stores.append(Store(target.buffer, target.index(), value))
        return target.load(target.index())

    def _order_of_parts(self) -> list[int]:
        """The axes in the order in which the largest operand has them in memory, outermost first: columns are innermost
        where columns are summed. A program then writes neighbouring results to neighbouring elements."""
        assert self.splits is not None
        inner = {axis: split.inner for axis, split in self.splits.items()}
        stride = lambda axis: size_hint(self.reads[axis]) * size_hint(inner.get(axis, 1))
        # An axis along which the operand is broadcast has no place in its memory: outermost.
        return sorted(range(len(self.sizes)), key=lambda axis: (stride(axis) != 0, -stride(axis)))

    def sum_part(self, value: Value) -> Value:
        """The sum of a value over each part, in the nest of the first stage."""
        # Unlike `reduce_part`, of a value that is already in the nest of the first stage.
        return Reduce("sum", (value,), self._inner[1], value.dtype)

    def reduce_partials(self, kind: str, value: Value) -> Value:
        """The reduction of partial results over the parts, in the nest of the second stage."""
        return Reduce(kind, (value,), self.over, value.dtype)

    def finish(self, stores: Sequence[Store]) -> None:
        """Add the nests to the lowering: that of the first stage, if there is one, and that of the second."""
        # The order of the list is the order of launches: partial results are complete before the second nest reads
        # them.
        if self._stores:
            self.out.nest(self._inner[0], self._stores)
        self.out.nest(self.sizes, stores)

    @property
    def _inner(self) -> tuple[tuple[Int, ...], tuple[int, ...]]:
        """Sizes of the nest over parts, and the axes it reduces."""
        assert self.splits is not None
        sizes = [*self.sizes, *(split.inner for split in self.splits.values())]
        # An axis that is reduced but not split belongs to the first stage as a whole; in the second it has size 1.
        for axis in self.over:
            if axis not in self.splits:
                sizes[axis] = self.whole[axis]
        rest = [axis for axis in self.over if axis not in self.splits]
        return tuple(sizes), (*rest, *range(len(self.whole), len(sizes)))

    def in_parts(self, value: Value) -> Value:
        """A value of the whole space in the nest of the first stage."""
        assert self.splits is not None
        # Kept axes keep their numbers, and the inner parts follow behind all of them: that is what `_inner` says too.
        substitution = {axis: AxisExpression(((axis, 1),)) for axis in range(len(self.whole))}
        for inner, (axis, split) in enumerate(self.splits.items(), len(self.whole)):
            substitution[axis] = AxisExpression(((axis, split.inner), (inner, 1)))
        return substitute_values([value], substitution)[value]

    def mask_tail(self, value: Value, other: float) -> Value:
        """The value where the nest of the first stage is inside the whole space, ``other`` in the masked tail."""
        mask = self._mask()
        return value if mask is None else masked(value, mask, other)

    def _mask(self) -> Value | None:
        for inner, (axis, split) in enumerate((self.splits or {}).items(), len(self.whole)):
            # `choose_split` masks one axis at most, so the first found is the only one.
            if split.masked_tail:
                start = Call("mul", (Position(axis), integer(split.inner)), torch.int64)
                at = Call("add", (start, Position(inner)), torch.int64)
                return Call("lt", (at, integer(self.whole[axis])), torch.bool)
        return None

    def part_length(self) -> Value:
        """How many elements a part has (int64), in the nest of the first stage."""
        whole = lambda op, *args: Call(op, args, torch.int64)
        sizes, inner = self._inner
        for axis, split in (self.splits or {}).items():
            if split.masked_tail:
                # Computed from the part's number: one kernel cannot count along this axis alone and sum along others.
                left = whole("sub", integer(self.whole[axis]), whole("mul", Position(axis), integer(split.inner)))
                length = whole("minimum", whole("maximum", left, integer(0)), integer(split.inner))
                # The other reduced axes count in full.
                others = math.prod(sizes[at] for at in inner if at < len(self.whole))
                return length if others == 1 else whole("mul", length, integer(others))
        return integer(math.prod(sizes[at] for at in inner))


def _results(kind: str, args: Sequence[Value], over: Sequence[int]) -> list[Value]:
    # Bools stay bools: only `any`, `all`, "max" and "min" get here with them.
    reduce = Reduce(kind, tuple(args), over, args[0].dtype)
    if REDUCTIONS[kind].results == 1:
        return [reduce]
    return [ReductionResult(reduce, at, arg.dtype) for at, arg in enumerate(args)]


def _neutral_element(kind: str, at: int, arg: Value) -> float:
    """The neutral element of result ``at`` of a reduction, in the dtype of ``arg``."""
    # Among equal values the smallest position wins, so the tail has the largest.
    if kind.startswith("arg") and at == 1:
        return 2**63 - 1
    return extreme(REDUCTIONS[kind].identity[at], arg.dtype)
