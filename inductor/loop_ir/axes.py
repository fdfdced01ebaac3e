"""Algebra of axes: how the loops of two nests that access one buffer correspond, and substitution of axes in a nest.

Indices are affine. Two accesses of one buffer therefore visit the same elements in the same order exactly when their
(stride, size) pairs, sorted by stride, multiply out to the same positions. Where one loop is a merged form of two loops
of the other nest, it is split alike: the loops of a ``[B*S, C]`` nest and of a ``[B, S, H, D]`` nest become
``[B, S, H, D]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import sympy
import torch

from weft.inductor.loop_ir.ir import (
    Call,
    Const,
    Index,
    Int,
    Load,
    Nest,
    Position,
    Reduce,
    Scalar,
    Store,
    Value,
    map_values,
    ordered,
    rewrite,
)


class AxisExpression(NamedTuple):
    """An axis written in other axes and in integer values: ``constant + sum(factor * axis) + sum(picked values)``."""

    terms: tuple[tuple[int, Int], ...]
    constant: Int = 0
    gathered: tuple[Value, ...] = ()


Substitution = Mapping[int, AxisExpression]


class Factor(NamedTuple):
    """One loop that two accesses share: a part of axis ``left`` of one and of ``right`` of the other, ``size`` long."""

    left: int
    right: int
    size: Int


def align(left: Index, left_sizes: Sequence[Int], right: Index, right_sizes: Sequence[Int]) -> list[Factor] | None:
    """The loops that two accesses share, smallest stride first; None where they differ in any element or order.

    Parts of one axis appear from the inside out. Axes that an access does not change along are in no factor.
    """
    # Equal pairs from different offsets are other elements. A shift by whole steps is `solve_access`'s to find, for
    # inlining; fused loops have to meet at the same point.
    if left.indirect or right.indirect or left.offset != right.offset:
        return None
    a, b = _by_stride(left, left_sizes), _by_stride(right, right_sizes)
    factors: list[Factor] = []
    while a and b:
        (x, stride, n), (y, other, m) = a.pop(), b.pop()
        # Loops are matched from the innermost out: the first different stride is a different order of elements.
        # Symbolic strides compare by structure: two expressions that are equal but written differently are not
        # joined, which costs a fusion and no correctness.
        if stride != other:
            return None
        if n == m:
            shared = n
        elif isinstance(n, int) and isinstance(m, int):
            shared = min(n, m)
        else:
            shared = _common(n, m)
        # Where neither size divides the other, no split of the loops makes them equal.
        if shared == 1 or not _divides(shared, n) or not _divides(shared, m):
            return None
        if n != shared:
            # What is left of a longer loop steps over the part that is shared.
            a.append((x, stride * shared, _quotient(n, shared)))
        if m != shared:
            b.append((y, stride * shared, _quotient(m, shared)))
        factors.append(Factor(x, y, shared))
    # A loop that is left over visits elements that the other access does not.
    return None if a or b else factors


def _by_stride(index: Index, sizes: Sequence[Int]) -> list[tuple[int, Int, Int]]:
    """(axis, stride, size) with the smallest stride last."""
    # An axis of one element has an arbitrary stride in torch, so it says nothing about the order of elements.
    found = [(axis, stride, sizes[axis]) for axis, stride in index.strides if sizes[axis] != 1]
    # By magnitude: a reversed axis is walked as fast as its mirror image. Their signs are compared in `align`.
    return sorted(found, key=lambda entry: -size_hint(entry[1]))


def size_hint(value: Int) -> float:
    """A number to compare sizes and strides by; each symbol counts as 4099."""
    if isinstance(value, int):
        return abs(value)
    # Only the order matters, not the size. A prime equals no product of smaller constants.
    # It ranks and estimates: nothing that must hold is concluded from it.
    return abs(float(value.xreplace({symbol: sympy.Integer(4099) for symbol in value.free_symbols})))


def _divides(n: Int, m: Int) -> bool:
    if isinstance(n, int) and isinstance(m, int):
        return m % n == 0
    return (
        # Lenient where sympy knows too little (`is_integer` is None). With symbols `align` asks this only of a size
        # that `_common` returned, which had to be shown to divide.
        not sympy.denom(sympy.cancel(sympy.sympify(m) / n)).free_symbols
        and (sympy.sympify(m) / n).is_integer is not False
    )


def _quotient(n: Int, m: Int) -> Int:
    if isinstance(n, int) and isinstance(m, int):
        return n // m
    quotient = sympy.cancel(sympy.sympify(n) / m)
    return int(quotient) if quotient.is_Integer else quotient


def _common(n: Int, m: Int) -> Int:
    """The smaller of two sizes where one divides the other, or 1."""
    # Stricter than `_divides`: here the quotient must be known to be whole, since it decides how a loop is split.
    for small, large in ((n, m), (m, n)):
        quotient = sympy.cancel(sympy.sympify(large) / small)
        if not sympy.denom(quotient).free_symbols and quotient.is_integer and sympy.denom(quotient) == 1:
            return small
    return 1


class AccessSolution(NamedTuple):
    """Where a reader finds a writer's loop: the reader's axes split by ``factors`` (old axis, new axis, size) with
    ``sizes`` afterwards, and the writer's axes in those; ``picked`` are axes of the writer whose position is a value
    of the reader's index holds (the number of its indirect term)."""

    factors: list[tuple[int, int, Int]]
    sizes: list[Int]
    substitution: dict[int, AxisExpression]
    gathered: dict[int, int]


def solve_access(
    write: Index, write_sizes: Sequence[Int], read: Index, read_sizes: Sequence[Int], mask: Value | None = None
) -> AccessSolution | None:
    """For each point of a reader, the point of the writer that wrote what is read there; None where that is not affine.

    The writer must have written every element that is read, each once. Windows, steps and shifts are found too, as
    long as sizes are ints: ``read[d] = buffer[2 * d + 3]`` happened at ``2 * d + 3``.

    Args:
        mask: where the reader reads at all.
    """
    # A gather, the same loops, or a window. Each must be exact: an inlined value is recomputed at the point that is
    # found, and a wrong point is a wrong number without an error.
    if read.indirect:
        return _picked(write, write_sizes, read, read_sizes)
    # The common case, and the only one that symbolic sizes allow.
    factors = align(write, write_sizes, read, read_sizes)
    if factors is not None:
        return _solved(factors, write_sizes, read, read_sizes)
    # With symbols it cannot be shown that a window stays inside of what was written.
    if write.indirect or not _static(write, write_sizes) or not _static(read, read_sizes):
        return None
    return _window(write, write_sizes, read, read_sizes, {} if mask is None else _limits(mask))


def _picked(write: Index, write_sizes: Sequence[Int], read: Index, read_sizes: Sequence[Int]) -> AccessSolution | None:
    """A gather: each picked value is a position along the writer's axis of its stride.

    The other axes must be read in full: were one left to the picked value as well, that would run over the end of its
    own axis.
    """
    axes: dict[int, int] = {}
    for number, (_, stride) in enumerate(read.indirect):
        # Equal strides mean that the picked value counts along this axis of the writer.
        # The first of several equal strides: axes of one element aside, a layout without overlap has no two equal
        # strides.
        axis = next((a for a, s in write.strides if s == stride and a not in axes), None)
        if axis is None:
            return None
        axes[axis] = number
    others = Index([(a, s) for a, s in write.strides if a not in axes], write.offset, write.indirect)
    factors = align(others, write_sizes, Index(read.strides, read.offset), read_sizes)
    if factors is None:
        return None
    # Whether the picked value is below the axis's length is not checked: the load that is replaced had the same
    # index.
    return _solved(factors, write_sizes, read, read_sizes)._replace(gathered=axes)


def _solved(
    factors: list[Factor], write_sizes: Sequence[Int], read: Index, read_sizes: Sequence[Int]
) -> AccessSolution:
    sizes: list[Int] = []
    split: list[tuple[int, int, Int]] = []
    write: list[tuple[int, int, Int]] = []
    for factor in factors:
        split.append((factor.right, len(sizes), factor.size))
        write.append((factor.left, len(sizes), factor.size))
        sizes.append(factor.size)
    _keep_others(split, sizes, read_sizes)
    return AccessSolution(split, sizes, split_axes(write, write_sizes), {})


def _keep_others(split: list[tuple[int, int, Int]], sizes: list[Int], read_sizes: Sequence[Int]) -> None:
    """Axes of the reader that the access does not change along stay as they are."""
    known = {axis for axis, _, _ in split}
    for axis, size in enumerate(read_sizes):
        if axis not in known:
            split.append((axis, len(sizes), size))
            sizes.append(size)


def _static(index: Index, sizes: Sequence[Int]) -> bool:
    strides = (stride for _, stride in index.strides)
    return all(isinstance(n, int) for n in (index.offset, *strides, *sizes))


# The least value of a sum of axes and the first that is too large, by the (axis, factor) pairs of the sum.
_Limits = Mapping[tuple[tuple[int, Int], ...], tuple[float, float]]


def _window(
    write: Index, write_sizes: Sequence[Int], read: Index, read_sizes: Sequence[Int], limits: _Limits
) -> AccessSolution | None:
    """Each loop of the reader steps along one loop of the writer, pieces of it along several."""
    writer = sorted(((s, write_sizes[a], a) for a, s in write.strides), reverse=True)
    # The search takes the largest stride first, which is the outermost loop only among positive strides.
    # A flipped reader would also start its walk at the end of the span that `_shift` starts from the beginning.
    if any(s < 0 for s, _, _ in writer) or any(s < 0 for _, s in read.strides):
        return None
    # A padded read is inside of what was written only where its mask holds, so the mask's limits take part in the
    # proof.
    limited = {axis for terms in limits for axis, _ in terms}
    split: list[tuple[int, int, Int]] = []
    sizes: list[Int] = []
    along: dict[int, list[tuple[int, int, int]]] = {axis: [] for _, _, axis in writer}
    for axis, stride in read.strides:
        left = read_sizes[axis]
        while left != 1:
            # The outermost loop of the writer that one step of the reader is a whole number of steps along.
            found = next(((s, n, a) for s, n, a in writer if s <= stride and stride % s == 0), None)
            if found is None:
                return None
            step, length, loop = found
            # Steps of the reader until it leaves that loop, rounded up: the last one may start inside.
            span = -(-length * step // stride)
            # An axis with a limit stays whole, as the limit is not known for its pieces.
            here = left if axis in limited or left <= span else span
            # Pieces must fill the axis, and each must end where a step of the writer's outer loop begins.
            if here <= 1 or left % here or (here != left and length * step % stride):
                return None
            # -1 marks a piece: limits are known for whole axes of the reader only.
            along[loop].append((len(sizes), axis if here == read_sizes[axis] else -1, stride // step))
            split.append((axis, len(sizes), here))
            sizes.append(here)
            left, stride = left // here, stride * here
    _keep_others(split, sizes, read_sizes)
    # What is left to show: at every point that is read, the position along each of the writer's loops is inside it.
    spans = {loop: _span(steps, sizes, limits) for loop, steps in along.items()}
    constants = _shift(read.offset - write.offset, writer, spans)
    if constants is None:
        return None
    substitution = {
        loop: AxisExpression(tuple((new, factor) for new, _, factor in along.get(loop, ())), constants.get(loop, 0))
        for loop in range(len(write_sizes))
    }
    return AccessSolution(split, sizes, substitution, {})


def _span(steps: Sequence[tuple[int, int, int]], sizes: Sequence[Int], limits: _Limits) -> tuple[int, int]:
    """The least and the greatest value of a sum of (new axis, old axis or -1 for a piece of one, factor)."""
    least = most = 0
    for new, old, factor in steps:
        low, end = limits.get(((old, 1),), (0, sizes[new]))
        # Factors are positive here, as all strides are, so ends of the parts give ends of the sum.
        least += int(max(low, 0)) * factor
        most += int(min(end, sizes[new]) - 1) * factor
    # A limit of the sum itself, such as `2 * d0 + d1 - 1 >= 0` of a padded window, is narrower than those of its
    # parts.
    low, end = limits.get(tuple(sorted((old, factor) for _, old, factor in steps)), (least, most + 1))
    return int(max(low, least)), int(min(end - 1, most))


def _shift(
    offset: Int, writer: Sequence[tuple[int, int, int]], spans: Mapping[int, tuple[int, int]]
) -> dict[int, Int] | None:
    """``offset`` as steps along the writer's loops, so that none is left where something is read."""
    assert isinstance(offset, int)
    # The first element that is read, counted from the writer's first: lower limits of the mask make up for a negative
    # offset (padding).
    left = offset + sum(spans[axis][0] * stride for stride, _, axis in writer)
    constants: dict[int, Int] = {}
    for stride, size, axis in writer:
        low, high = spans[axis]
        # Largest stride first, as a number is written in a mixed radix: the remainder belongs to the inner loops.
        first, left = divmod(left, stride)
        # Outside of the writer's loop lies what this nest did not write.
        if not 0 <= first <= first + high - low < size:
            return None
        constants[axis] = first - low
    # A remainder means elements between the writer's: it never wrote them.
    return None if left else constants


def _limits(mask: Value) -> _Limits:
    """What a mask, of comparisons of positions with numbers, says about them."""
    # Half-open, `low <= sum < end`, as `range` has it.
    limits: dict[tuple[tuple[int, Int], ...], tuple[float, float]] = {}
    waiting = [mask]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, Call):
            continue
        # Conjunctions only: of an "or", neither side has to hold.
        if value.op == "and":
            waiting += value.args
        if value.op not in _COMPARED:
            continue
        # The constants of both sides move to the right, so that the key is the sum of axes alone.
        index, bound = (affine(arg) for arg in value.args)
        if index is None or bound is None or bound.strides or not isinstance(bound.offset - index.offset, int):
            continue
        # All comparisons of a conjunction hold, so their intervals intersect.
        low, end = limits.get(index.strides, (-math.inf, math.inf))
        least, first_over = _COMPARED[value.op](bound.offset - index.offset)
        limits[index.strides] = max(low, least), min(end, first_over)
    return limits


# The values on the left that a comparison with a number holds for.
_COMPARED: dict[str, Callable[[int], tuple[float, float]]] = {
    "lt": lambda n: (-math.inf, n),
    "le": lambda n: (-math.inf, n + 1),
    "ge": lambda n: (n, math.inf),
    "gt": lambda n: (n + 1, math.inf),
}


def affine(value: Value) -> Index | None:
    """A whole number as a sum of axes and a constant, None where it is none."""
    # Not loads of POSITIONS: those are made by canonicalisation, after inlining has asked.
    if isinstance(value, Position):
        return Index([(value.axis, 1)])
    if isinstance(value, Const) and not value.dtype.is_floating_point:
        return Index(offset=int(value.value))
    if not isinstance(value, Call) or value.op not in ("add", "sub", "mul"):
        return None
    a, b = (affine(arg) for arg in value.args)
    if a is None or b is None:
        return None
    if value.op != "mul":
        return add_scaled(a, b, -1 if value.op == "sub" else 1)
    # A product of two axes is not affine.
    if a.strides and b.strides:
        return None
    return add_scaled(Index(), a, b.offset) if a.strides else add_scaled(Index(), b, a.offset)


def add_scaled(a: Index, b: Index, factor: Int) -> Index:
    """``a + factor * b``, where ``b`` has no indirect terms."""
    strides = dict(a.strides)
    for axis, stride in b.strides:
        # Terms that cancel become a stride of 0, which Index drops: `(d0 + d1) - d1` is d0 again.
        strides[axis] = strides.get(axis, 0) + factor * stride
    return Index(strides.items(), a.offset + factor * b.offset, a.indirect)


def split_axes(factors: Iterable[tuple[int, int, Int]], sizes: Sequence[Int]) -> dict[int, AxisExpression]:
    """How old axes are written in new ones.

    Args:
        factors: (old axis, new axis, size) with the pieces of one axis from the inside out.
        sizes: of the old axes; one in no factor must have size 1.
    """
    terms: dict[int, list[tuple[int, Int]]] = {}
    step: dict[int, Int] = {}
    for old, new, size in factors:
        # From the inside out: a piece is stepped over by the product of the pieces inside it.
        terms.setdefault(old, []).append((new, step.get(old, 1)))
        step[old] = step.get(old, 1) * size
    return {axis: AxisExpression(tuple(terms.get(axis, ()))) for axis in range(len(sizes))}


def substitute(index: Index, substitution: Substitution) -> Index:
    """The index over other axes. Values of indirect terms are not touched."""
    strides: dict[int, Int] = {}
    offset = index.offset
    taken: list[tuple[Value, Int]] = []
    for axis, stride in index.strides:
        place = substitution[axis]
        # A gathered position becomes an indirect term with the stride that its axis had.
        taken += ((value, stride) for value in place.gathered)
        offset = offset + stride * place.constant if place.constant != 0 else offset
        for new, factor in place.terms:
            strides[new] = strides.get(new, 0) + stride * factor
    return Index(strides.items(), offset, [*index.indirect, *taken])


def substitute_values(roots: Iterable[Value], substitution: Substitution) -> dict[Value, Value]:
    """The values under ``roots`` over other axes."""
    if _is_identity(substitution):
        return {value: value for value in ordered(roots)}

    def change(value: Value) -> Value:
        if isinstance(value, Load):
            return Load(value.buffer, substitute(value.index, substitution), value.dtype, value.mask, value.other)
        if isinstance(value, Position):
            return _position(substitution[value.axis])
        if isinstance(value, Reduce):
            # A reduced axis that was split is reduced along all of its pieces; an axis of size 1 that went away,
            # along none.
            over = [new for axis in value.over for new, _ in substitution[axis].terms]
            return Reduce(value.kind, value.args, over, value.dtype)
        return value

    return rewrite(roots, change)


def _position(place: AxisExpression) -> Value:
    total: Value | None = None
    for axis, factor in place.terms:
        term: Value = Position(axis)
        if factor != 1:
            term = Call("mul", (term, integer(factor)), torch.int64)
        total = term if total is None else Call("add", (total, term), torch.int64)
    for value in place.gathered:
        total = value if total is None else Call("add", (total, value), torch.int64)
    if total is None:
        return integer(place.constant)
    return total if place.constant == 0 else Call("add", (total, integer(place.constant)), torch.int64)


def integer(value: Int) -> Value:
    """A whole number as a value: a constant, or read when the step is called."""
    return Const(value, torch.int64) if isinstance(value, int) else Scalar(value, torch.int64)


def _is_identity(substitution: Substitution) -> bool:
    return all(place == (((axis, 1),), 0, ()) for axis, place in substitution.items())


def substitute_stores(stores: Sequence[Store], substitution: Substitution) -> list[Store]:
    """The stores over other axes."""
    if _is_identity(substitution):
        return list(stores)  # most kernels are made of one nest
    new = substitute_values([value for store in stores for value in store.values()], substitution)
    return [map_values(store, new, substitute(store.index, substitution)) for store in stores]


def squeeze(nest: Nest) -> Nest:
    """The nest without its axes of size 1."""
    kept = _long_axes(nest)
    return nest if len(kept) == len(nest.sizes) else _over_groups(nest, [[axis] for axis in kept])


def merge(nest: Nest) -> Nest:
    """The nest with neighbouring axes joined wherever every access walks through both as through one.

    Two axes stay apart where one is reduced over and the other is not, or where only one of them matters to a value
    that is stored or reduced (a broadcast).
    """
    return _merged(nest, list(range(len(nest.sizes))))


def squeeze_and_merge(nest: Nest) -> Nest:
    """``merge(squeeze(nest))``, which rewrites the nest once."""
    return _merged(nest, _long_axes(nest))


def _long_axes(nest: Nest) -> list[int]:
    return [axis for axis, size in enumerate(nest.sizes) if size != 1]


def _merged(nest: Nest, kept: list[int]) -> Nest:
    """:func:`merge` of the nest over the axes ``kept``; the others have one element and go."""
    values = nest.values()
    # All accesses have a say: fewer axes mean fewer divisions in a kernel, and one that two accesses walk differently
    # cannot be written as one index.
    indices = [store.index for store in nest.stores] + [value.index for value in values if isinstance(value, Load)]
    # A position is the number along one axis; joined axes have only a common number.
    apart = {value.axis for value in values if isinstance(value, Position)}
    # Joining a reduced axis with a kept one would leave no axis to reduce over.
    overs = [frozenset(value.over) for value in values if isinstance(value, Reduce)]
    strides = [dict(index.strides) for index in indices]
    groups: list[list[int]] = []
    for axis in _outside_in(kept, strides):
        if (
            groups
            and _join(groups[-1][-1], axis, nest.sizes[axis], strides, overs)
            and not {groups[-1][-1], axis} & apart
        ):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    # In order and unjoined: nothing changes. A mere change of order does, so that equal loops become equal nests.
    return nest if groups == [[axis] for axis in range(len(nest.sizes))] else _over_groups(nest, groups)


def _over_groups(nest: Nest, groups: list[list[int]]) -> Nest:
    """The nest over one axis for each group; axes in no group go."""
    sizes = tuple(_product(nest.sizes[axis] for axis in group) for group in groups)
    # A joined axis is walked by its innermost part's stride; the other parts' strides are multiples that follow.
    substitution = {axis: AxisExpression(()) for axis in range(len(nest.sizes))}
    substitution |= {group[-1]: AxisExpression(((new, 1),)) for new, group in enumerate(groups)}
    return Nest(sizes, tuple(substitute_stores(nest.stores, substitution)))


# Strides of each access, by axis; an axis that an access does not change along has none.
_Strides = Sequence[Mapping[int, Int]]


def _join(outer: int, inner: int, size: Int, accesses: _Strides, overs: Sequence[frozenset[int]]) -> bool:
    if any((outer in over) != (inner in over) for over in overs):
        return False
    # One step outside must be as far as all steps inside, in every access.
    # Also where both strides are 0: an access that ignores both axes does not tell them apart.
    return all(strides.get(outer, 0) == strides.get(inner, 0) * size for strides in accesses)


def _outside_in(axes: Iterable[int], accesses: _Strides) -> list[int]:
    """Axes by the stride of what is stored, largest first; axes that are only read along come by their reads."""

    def key(axis: int) -> tuple[float, int]:
        # Stores come first in `accesses`, so the first stride that is not 0 is a store's where there is one.
        return -size_hint(next((strides[axis] for strides in accesses if axis in strides), 0)), axis

    return sorted(axes, key=key)


def _product(sizes: Iterable[Int]) -> Int:
    return math.prod(sizes)
