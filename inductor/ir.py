"""Loop nests: what lowering makes, fusion joins and code generation prints.

A :class:`Nest` is a perfect loop over ``sizes`` that stores values. A value is a tree of data nodes (loads, constants,
operations, reductions), interned, so that equal trees are one object: hashing and comparing them is free, and a layer
that is repeated thirty-two times gives one kernel.

Axes are positions: axis ``k`` of a nest runs over ``range(sizes[k])``. An :class:`Index` is affine in the axes and in
integer values, so that every view is only an index, and gathers and scatters need nothing more. Sizes, strides and
offsets are ints, or sympy expressions where the captured step kept a size symbolic.

Registers hold float32 for every half-precision type: ``Load.dtype`` is the register's type, the buffer knows its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import sympy
import torch

from weft.errors import MalformedNest

if TYPE_CHECKING:
    Int = Any  # sympy does not say what its operators do with ints
else:
    Int = int | sympy.Expr

_HALVES = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})


def register_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type a value of ``dtype`` has between its load and its store."""
    return torch.float32 if dtype in _HALVES else dtype


class _Interned(type):
    """Makes equal nodes the same object."""

    _all: ClassVar[WeakValueDictionary[Any, Any]] = WeakValueDictionary()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        node = super().__call__(*args, **kwargs)
        return _Interned._all.setdefault(node.key(), node)


class Value(metaclass=_Interned):
    """A number computed at each point of a loop nest, of register type ``dtype``."""

    __slots__ = ("__weakref__", "axes", "dtype")
    dtype: torch.dtype
    axes: frozenset[int]  # the axes it changes along

    def key(self) -> tuple[Any, ...]:
        """Everything that tells this node from others."""
        raise NotImplementedError

    def operands(self) -> tuple[Value, ...]:
        """The values it is computed from."""
        return ()

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        """The same node over other operands (as many as :meth:`operands` gives)."""
        return self


class Index:
    """A position in a buffer, in elements: ``offset + sum(stride * axis) + sum(stride * value)``.

    Attributes:
        strides: (axis, stride) pairs, by axis, no stride zero.
        offset: elements from the buffer's start.
        picks: (integer value, stride) pairs: positions that the data or other arithmetic decides.
    """

    __slots__ = ("_hash", "offset", "picks", "strides")

    def __init__(
        self,
        strides: Iterable[tuple[int, Int]] = (),
        offset: Int = 0,
        picks: Iterable[tuple[Value, Int]] = (),
    ) -> None:
        self.strides = tuple(sorted(((a, s) for a, s in strides if s != 0), key=lambda pair: pair[0]))
        self.offset = offset
        self.picks = tuple(picks)
        self._hash = hash((self.strides, offset, self.picks))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Index):
            return NotImplemented
        return (self.strides, self.offset, self.picks) == (other.strides, other.offset, other.picks)

    def __hash__(self) -> int:
        return self._hash

    @property
    def axes(self) -> frozenset[int]:
        picked = [value.axes for value, _ in self.picks]
        return frozenset(axis for axis, _ in self.strides).union(*picked)

    def stride(self, axis: int) -> Int:
        return next((stride for a, stride in self.strides if a == axis), 0)

    def __str__(self) -> str:
        terms = [f"{_times(stride)}d{axis}" for axis, stride in self.strides]
        terms += [f"{_times(stride)}{value}" for value, stride in self.picks]
        if self.offset != 0 or not terms:
            terms.append(str(self.offset))
        return " + ".join(terms)

    __repr__ = __str__


def _times(stride: Int) -> str:
    return "" if stride == 1 else f"{stride}*"


class Load(Value):
    """An element of a buffer; ``other`` where ``mask`` is false (nothing is read there)."""

    __slots__ = ("buffer", "index", "mask", "other")

    def __init__(
        self, buffer: str, index: Index, dtype: torch.dtype, mask: Value | None = None, other: float = 0
    ) -> None:
        self.buffer, self.index, self.dtype, self.mask, self.other = buffer, index, dtype, mask, other
        self.axes = index.axes | (mask.axes if mask is not None else frozenset())

    def key(self) -> tuple[Any, ...]:
        return "load", self.buffer, self.index, self.dtype, self.mask, self.other

    def operands(self) -> tuple[Value, ...]:
        picked = tuple(value for value, _ in self.index.picks)
        return picked if self.mask is None else (*picked, self.mask)

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        picks = [(value, stride) for value, (_, stride) in zip(operands, self.index.picks, strict=False)]
        mask = None if self.mask is None else operands[-1]
        index = Index(self.index.strides, self.index.offset, picks)
        return Load(self.buffer, index, self.dtype, mask, self.other)

    def __str__(self) -> str:
        condition = "" if self.mask is None else f" if {self.mask} else {self.other}"
        return f"{self.buffer}[{self.index}]{condition}"


class Const(Value):
    """A number known when the step is compiled."""

    __slots__ = ("value",)

    def __init__(self, value: bool | int | float, dtype: torch.dtype) -> None:
        self.value, self.dtype, self.axes = value, dtype, frozenset()

    def key(self) -> tuple[Any, ...]:
        return "const", repr(self.value), self.dtype  # repr tells -0.0 from 0.0, True from 1, and nan is itself

    def __str__(self) -> str:
        return repr(self.value)


class Scalar(Value):
    """A number known when the step is called: a number input of the step, or a symbolic size; ``expression`` over
    the names of the graph's symbols and number inputs."""

    __slots__ = ("expression",)

    def __init__(self, expression: sympy.Expr, dtype: torch.dtype) -> None:
        self.expression, self.dtype, self.axes = expression, dtype, frozenset()

    def key(self) -> tuple[Any, ...]:
        return "scalar", self.expression, self.dtype

    def __str__(self) -> str:
        return str(self.expression)


class Position(Value):
    """Where the loop is along one axis, as an integer (int64)."""

    __slots__ = ("axis",)

    def __init__(self, axis: int) -> None:
        self.axis, self.dtype, self.axes = axis, torch.int64, frozenset({axis})

    def key(self) -> tuple[Any, ...]:
        return "position", self.axis

    def __str__(self) -> str:
        return f"d{self.axis}"


class Call(Value):
    """A pointwise operation (a name of :data:`weft.inductor.ops.OPS`) on values of one loop point."""

    __slots__ = ("args", "op")

    def __init__(self, op: str, args: tuple[Value, ...], dtype: torch.dtype) -> None:
        self.op, self.args, self.dtype = op, args, dtype
        self.axes = frozenset().union(*(arg.axes for arg in args))

    def key(self) -> tuple[Any, ...]:
        return "call", self.op, self.args, self.dtype

    def operands(self) -> tuple[Value, ...]:
        return self.args

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        return Call(self.op, operands, self.dtype)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


class Reduce(Value):
    """A reduction of values along ``over``; ``kind`` is a name of :data:`weft.inductor.ops.REDUCTIONS`.

    Kinds with several results (``welford``: mean, sum of squared deviations, count; ``argmax``: value, position) are
    read through :class:`Part`; a Reduce of such a kind has the type of its first result.
    """

    __slots__ = ("args", "kind", "over")

    def __init__(self, kind: str, args: tuple[Value, ...], over: Iterable[int], dtype: torch.dtype) -> None:
        self.kind, self.args, self.over, self.dtype = kind, args, tuple(sorted(over)), dtype
        self.axes = frozenset().union(*(arg.axes for arg in args)) - frozenset(self.over)

    def key(self) -> tuple[Any, ...]:
        return "reduce", self.kind, self.args, self.over, self.dtype

    def operands(self) -> tuple[Value, ...]:
        return self.args

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        return Reduce(self.kind, operands, self.over, self.dtype)

    def __str__(self) -> str:
        over = ", ".join(f"d{axis}" for axis in self.over)
        return f"{self.kind}[{over}]({', '.join(map(str, self.args))})"


class Part(Value):
    """Result number ``at`` of a reduction with several."""

    __slots__ = ("at", "reduce")

    def __init__(self, reduce: Value, at: int, dtype: torch.dtype) -> None:
        self.reduce, self.at, self.dtype, self.axes = reduce, at, dtype, reduce.axes

    def key(self) -> tuple[Any, ...]:
        return "part", self.reduce, self.at, self.dtype

    def operands(self) -> tuple[Value, ...]:
        return (self.reduce,)

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        return Part(operands[0], self.at, self.dtype)

    def __str__(self) -> str:
        return f"{self.reduce}.{self.at}"


@dataclass(frozen=True)
class Store:
    """``buffer[index] = value`` (or ``+=`` with ``mode="add"``, in no order) at every point of the axes that the index
    or the value change along, where ``mask`` holds."""

    buffer: str
    index: Index
    value: Value
    mask: Value | None = None
    mode: str = "set"

    @property
    def axes(self) -> frozenset[int]:
        mask = self.mask.axes if self.mask is not None else frozenset()
        return self.index.axes | self.value.axes | mask

    def values(self) -> Iterator[Value]:
        """The values at the roots: what is stored, picked positions and the mask."""
        yield self.value
        for value, _ in self.index.picks:
            yield value
        if self.mask is not None:
            yield self.mask

    def __str__(self) -> str:
        sign = {"set": "=", "add": "+="}[self.mode]
        condition = "" if self.mask is None else f" if {self.mask}"
        return f"{self.buffer}[{self.index}] {sign} {self.value}{condition}"


@dataclass(frozen=True)
class Nest:
    """A loop over ``sizes`` with its stores. Prints as text; equal nests are equal and hash alike."""

    sizes: tuple[Int, ...]
    stores: tuple[Store, ...]

    @functools.cached_property
    def reads(self) -> list[Load]:
        """Every load, once, operands first."""
        return [value for value in self.values() if isinstance(value, Load)]

    @property
    def reduces(self) -> list[Reduce]:
        return [value for value in self.values() if isinstance(value, Reduce)]

    @property
    def writes(self) -> list[str]:
        """Buffers written, in order, each once."""
        return list(dict.fromkeys(store.buffer for store in self.stores))

    def values(self) -> list[Value]:
        """Every value, once, operands before what uses them."""
        return self._values

    @functools.cached_property
    def _values(self) -> list[Value]:
        return ordered(value for store in self.stores for value in store.values())

    def check(self) -> Nest:
        """Verify the grammar of a nest and return it.

        Raises:
            MalformedNest: an axis that the nest lacks, a reduction along an axis its argument does not change along
                because it was reduced before, an unknown operation, a store of a buffer that the nest also reads
                at another place.
        """
        _check(self)
        return self

    def __str__(self) -> str:
        loop = ", ".join(f"d{axis} < {size}" for axis, size in enumerate(self.sizes))
        return "\n".join([f"for {loop or 'one point'}:", *(f"    {store}" for store in self.stores)])


def ordered(roots: Iterable[Value]) -> list[Value]:
    """The values that ``roots`` are made of, once each, operands before what uses them."""
    done: dict[Value, None] = {}
    stack = list(roots)[::-1]
    while stack:
        value = stack[-1]
        waiting = [operand for operand in value.operands() if operand not in done]
        if waiting and value not in done:
            stack += waiting[::-1]
            continue
        stack.pop()
        done.setdefault(value)
    return list(done)


def rewrite(roots: Iterable[Value], change: Any) -> dict[Value, Value]:
    """Rebuild the values under ``roots`` from the leaves up.

    Args:
        change: called with each value after its operands were replaced; returns what stands in its place.

    Returns:
        The new value of every value.
    """
    new: dict[Value, Value] = {}
    for value in ordered(roots):
        operands = value.operands()
        replaced = tuple(new[operand] for operand in operands)
        new[value] = change(value if replaced == operands else value.with_operands(replaced))
    return new


def map_values(store: Store, new: dict[Value, Value], index: Index | None = None) -> Store:
    """The store with its values replaced by ``new``, at ``index`` where that is given."""
    index = store.index if index is None else index
    picks = [(new[value], stride) for value, stride in store.index.picks]
    mask = None if store.mask is None else new[store.mask]
    return Store(store.buffer, Index(index.strides, index.offset, picks), new[store.value], mask, store.mode)


def _check(nest: Nest) -> None:
    from weft.inductor.ops import OPS, REDUCTIONS

    known = frozenset(range(len(nest.sizes)))
    for store in nest.stores:
        if not store.axes <= known:
            raise MalformedNest(f"axes {sorted(store.axes - known)} do not exist", str(nest))
        if store.mode not in ("set", "add"):
            raise MalformedNest(f"a store has no mode {store.mode!r}", str(nest))
    for value in nest.values():
        if isinstance(value, Call) and (value.op not in OPS or len(value.args) != OPS[value.op].arity):
            raise MalformedNest(f"{value.op} of {len(value.args)} values is no operation", str(nest))
        if isinstance(value, Reduce):
            if value.kind not in REDUCTIONS or len(value.args) != REDUCTIONS[value.kind].arity:
                raise MalformedNest(f"{value.kind} of {len(value.args)} values is no reduction", str(nest))
            if not set(value.over) <= known:
                raise MalformedNest(f"{value} runs over an axis that does not exist", str(nest))
        if value.dtype in _HALVES:
            raise MalformedNest(f"{value} is kept in a register as {value.dtype}", str(nest))
