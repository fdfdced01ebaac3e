"""The loop IR: what lowering produces, fusion joins and code generation prints.

A :class:`Nest` is a perfect loop nest over ``sizes`` that stores values. A value is a tree of data nodes (loads,
constants, operations, reductions). Nodes are interned: equal trees are one object, so hashing and comparing them costs
nothing, and a layer that is repeated thirty-two times gives one kernel.

Axis ``k`` of a nest runs over ``range(sizes[k])``. An :class:`Index` is affine in the axes and in integer values. A
view of a tensor is therefore only another index, and gathers and scatters need nothing more. Sizes, strides and offsets
are ints, or sympy expressions where the captured step kept a size symbolic.

Registers hold float32 for every half-precision type: ``Load.dtype`` is the dtype in the register, the buffer knows its
own. :mod:`weft.inductor.loop_ir.verify` is the grammar of this IR as code.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import sympy
import torch

from weft.inductor.graph.serializable import serializable

if TYPE_CHECKING:
    Int = Any  # sympy does not say what its operators do with ints
else:
    Int = int | sympy.Expr

# Arithmetic in a narrower type than float32 would round after every operation of a fused chain; PyTorch's own CUDA
# kernels compute halves in float32 (`opmath_t`) as well. float64 stays float64: eager computes in it.
_HALVES = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})


def register_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type a value of ``dtype`` has between its load and its store."""
    return torch.float32 if dtype in _HALVES else dtype


# Names are the identity of memory in the whole back end: operations conflict, fuse and order by them. Two nests that
# store to one name store disjoint elements of it (a concatenation), see `lowering/verify.py`.
@serializable
@dataclass(frozen=True)
class Buffer:
    """A tensor that nests read and write: the whole of one operation's result, or an input of the step.

    Attributes:
        name: the node's name; ``name.1`` for result 1 of an operation with several, ``name.<suffix>`` for a temporary.
        dtype: of an element in memory.
        sizes, strides: in elements, as the fake tensor has them.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[Int, ...]
    strides: tuple[Int, ...]


_FEWEST_SWEPT = 1 << 15  # entries of the table of nodes


# Hash-consing (Ershov, 1958). Common subexpressions need no pass: building a value twice gives the first object. All
# the rest of the compiler may therefore compare values by `is` and keep them as keys of dictionaries and sets.
class _Interned(type):
    """Makes equal nodes the same object."""

    # Weak values: a step's nodes go with the step, and a long session does not accumulate them. Entries of nodes that
    # are gone go at the next sweep; a WeakValueDictionary, which calls Python for each, takes four times as long.
    # One table for all classes: the first word of a key tells the kinds of node apart.
    _all: ClassVar[dict[Any, ref[Any]]] = {}
    _sweeps_at: ClassVar[int] = _FEWEST_SWEPT
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # Operands are interned already, so the key holds them by identity, and no tree is walked.
        # The node is built before the table is asked: its key needs its attributes, and a duplicate is dropped at
        # once.
        node = super().__call__(*args, **kwargs)
        key = node.key()
        entry = _Interned._all.get(key)
        known = None if entry is None else entry()
        return _added(key, node) if known is None else known


def _added(key: Any, node: Any) -> Any:
    """The node of a key, which is ``node`` unless another thread was faster."""
    with _Interned._lock:
        entry = _Interned._all.get(key)
        known = None if entry is None else entry()
        if known is not None:
            return known
        _Interned._all[key] = ref(node)
        if len(_Interned._all) >= _Interned._sweeps_at:
            _sweep()
    return node


def _sweep() -> None:
    """Drop the entries of nodes that are gone."""
    table = _Interned._all
    keys = list(table)
    # A key holds its node's operands, which are in the table before it. So from the last to the first, and each key is
    # let go before those of its operands are looked at.
    while keys:
        key = keys.pop()
        if table[key]() is None:
            del table[key]
    _Interned._sweeps_at = max(_FEWEST_SWEPT, 2 * len(table))


class Value(metaclass=_Interned):
    """A number computed at each point of a loop nest, of register type ``dtype``."""

    # No `__eq__` and no `__hash__` of their own: identity is equality once nodes are interned. A subclass that
    # defined them would make every set of values walk trees.
    __slots__ = ("__weakref__", "axes", "dtype")
    dtype: torch.dtype
    # Computed when a node is made, from those of its operands: fusion and code generation ask for it at every
    # decision (what can leave a loop, what is a scalar, who has to store).
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


_axis = operator.itemgetter(0)


class Index:
    """A position in a buffer, in elements: ``offset + sum(stride * axis) + sum(stride * value)``.

    Attributes:
        strides: (axis, stride) pairs, by axis, no stride zero.
        offset: elements from the buffer's start.
        indirect: (integer value, stride) pairs: indirect indexing, by values that the data or other arithmetic decides.
    """

    __slots__ = ("_hash", "indirect", "offset", "strides")

    def __init__(
        self,
        strides: Iterable[tuple[int, Int]] = (),
        offset: Int = 0,
        indirect: Iterable[tuple[Value, Int]] = (),
    ) -> None:
        # In one order and without zeros: equal positions must be equal keys.
        # A stride that is symbolic and happens to be zero at run time stays: it is not known here, and is harmless.
        kept = [pair for pair in strides if pair[1] != 0]
        if len(kept) > 1:
            kept.sort(key=_axis)
        self.strides = tuple(kept)
        self.offset = offset
        # Not sorted: `Load.operands` and `with_operands` pair values with strides by their place in this tuple.
        self.indirect = tuple(indirect)
        # Computed once: indices are keys of the table of interned nodes, and are hashed at each construction.
        self._hash = hash((self.strides, offset, self.indirect))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Index):
            return NotImplemented
        return (self.strides, self.offset, self.indirect) == (other.strides, other.offset, other.indirect)

    def __hash__(self) -> int:
        return self._hash

    @property
    def axes(self) -> frozenset[int]:
        """The axes that it changes along, through strides or indirect values."""
        own = frozenset([axis for axis, _ in self.strides])
        return own.union(*[value.axes for value, _ in self.indirect]) if self.indirect else own

    @property
    def numbers(self) -> tuple[Int, ...]:
        """The offset and all strides, those of indirect values last."""
        return self.offset, *(stride for _, stride in self.strides), *(stride for _, stride in self.indirect)

    def stride(self, axis: int) -> Int:
        """The stride along an axis, 0 where it does not change along it."""
        return next((stride for a, stride in self.strides if a == axis), 0)

    def __str__(self) -> str:
        terms = [f"{_times(stride)}d{axis}" for axis, stride in self.strides]
        terms += [f"{_times(stride)}{value}" for value, stride in self.indirect]
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
        """See :meth:`Value.key`."""
        # 0.0 == -0.0 and nan != nan: text tells the constants of floats apart as their bits do.
        other = repr(float(self.other)) if self.dtype.is_floating_point else self.other
        return "load", self.buffer, self.index, self.dtype, self.mask, other

    def operands(self) -> tuple[Value, ...]:
        """The indirect indices, then the mask if there is one."""
        picked = tuple(value for value, _ in self.index.indirect)
        return picked if self.mask is None else (*picked, self.mask)

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        """See :meth:`Value.with_operands`."""
        indirect = [(value, stride) for value, (_, stride) in zip(operands, self.index.indirect, strict=False)]
        mask = None if self.mask is None else operands[-1]
        index = Index(self.index.strides, self.index.offset, indirect)
        return Load(self.buffer, index, self.dtype, mask, self.other)

    def __str__(self) -> str:
        condition = "" if self.mask is None else f" if {self.mask} else {self.other}"
        return f"{self.buffer}[{self.index}]{condition}"


# A buffer that does not exist: its element ``k`` is ``k``. Integers that are affine in the axes become loads of it.
# A load, not a Position, because substitution, merging of axes and splitting of loops already know how to rewrite an
# index, and the code generator prints one term for each run of axes instead of one for each axis.
POSITIONS = "positions"


def is_position(value: Value) -> bool:
    """Whether a value is an element of :data:`POSITIONS`."""
    return isinstance(value, Load) and value.buffer == POSITIONS


class Const(Value):
    """A number known when the step is compiled."""

    __slots__ = ("value",)

    def __init__(self, value: bool | int | float, dtype: torch.dtype) -> None:
        self.value, self.dtype, self.axes = value, dtype, frozenset()

    def key(self) -> tuple[Any, ...]:
        """See :meth:`Value.key`."""
        return "const", repr(self.value), self.dtype  # repr tells -0.0 from 0.0, True from 1, and nan is itself

    def __str__(self) -> str:
        return repr(self.value)


@serializable
class Scalar(Value):
    """A number known when the step is called: a number input of the step, or a symbolic size; ``expression`` over
    the names of the graph's symbols and number inputs."""

    __slots__ = ("expression",)

    def __init__(self, expression: sympy.Expr, dtype: torch.dtype) -> None:
        # Equal along all axes: a kernel gets it as an argument. What the host computes of it is decided by
        # `codegen/canonical.py`.
        self.expression, self.dtype, self.axes = expression, dtype, frozenset()

    def key(self) -> tuple[Any, ...]:
        """See :meth:`Value.key`."""
        return "scalar", self.expression, self.dtype

    def __str__(self) -> str:
        return str(self.expression)


class Position(Value):
    """Where the loop is along one axis, as an integer (int64)."""

    __slots__ = ("axis",)

    def __init__(self, axis: int) -> None:
        # Always int64, as torch's own index tensors are; `value_ranges` shows later where 32 bits are enough.
        self.axis, self.dtype, self.axes = axis, torch.int64, frozenset({axis})

    def key(self) -> tuple[Any, ...]:
        """See :meth:`Value.key`."""
        return "position", self.axis

    def __str__(self) -> str:
        return f"d{self.axis}"


class Call(Value):
    """A pointwise operation (a name of :data:`weft.inductor.loop_ir.ops.OPS`) on values of one loop point."""

    __slots__ = ("args", "op")

    def __init__(self, op: str, args: tuple[Value, ...], dtype: torch.dtype) -> None:
        self.op, self.args, self.dtype = op, args, dtype
        self.axes = args[0].axes if len(args) == 1 else frozenset().union(*[arg.axes for arg in args])

    def key(self) -> tuple[Any, ...]:
        """See :meth:`Value.key`."""
        return "call", self.op, self.args, self.dtype

    def operands(self) -> tuple[Value, ...]:
        """The arguments of the operation."""
        return self.args

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        """See :meth:`Value.with_operands`."""
        return Call(self.op, operands, self.dtype)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


class Reduce(Value):
    """A reduction of values along ``over``; ``kind`` is a name of :data:`weft.inductor.loop_ir.ops.REDUCTIONS`.

    Kinds with several results (``welford``: mean, sum of squared deviations, count; ``argmax``: value, position) are
    read through :class:`ReductionResult`; a Reduce of such a kind has the type of its first result.
    """

    __slots__ = ("args", "kind", "over")

    def __init__(self, kind: str, args: tuple[Value, ...], over: Iterable[int], dtype: torch.dtype) -> None:
        self.kind, self.args, self.over, self.dtype = kind, args, tuple(sorted(over)), dtype
        # The result is the same at all points of the reduced axes, and other values may use it there (`x - max(x)`):
        # one nest holds a softmax. `over` may name axes that no argument changes along: each point counts (a sum of
        # ones).
        self.axes = frozenset().union(*(arg.axes for arg in args)) - frozenset(self.over)

    def key(self) -> tuple[Any, ...]:
        """See :meth:`Value.key`."""
        return "reduce", self.kind, self.args, self.over, self.dtype

    def operands(self) -> tuple[Value, ...]:
        """The values that are reduced."""
        return self.args

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        """See :meth:`Value.with_operands`."""
        return Reduce(self.kind, operands, self.over, self.dtype)

    def __str__(self) -> str:
        over = ", ".join(f"d{axis}" for axis in self.over)
        return f"{self.kind}[{over}]({', '.join(map(str, self.args))})"


class ReductionResult(Value):
    """Result number ``at`` of a reduction that has several results."""

    __slots__ = ("at", "reduce")

    def __init__(self, reduce: Value, at: int, dtype: torch.dtype) -> None:
        self.reduce, self.at, self.dtype, self.axes = reduce, at, dtype, reduce.axes

    def key(self) -> tuple[Any, ...]:
        """See :meth:`Value.key`."""
        return "part", self.reduce, self.at, self.dtype

    def operands(self) -> tuple[Value, ...]:
        """The reduction that it is a result of."""
        return (self.reduce,)

    def with_operands(self, operands: tuple[Value, ...]) -> Value:
        """See :meth:`Value.with_operands`."""
        return ReductionResult(operands[0], self.at, self.dtype)

    def __str__(self) -> str:
        return f"{self.reduce}.{self.at}"


@dataclass(frozen=True)
class Store:
    """``buffer[index] = value`` at every point of the axes that the index or the value change along, where ``mask``
    holds."""

    buffer: str
    index: Index
    value: Value
    mask: Value | None = None

    @property
    def axes(self) -> frozenset[int]:
        """The axes whose points store: those of the index, the value and the mask."""
        mask = self.mask.axes if self.mask is not None else frozenset()
        return self.index.axes | self.value.axes | mask

    def values(self) -> Iterator[Value]:
        """The values at the roots: what is stored, picked positions and the mask."""
        yield self.value
        for value, _ in self.index.indirect:
            yield value
        if self.mask is not None:
            yield self.mask

    def __str__(self) -> str:
        condition = "" if self.mask is None else f" if {self.mask}"
        return f"{self.buffer}[{self.index}] = {self.value}{condition}"


# Stores are in order only for one point: a later one may read what an earlier one stored there. Points run in no
# order, as the programs of a grid do; `loop_ir/verify.py` forbids what would depend on one.
@dataclass(frozen=True)
class Nest:
    """A loop over ``sizes`` with its stores. Prints as text; equal nests are equal and hash alike."""

    sizes: tuple[Int, ...]
    stores: tuple[Store, ...]

    def __hash__(self) -> int:
        # Kept: nests are the keys of what is concluded from them once (`numbering.py`).
        found = vars(self).get("_hash")
        if found is None:
            found = vars(self)["_hash"] = hash((self.sizes, self.stores))
        return found

    # Kept, since a nest never changes: fusion and code generation walk it at every question that they ask of it. Not by
    # `cached_property`, which takes a lock before Python 3.12.
    @property
    def reads(self) -> list[Load]:
        """Every load, once, operands first."""
        found = vars(self).get("_reads")
        if found is None:
            found = vars(self)["_reads"] = [value for value in self.values() if isinstance(value, Load)]
        return found

    @property
    def reduces(self) -> list[Reduce]:
        """Every reduction, once, operands first."""
        return [value for value in self.values() if isinstance(value, Reduce)]

    @property
    def writes(self) -> list[str]:
        """Buffers written, in order, each once."""
        return list(dict.fromkeys(store.buffer for store in self.stores))

    def values(self) -> list[Value]:
        """Every value, once, operands before what uses them."""
        found = vars(self).get("_values")
        if found is None:
            found = vars(self)["_values"] = ordered(value for store in self.stores for value in store.values())
        return found

    def __str__(self) -> str:
        loop = ", ".join(f"d{axis} < {size}" for axis, size in enumerate(self.sizes))
        return "\n".join([f"for {loop or 'one point'}:", *(f"    {store}" for store in self.stores)])


def ordered(roots: Iterable[Value]) -> list[Value]:
    """The values that ``roots`` are made of, once each, operands before what uses them."""
    # An explicit stack: chains of values can be deeper than Python's recursion limit.
    done: dict[Value, None] = {}
    stack = list(roots)[::-1]
    while stack:
        value = stack[-1]
        # A value may wait on the stack more than once, under several users: only its first place counts.
        if value not in done:
            waiting = [operand for operand in value.operands() if operand not in done]
            if waiting:
                stack += waiting[::-1]
                continue
            done[value] = None
        stack.pop()
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
        replaced = tuple([new[operand] for operand in operands])
        # An unchanged node is kept, not rebuilt: `change` may then recognise it by identity.
        new[value] = change(value if replaced == operands else value.with_operands(replaced))
    return new


def rewrite_stores(stores: Iterable[Store], change: Any) -> list[Store]:
    """The stores with their values rewritten, see :func:`rewrite`."""
    stores = list(stores)
    new = rewrite([root for store in stores for root in store.values()], change)
    return [map_values(store, new) for store in stores]


def map_values(store: Store, new: dict[Value, Value], index: Index | None = None) -> Store:
    """The store with its values replaced by ``new``, at ``index`` where that is given."""
    index = store.index if index is None else index
    indirect = [(new[value], stride) for value, stride in store.index.indirect]
    mask = None if store.mask is None else new[store.mask]
    return Store(store.buffer, Index(index.strides, index.offset, indirect), new[store.value], mask)
