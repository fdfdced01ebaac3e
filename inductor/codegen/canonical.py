"""One form for all nests that are the same loop over different tensors.

Buffers and symbols become ``b0``, ``b1``, ... and ``s0``, ``s1``, ... in the order in which they occur, axes that say
nothing are gone, operations on constants are done. So the layers of a network give one kernel, and its text has no
trace of the graph that it came from.

Whole numbers that are affine in the axes become elements of :data:`POSITIONS`, a buffer that does not exist: its
element ``k`` is ``k``. So they are simplified and printed as the indices that they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from weft.inductor import axes
from weft.inductor.ir import (
    Call,
    Const,
    Index,
    Int,
    Load,
    Nest,
    Part,
    Position,
    Reduce,
    Scalar,
    Store,
    Value,
    map_values,
    rewrite,
)
from weft.inductor.ops import OPS

POSITIONS = "positions"


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
    nest = axes.merge(axes.squeeze(_without_idle_axes(simplified(axes.squeeze(nest)))))
    buffers = list(dict.fromkeys([load.buffer for load in nest.reads if not is_position(load)] + nest.writes))
    scalars = _scalars(nest)
    names = {POSITIONS: POSITIONS} | {buffer: f"b{k}" for k, buffer in enumerate(buffers)}
    symbols = {scalar: symbol(k) for k, scalar in enumerate(scalars)}
    return Canonical(_renamed(nest, names, symbols), tuple(buffers), tuple(scalars))


def symbol(k: int) -> sympy.Symbol:
    """The name of number ``k`` in a canonical nest."""
    return sympy.Symbol(f"s{k}", integer=True, nonnegative=True)


def is_position(value: Value) -> bool:
    """Whether a value is an element of :data:`POSITIONS`."""
    return isinstance(value, Load) and value.buffer == POSITIONS


def simplified(nest: Nest) -> Nest:
    """The nest with positions as elements of :data:`POSITIONS`, and without what is known now."""
    roots = [root for store in nest.stores for root in store.values()]
    new = rewrite(roots, lambda value: _simpler(value, nest.sizes))
    stores = [map_values(store, new) for store in nest.stores]
    return Nest(nest.sizes, tuple(replace(store, index=_without_positions(store.index)) for store in stores))


def _without_idle_axes(nest: Nest) -> Nest:
    """The nest with one point along axes that nothing changes along any more."""
    used = frozenset().union(*(store.axes for store in nest.stores), *(reduce.over for reduce in nest.reduces))
    return Nest(tuple(size if axis in used else 1 for axis, size in enumerate(nest.sizes)), nest.stores)


def _simpler(value: Value, sizes: Sequence[Int]) -> Value:
    if isinstance(value, Position):
        return Load(POSITIONS, Index([(value.axis, 1)]), torch.int64)
    if isinstance(value, Load):
        value = Load(value.buffer, _without_positions(value.index), value.dtype, value.mask, value.other)
    if isinstance(value, Call) and value.op not in ("rand", "randn") and all(isinstance(a, Const) for a in value.args):
        return _computed(value)
    if isinstance(value, Call) and value.dtype == torch.int64 and (index := _affine(value)) is not None:
        return Load(POSITIONS, index, torch.int64)
    if isinstance(value, Load) and isinstance(value.mask, Const):
        return Load(value.buffer, value.index, value.dtype) if value.mask.value else _other(value)
    if isinstance(value, Reduce) and not value.over and value.kind in _ONE:
        return _converted(value.args[0], value.dtype)
    if isinstance(value, Reduce) and value.kind == "sum":
        return _sum_of_one(value, sizes)
    if isinstance(value, Part) and isinstance(value.reduce, Reduce) and not value.reduce.over:
        return _part_of_one(value.reduce, value)
    return value


_ONE = frozenset({"sum", "prod", "max", "min", "any", "all"})


def _affine(value: Value) -> Index | None:
    """A whole number as an index, None where it is not affine in the axes."""
    if is_position(value):
        assert isinstance(value, Load)
        return value.index
    if isinstance(value, Const) and not value.dtype.is_floating_point:
        return Index(offset=int(value.value))
    if isinstance(value, Scalar) and value.dtype == torch.int64:
        return Index(offset=value.expression)
    if not isinstance(value, Call) or value.op not in ("add", "sub", "mul"):
        return None
    a, b = (_affine(arg) for arg in value.args)
    if a is None or b is None or not (a.strides or b.strides):
        return None
    if value.op == "add":
        return _plus(a, b)
    if value.op == "sub":
        return _plus(a, _scaled(b, -1))
    return _scaled(a, b.offset) if not b.strides else _scaled(b, a.offset) if not a.strides else None


def _plus(a: Index, b: Index) -> Index:
    strides: dict[int, Any] = dict(a.strides)
    offset: Any = a.offset
    for axis, stride in b.strides:
        strides[axis] = strides.get(axis, 0) + stride
    return Index(strides.items(), offset + b.offset, a.picks)


def _scaled(index: Index, factor: Any) -> Index:
    return Index([(axis, factor * stride) for axis, stride in index.strides], factor * index.offset)


def _without_positions(index: Index) -> Index:
    """The index with what it picks by affine positions among its strides."""
    total = Index(index.strides, index.offset, [pick for pick in index.picks if not is_position(pick[0])])
    for value, stride in index.picks:
        if is_position(value):
            assert isinstance(value, Load)
            total = _plus(total, _scaled(value.index, stride))
    return total


def _sum_of_one(total: Reduce, sizes: Sequence[Int]) -> Value:
    """A sum along one axis with one term that is not zero, at a position that does not change along the axis: that
    term, if the position is there. (The gradient of a loss of classes, summed over the classes.)"""
    term = total.args[0]
    if not (len(total.over) == 1 and isinstance(term, Call) and term.op == "where" and term.dtype == total.dtype):
        return total
    (axis,), (condition, value, zero) = total.over, term.args
    conditions = _conjuncts(condition)
    here = next((c for c in conditions if axis in c.axes), None)
    others = [c for c in conditions if c is not here]
    if not (isinstance(zero, Const) and zero.value == 0 and isinstance(here, Call) and here.op == "eq"):
        return total
    if any(axis in other.axes for other in (value, *others)):
        return total
    along = Load(POSITIONS, Index([(axis, 1)]), torch.int64)
    at = next((arg for arg in here.args if arg is not along), along)
    if along not in here.args or axis in at.axes or at.dtype != torch.int64:
        return total
    others.append(Call("ge", (at, Const(0, torch.int64)), torch.bool))
    others.append(Call("lt", (at, axes.integer(sizes[axis])), torch.bool))
    return Call("where", (functools.reduce(_both, others), value, zero), term.dtype)


def _conjuncts(condition: Value) -> list[Value]:
    if isinstance(condition, Call) and condition.op == "and":
        return [part for arg in condition.args for part in _conjuncts(arg)]
    return [condition]


def _both(a: Value, b: Value) -> Value:
    return Call("and", (a, b), torch.bool)


def _other(load: Load) -> Value:
    cast = bool if load.dtype == torch.bool else float if load.dtype.is_floating_point else int
    return Const(cast(load.other), load.dtype)


def _computed(call: Call) -> Value:
    args = [torch.tensor(arg.value, dtype=arg.dtype) for arg in call.args if isinstance(arg, Const)]
    return Const(OPS[call.op].eager(*args).to(call.dtype).item(), call.dtype)


def _converted(value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else Call("to", (value,), dtype)


def _part_of_one(reduce: Reduce, part: Part) -> Value:
    """What a reduction with several results gives for a single element."""
    value = reduce.args[0]
    if reduce.kind in ("argmax", "argmin"):
        return _converted(reduce.args[part.at], part.dtype)
    zero = Call("sub", (value, value), value.dtype)  # NaN where the value is infinite, as the definition has it
    if reduce.kind == "welford":
        return (value, zero, Const(1.0, part.dtype))[part.at]
    return (value, Call("exp", (zero,), value.dtype))[part.at]


def _scalars(nest: Nest) -> list[Scalar]:
    """The numbers a nest needs when it is called: symbols of its sizes, strides and offsets; and its Scalars."""
    found: dict[Scalar, None] = {}

    def add(*expressions: Int) -> None:
        for expression in expressions:
            if isinstance(expression, sympy.Expr):
                for free in sorted(expression.free_symbols, key=str):
                    found.setdefault(Scalar(free, torch.int64))

    add(*nest.sizes)
    for store in nest.stores:
        _add_index(add, store.index)
    for value in nest.values():
        if isinstance(value, Load):
            _add_index(add, value.index)
        elif isinstance(value, Scalar):
            found.setdefault(value)
    return list(found)


def _add_index(add: Callable[..., None], index: Index) -> None:
    add(index.offset, *(stride for _, stride in index.strides), *(stride for _, stride in index.picks))


def _renamed(nest: Nest, names: dict[str, str], symbols: dict[Scalar, sympy.Symbol]) -> Nest:
    new_symbol = {
        scalar.expression: new
        for scalar, new in symbols.items()
        if scalar.dtype == torch.int64 and scalar.expression.is_Symbol
    }

    def size(value: Int) -> Int:
        return value.xreplace(new_symbol) if isinstance(value, sympy.Expr) else value

    def index(old: Index) -> Index:
        strides = [(axis, size(stride)) for axis, stride in old.strides]
        return Index(strides, size(old.offset), [(value, size(stride)) for value, stride in old.picks])

    def change(value: Value) -> Value:
        if isinstance(value, Load):
            return Load(names[value.buffer], index(value.index), value.dtype, value.mask, value.other)
        if isinstance(value, Scalar):
            return Scalar(symbols[value], value.dtype)
        return value

    new = rewrite([root for store in nest.stores for root in store.values()], change)
    stores = []
    for store in nest.stores:
        moved = map_values(store, new)
        stores.append(Store(names[store.buffer], index(moved.index), moved.value, moved.mask, store.mode))
    return Nest(tuple(size(n) for n in nest.sizes), tuple(stores))
