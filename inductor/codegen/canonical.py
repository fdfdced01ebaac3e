"""The canonical form of a nest: the same for equal loops over different tensors.

Buffers and symbols are renamed to ``b0``, ``b1``, ... and ``s0``, ``s1``, ... in the order of their use, axes of one
element are removed, and operations on constants are folded. So equal layers of a network share one kernel, and its text
does not depend on the graph that it came from.

Sizes, strides and offsets are sums, products and quotients of symbols: what else a step computes from sizes is a number
that the kernel gets as an argument.

Integers that are affine in the axes become loads from :data:`POSITIONS`, a virtual buffer whose element ``k`` is ``k``.
So they are simplified and printed by the code for indices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, ModularIndexing, PythonMod

from weft.inductor.loop_ir import axes
from weft.inductor.loop_ir.ir import (
    POSITIONS,
    Call,
    Const,
    Index,
    Int,
    Load,
    Nest,
    Position,
    Reduce,
    ReductionResult,
    Scalar,
    Value,
    is_position,
    rewrite_stores,
)
from weft.inductor.loop_ir.numbering import number_of, numbered
from weft.inductor.loop_ir.ops import OPS
from weft.inductor.loop_ir.value_ranges import Ranges
from weft.inductor.lowering.registry import literal

# Torch's own classes for division of sizes. All of them print as `//` and `%` where no operand is negative.
_QUOTIENTS = (FloorDiv, ModularIndexing, Mod, PythonMod, CleanDiv)


@dataclass(frozen=True)
class Canonical:
    """A nest over canonical names, and what they stand for.

    Attributes:
        buffers: the name that ``b0``, ``b1``, ... had.
        scalars: the numbers that ``s0``, ``s1``, ... are.
    """

    nest: Nest
    buffers: tuple[str, ...]
    scalars: tuple[Scalar, ...]


def canonical(nest: Nest) -> Canonical:
    """The canonical form of a nest."""
    # Numbered first: of equal layers the first one alone is brought into the form.
    form, buffers = numbered(nest)
    found = _canonical(form)
    return replace(found, buffers=tuple(buffers[number_of(name)] for name in found.buffers))


# A step has some hundred different nests.
@functools.lru_cache(maxsize=1024)
def _canonical(nest: Nest) -> Canonical:
    """The canonical form of a numbered nest."""
    # Simplifying may remove the last use of an axis, so axes are dropped before it and after.
    # Merging comes last: positions that became indices no longer keep axes apart, and fewer axes mean fewer
    # divisions.
    nest = axes.squeeze_and_merge(_without_unused_axes(simplified(axes.squeeze(nest))))
    form, buffers = numbered(nest)
    scalars = _scalars(nest)
    symbols = {scalar: symbol(k) for k, scalar in enumerate(scalars)}
    return Canonical(_with_symbols(form, symbols), buffers, tuple(scalars))


def symbol(k: int) -> sympy.Symbol:
    """The name of number ``k`` in a canonical nest."""
    # Not `positive`: a batch may be empty. sympy must not simplify with more than what holds.
    return sympy.Symbol(f"s{k}", integer=True, nonnegative=True)


def simplified(nest: Nest) -> Nest:
    """The nest with positions as loads from :data:`POSITIONS`, and with constants folded.

    Folding runs the operation's eager form, so a folded value has eager's bits. A kernel's approximate functions, such
    as that of exponentials, may differ from it in the last.
    """
    # One bottom-up pass: each rule sees operands that are simplified already, and none of them creates work for
    # another.
    stores = rewrite_stores(nest.stores, lambda value: _simpler(value, nest.sizes))
    return Nest(nest.sizes, tuple(replace(store, index=_without_positions(store.index)) for store in stores))


def _without_unused_axes(nest: Nest) -> Nest:
    """The nest with size 1 along axes that no store and no reduction uses any more."""
    # A reduction uses an axis that its operand does not change along: it counts each point of it.
    used = frozenset().union(*(store.axes for store in nest.stores), *(reduce.over for reduce in nest.reduces))
    return Nest(tuple(size if axis in used else 1 for axis, size in enumerate(nest.sizes)), nest.stores)


def _simpler(value: Value, sizes: Sequence[Int]) -> Value:
    if isinstance(value, Position):
        return Load(POSITIONS, Index([(value.axis, 1)]), torch.int64)
    if isinstance(value, Load):
        value = Load(value.buffer, _without_positions(value.index), value.dtype, value.mask, value.other)
    if isinstance(value, Call) and value.op == "checked_index":
        position, size, condition = value.args
        never = isinstance(condition, Const) and not condition.value
        return position if never else _known_position(position, size, Ranges(sizes)) or value
    # The eager forms of random operations draw from torch's generator, not from the kernel's Philox counters.
    if isinstance(value, Call) and value.op not in ("rand", "randn") and all(isinstance(a, Const) for a in value.args):
        return _computed(value)
    if isinstance(value, Call) and value.dtype == torch.int64 and (index := _affine(value)) is not None:
        return Load(POSITIONS, index, torch.int64)
    if isinstance(value, Load) and isinstance(value.mask, Const):
        # A mask that never holds leaves no load at all, so its buffer may drop out of the kernel's arguments.
        return Load(value.buffer, value.index, value.dtype) if value.mask.value else literal(value.other, value.dtype)
    # All reduced axes had one element and were squeezed: the reduction is its argument.
    if isinstance(value, Reduce) and not value.over and value.kind in _ONE:
        return _converted(value.args[0], value.dtype)
    if isinstance(value, Reduce) and value.kind == "sum":
        return _sum_of_single_term(value, sizes)
    if isinstance(value, ReductionResult) and isinstance(value.reduce, Reduce) and not value.reduce.over:
        # Only without axes; reductions that keep one are in the form that code generation chooses later.
        return _part_of_single_term(value.reduce, value)
    return value


_ONE = frozenset({"sum", "prod", "max", "min", "any", "all"})


def _affine(value: Value) -> Index | None:
    """An integer as an index, None where it is not affine in the axes."""
    if is_position(value):
        assert isinstance(value, Load)
        return value.index
    if isinstance(value, Const) and not value.dtype.is_floating_point:
        return Index(offset=int(value.value))
    # Whole numbers only: a float scalar has a fraction that an index cannot have.
    if isinstance(value, Scalar) and value.dtype == torch.int64:
        return Index(offset=value.expression)
    if not isinstance(value, Call) or value.op not in ("add", "sub", "mul"):
        return None
    a, b = (_affine(arg) for arg in value.args)
    # Without an axis it is a number, not a position.
    if a is None or b is None or not (a.strides or b.strides):
        return None
    if value.op != "mul":
        return axes.add_scaled(a, b, -1 if value.op == "sub" else 1)
    # A product of two positions is quadratic.
    if a.strides and b.strides:
        return None
    return axes.add_scaled(Index(), a, b.offset) if a.strides else axes.add_scaled(Index(), b, a.offset)


def _without_positions(index: Index) -> Index:
    """The index with affine indirect terms folded into its strides."""
    # A gather at an affine position is a strided read: without the indirect term it is vectorised and its bounds are
    # proved.
    total = Index(index.strides, index.offset, [pick for pick in index.indirect if not is_position(pick[0])])
    for value, stride in index.indirect:
        if is_position(value):
            assert isinstance(value, Load)
            total = axes.add_scaled(total, value.index, stride)
    return total


def _sum_of_single_term(total: Reduce, sizes: Sequence[Int]) -> Value:
    """A sum along one axis of ``where(position == at, value, 0)``: ``value`` where ``at`` is a position of the axis.

    The gradient of a cross-entropy, summed over the classes, has this form; the loop over the classes goes away.
    """
    term = total.args[0]
    if not (len(total.over) == 1 and isinstance(term, Call) and term.op == "where" and term.dtype == total.dtype):
        return total
    (axis,), (condition, value, zero) = total.over, term.args
    # The comparison with the reduced axis may be and-ed with others (a label that counts).
    conditions = _conjuncts(condition)
    here = next((c for c in conditions if axis in c.axes), None)
    others = [c for c in conditions if c is not here]
    if not (isinstance(zero, Const) and zero.value == 0 and isinstance(here, Call) and here.op == "eq"):
        return total
    # The single term may not depend on the axis otherwise: its position is taken out of the loop.
    if any(axis in other.axes for other in (value, *others)):
        return total
    along = Load(POSITIONS, Index([(axis, 1)]), torch.int64)
    # Compared by identity, as values are interned. Both sides the position itself: `at` is then of the axis, and
    # refused.
    at = next((arg for arg in here.args if arg is not along), along)
    if along not in here.args or axis in at.axes or at.dtype != torch.int64:
        return total
    # An index outside the axis (`ignore_index`) equals no position: its sum is zero.
    others.append(Call("ge", (at, Const(0, torch.int64)), torch.bool))
    others.append(Call("lt", (at, axes.integer(sizes[axis])), torch.bool))
    return Call("where", (functools.reduce(_both, others), value, zero), term.dtype)


def _known_position(position: Value, size: Value, ranges: Ranges) -> Value | None:
    """The position where it is known to be in ``range(size)``; without the choice for numbers that count from the end,
    where none does."""
    if isinstance(position, Call) and position.op == "where":
        condition, _, unwrapped = position.args
        if condition is Call("lt", (unwrapped, Const(0, torch.int64)), torch.bool) and ranges.nonnegative(unwrapped):
            position = unwrapped
    known, end = ranges.of(position), ranges.of(size)
    return position if known and end and known[0] >= 0 and known[1] < end[0] else None


def _conjuncts(condition: Value) -> list[Value]:
    if isinstance(condition, Call) and condition.op == "and":
        return [part for arg in condition.args for part in _conjuncts(arg)]
    return [condition]


def _both(a: Value, b: Value) -> Value:
    return Call("and", (a, b), torch.bool)


def _computed(call: Call) -> Value:
    # On the CPU in the constant's own dtype: float32 arithmetic rounds as it would in the kernel's registers.
    args = [torch.tensor(arg.value, dtype=arg.dtype) for arg in call.args if isinstance(arg, Const)]
    return Const(OPS[call.op].eager(*args).to(call.dtype).item(), call.dtype)


def _converted(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else Call("to", (value,), dtype)


def _part_of_single_term(reduce: Reduce, part: ReductionResult) -> Value:
    """A result of a reduction with several results, over a single element."""
    value = reduce.args[0]
    if reduce.kind in ("argmax", "argmin"):
        return _converted(reduce.args[part.at], part.dtype)
    zero = Call("sub", (value, value), value.dtype)  # NaN where the value is infinite, as the definition has it
    if reduce.kind == "welford":
        return (value, zero, Const(1.0, part.dtype))[part.at]
    return (value, Call("exp", (zero,), value.dtype))[part.at]


def _scalars(nest: Nest) -> list[Scalar]:
    """The scalar arguments of a nest: what its sizes, strides and offsets are made of, and its Scalars."""
    found: dict[Scalar, None] = {}

    def add(*expressions: Int) -> None:
        for expression in expressions:
            if isinstance(expression, sympy.Expr):
                # Sets have no fixed order, and the text must be the same on every rank.
                for part in sorted(set(_host_parts(expression)), key=str):
                    found.setdefault(Scalar(part, torch.int64))

    # Sizes first, then what stores and values need: again an order that the nest alone decides.
    add(*nest.sizes)
    for store in nest.stores:
        add(*store.index.numbers)
    for value in nest.values():
        if isinstance(value, Load):
            add(*value.index.numbers)
        elif isinstance(value, Scalar):
            found.setdefault(value)
    return list(found)


def _host_parts(expression: Any) -> list[Any]:
    """The largest parts of a whole number, a sympy expression, that a kernel takes as arguments, computed on the host.

    Kernels add, multiply and divide symbols. Symbols of a kernel are taken to be at least 0, which holds for sizes, and
    decides how quotients round. Roundings of fractions, minima and the like are computed on the host: Triton
    has no functions for them, and a result of theirs may be negative, so no quotient is taken of it in a kernel.
    """
    # A constant is part of the text.
    if expression.is_Integer:
        return []
    parts = [part for arg in expression.args for part in _host_parts(arg)]
    power = expression.is_Pow and expression.args[1].is_Integer and expression.args[1] > 0
    if (expression.is_Add or expression.is_Mul or power) and all(arg.is_integer for arg in expression.args):
        return parts
    # Only of symbols as they are. A quotient of something that the host computes could meet a negative number.
    if isinstance(expression, _QUOTIENTS) and all(part.is_Symbol for part in parts):
        return parts
    return [expression]


def _with_symbols(nest: Nest, symbols: dict[Scalar, sympy.Symbol]) -> Nest:
    """The nest with symbols in the place of its scalars."""
    if not symbols:
        return nest
    # Sizes and strides are written in integer symbols. Other scalars are arguments of the kernel only.
    new_symbol = {
        scalar.expression: new
        for scalar, new in symbols.items()
        if scalar.dtype == torch.int64 and _host_parts(scalar.expression) == [scalar.expression]
    }

    def size(value: Int) -> Int:
        # `xreplace`, not `subs`: whole subexpressions that the host computes are replaced without being simplified
        # first.
        return value.xreplace(new_symbol) if isinstance(value, sympy.Expr) else value

    def index(old: Index) -> Index:
        strides = [(axis, size(stride)) for axis, stride in old.strides]
        return Index(strides, size(old.offset), [(value, size(stride)) for value, stride in old.indirect])

    def change(value: Value) -> Value:
        if isinstance(value, Load):
            return Load(value.buffer, index(value.index), value.dtype, value.mask, value.other)
        return Scalar(symbols[value], value.dtype) if isinstance(value, Scalar) else value

    stores = tuple(replace(store, index=index(store.index)) for store in rewrite_stores(nest.stores, change))
    return Nest(tuple(size(n) for n in nest.sizes), stores)
