"""The grammar of loop nests, as code: what every nest that one stage hands to the next must satisfy.

:func:`verify_nest` checks a nest by itself and against the buffers that it reads and writes; the order of nests and the
coverage of results over a whole step are :mod:`weft.inductor.lowering.verify`'s. A fault is a fault of weft's own: the
error shows the nest, one value a line, with the faulty one marked, and the user's line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

import sympy
import torch

from weft.errors import MalformedNest
from weft.inductor.loop_ir.bounds import fault
from weft.inductor.loop_ir.ir import (
    POSITIONS,
    Buffer,
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
    Store,
    Value,
    register_dtype,
)
from weft.inductor.loop_ir.ops import OPS, REDUCTIONS, Signature


def verify_nest(
    nest: Nest,
    buffers: Mapping[str, Buffer],
    *,
    stage: str = "",
    origin: str = "",
    symbols: Collection[sympy.Symbol] | None = None,
) -> None:
    """Check a nest against the grammar of the loop IR.

    Args:
        buffers: every buffer that the nest may read or write, by name.
        stage: of the compiler that made the nest, for the message.
        origin: the user's line and the operations that the nest computes, for the message.
        symbols: the symbols whose values are known when the step is called; None leaves symbols unchecked.

    Raises:
        MalformedNest: an axis, operation or buffer that does not exist; operands of the wrong number or dtype; a load
            or store whose dtype is not its buffer's; an index that leaves its buffer; an axis that is reduced twice; a
            result of several read as one; a mask that is no truth; an element that several points of the loop store, or
            that is stored while other points read it.
    """
    _NestVerifier(nest, buffers, stage, origin, symbols).run()


def points_stored(nest: Nest, store: Store) -> Int:
    """How many elements a store without mask writes, if no element is written twice."""
    # Axes that the index does not change along store again to the same elements, so they add none.
    return math.prod(nest.sizes[axis] for axis in store.index.axes)


class _NestVerifier:
    def __init__(
        self,
        nest: Nest,
        buffers: Mapping[str, Buffer],
        stage: str,
        origin: str,
        symbols: Collection[sympy.Symbol] | None,
    ) -> None:
        self.nest, self.buffers, self.symbols = nest, buffers, symbols
        self.stage, self.origin = stage, origin
        self.axes = frozenset(range(len(nest.sizes)))

    def run(self) -> None:
        self._sizes()
        # Values come operands first, so the first fault found is the innermost, and later checks may rely on it.
        stored = {store.buffer: store for store in self.nest.stores}
        for value in self.nest.values():
            self._value(value, stored)
        self._reductions()
        for store in self.nest.stores:
            self._store(store)
        for one, other in itertools.combinations(self.nest.stores, 2):
            self._disjoint(one, other)

    def fail(self, what: str, at: Value | Store | None = None) -> NoReturn:
        raise MalformedNest(what, listing(self.nest, at), self.stage, self.origin)

    # ---- values

    def _sizes(self) -> None:
        if not self.nest.stores:
            self.fail("it stores nothing")
        for axis, size in enumerate(self.nest.sizes):
            # Lowering leaves operations without elements to ATen. A symbolic size may be 0: the kernel then has an
            # empty grid or an empty loop.
            if isinstance(size, int) and size < 1:
                self.fail(f"axis d{axis} has {size} points")
            self._known(size, None)

    def _value(self, value: Value, stored: Mapping[str, Store]) -> None:
        # A half in a register would round in the middle of a fused chain, and Triton would promote it silently.
        if value.dtype != register_dtype(value.dtype):
            self.fail(f"a value is kept in a register as {value.dtype}", value)
        if not value.axes <= self.axes:
            self.fail(f"axes {sorted(value.axes - self.axes)} do not exist", value)
        if isinstance(value, Load):
            self._load(value, stored.get(value.buffer))
        elif isinstance(value, Const):
            self._const(value)
        elif isinstance(value, Scalar):
            self._known(value.expression, value)
        elif isinstance(value, Call):
            self._call(value)
        elif isinstance(value, Reduce):
            self._reduce(value)
        elif isinstance(value, ReductionResult):
            self._reduction_result(value)

    def _load(self, load: Load, stored: Store | None) -> None:
        # It has no memory, so nothing can lie outside of it, and a mask would have nothing to protect.
        if load.buffer == POSITIONS:
            if load.dtype != torch.int64 or load.mask is not None or load.index.indirect:
                self.fail("a position is an int64 without mask or indirect terms", load)
            return
        self._access(load.buffer, load.index, load.mask, load.dtype, load)
        # Such a constant fails only when Triton compiles the kernel, with no user's line in sight.
        if not load.dtype.is_floating_point and not math.isfinite(load.other):
            self.fail(f"{load.other} is no {load.dtype}", load)
        if stored is not None and stored.index != load.index:
            # Programs of a kernel run in no order: only the point that stores an element may read it.
            self.fail(f"{load.buffer} is stored at {stored.index} and read at {load.index} by one nest", load)

    def _access(self, name: str, index: Index, mask: Value | None, dtype: torch.dtype, at: Value | Store) -> None:
        buffer = self.buffers.get(name)
        if buffer is None:
            self.fail(f"buffer {name} does not exist", at)
        # Conversions are operations of their own. A load or store that converted as well would round twice or
        # truncate unseen.
        if dtype != register_dtype(buffer.dtype):
            self.fail(f"{name} holds {buffer.dtype}, in registers {register_dtype(buffer.dtype)}, not {dtype}", at)
        if mask is not None and mask.dtype != torch.bool:
            self.fail(f"a mask is {mask.dtype}", at)
        for value, _ in index.indirect:
            if value.dtype.is_floating_point or value.dtype == torch.bool:
                self.fail(f"an index is {value.dtype}", at)
        for number in index.numbers:
            self._known(number, at)
        # Loads and stores alike: an access outside is a silent wrong number on a GPU, seldom a fault.
        outside = fault(index, mask, self.nest.sizes, buffer)
        if outside is not None:
            self.fail(f"{name}[{_index(index, {})}] leaves its buffer: {outside}", at)

    def _known(self, number: Int, at: Value | Store | None) -> None:
        # A symbol that no input defines cannot be computed at the launch: the error would come at run time, from a
        # generated lambda.
        if self.symbols is not None and isinstance(number, sympy.Expr):
            unknown = sorted(str(symbol) for symbol in number.free_symbols if symbol not in self.symbols)
            if unknown:
                self.fail(f"symbols {', '.join(unknown)} are no inputs of the step", at)

    def _const(self, const: Const) -> None:
        # `type() is`, not isinstance: True is an int, and prints as a bool, which Triton adds as int1.
        kind = bool if const.dtype == torch.bool else float if const.dtype.is_floating_point else int
        if type(const.value) is not kind:
            self.fail(f"constant {const.value!r} is no {const.dtype}", const)

    def _call(self, call: Call) -> None:
        op = OPS.get(call.op)
        if op is None:
            self.fail(f"there is no operation {call.op}", call)
        if len(call.args) != op.arity:
            self.fail(f"{call.op} takes {op.arity} values, not {len(call.args)}", call)
        dtypes = [arg.dtype for arg in call.args]
        # The result too: a call stores its dtype instead of deriving it, so a wrong one would be believed by all
        # later stages.
        if not _FITS[op.signature](dtypes, call.dtype):
            listed = ", ".join(map(str, dtypes))
            self.fail(f"{call.op} takes {op.signature.value}, not ({listed}) -> {call.dtype}", call)

    # ---- reductions

    def _reduce(self, reduce: Reduce) -> None:
        kind = REDUCTIONS.get(reduce.kind)
        if kind is None:
            self.fail(f"there is no reduction {reduce.kind}", reduce)
        if len(reduce.args) != kind.arity:
            self.fail(f"{reduce.kind} takes {kind.arity} values, not {len(reduce.args)}", reduce)
        if not set(reduce.over) <= self.axes or len(set(reduce.over)) != len(reduce.over):
            self.fail(f"it reduces over axes {list(reduce.over)} of {len(self.axes)}", reduce)
        first, *others = [arg.dtype for arg in reduce.args]
        if not _FITS[kind.signature]([first], reduce.dtype) or any(dtype != torch.int64 for dtype in others):
            self.fail(f"{reduce.kind} takes {kind.signature.value}, not {first} -> {reduce.dtype}", reduce)

    def _reduction_result(self, result: ReductionResult) -> None:
        reduce = result.reduce
        if not isinstance(reduce, Reduce) or REDUCTIONS[reduce.kind].results < 2:
            self.fail("it reads one of several results of what has one", result)
        if not 0 <= result.at < REDUCTIONS[reduce.kind].results:
            self.fail(f"{reduce.kind} has no result {result.at}", result)
        # Results of argmax have the types of its operands; those of kinds with one operand (welford) all have the
        # reduction's own.
        dtype = reduce.args[result.at].dtype if len(reduce.args) > 1 else reduce.dtype
        if result.dtype != dtype:
            self.fail(f"result {result.at} of {reduce.kind} is {dtype}, not {result.dtype}", result)

    def _reductions(self) -> None:
        """No axis is reduced twice, and reductions with several results are read through one of these."""
        # Reducing a constant along an axis is legal (a sum of ones), also one that was reduced before (the variance of
        # ones). Reducing another value that was already reduced along the axis multiplies by its length: an operand
        # substituted with the wrong axes looks like that.
        # An operand that was not reduced keeps the axis: x - max(x), with x broadcast along it, may be summed over it.
        reduced: dict[Value, frozenset[int]] = {}
        constants: set[Value] = set()
        for value in self.nest.values():
            tensors = [operand for operand in value.operands() if operand not in constants]
            computed = isinstance(value, (Call, Reduce, ReductionResult)) and not tensors
            if computed or isinstance(value, (Const, Scalar)):
                constants.add(value)
            # Along axes that *all* operands were reduced along. Constants have no axes, so they take no part.
            below = frozenset.intersection(*(reduced[operand] for operand in tensors)) if tensors else frozenset[int]()
            if isinstance(value, Reduce):
                inner = frozenset().union(*(arg.axes for arg in value.args))
                twice = {axis for axis in (below & set(value.over)) - inner if self.nest.sizes[axis] != 1}
                if twice:
                    self.fail(f"axes {sorted(twice)} are reduced twice", value)
                below |= set(value.over)
            # Sums of sums are allowed along different axes, so what lies below a reduction stays known.
            reduced[value] = below
            for operand in value.operands() if not isinstance(value, ReductionResult) else ():
                if isinstance(operand, Reduce) and REDUCTIONS[operand.kind].results > 1:
                    self.fail(f"{operand.kind} has several results, of which one must be chosen", value)

    # ---- stores

    def _store(self, store: Store) -> None:
        if not store.axes <= self.axes:
            self.fail(f"axes {sorted(store.axes - self.axes)} do not exist", store)
        self._access(store.buffer, store.index, store.mask, store.value.dtype, store)
        if isinstance(store.value, Reduce) and REDUCTIONS[store.value.kind].results > 1:
            self.fail(f"{store.value.kind} has several results, of which one must be chosen", store)
        # Programs run in no order: which of the values would remain in memory is undefined.
        lost = {axis for axis in store.value.axes - store.index.axes if self.nest.sizes[axis] != 1}
        if lost:
            self.fail(f"the points along axes {sorted(lost)} store different values in one element", store)
        # A mask may let one of the colliding points through, and data may be a permutation: neither can be judged
        # here.
        if not store.index.indirect and store.mask is None:
            self._injective(store)

    def _injective(self, store: Store) -> None:
        """No two points store to one element; tried for each two axes."""
        # Pairs do not find a collision that needs three axes. Exact injectivity of strides is a subset-sum problem;
        # layouts of torch are wrong in pairs when they are wrong (a stride of 0, an `expand`, an overlapping
        # `as_strided`).
        for (a, s), (b, t) in itertools.combinations(store.index.strides, 2):
            n, m = self.nest.sizes[a], self.nest.sizes[b]
            if not all(isinstance(number, int) for number in (s, t, n, m)):
                continue
            # Points i and j along two axes collide where i * s == j * t: at multiples of t / gcd and of s / gcd.
            common = math.gcd(s, t)
            if abs(t) // common < n and abs(s) // common < m:
                self.fail(f"points along axes d{a} and d{b} store to one element", store)

    def _disjoint(self, one: Store, other: Store) -> None:
        """Two stores to one buffer write different elements; tried for the first element of each."""
        if one.buffer != other.buffer:
            return
        # Masks may exclude each other, which is not decided here.
        if one.mask is None and other.mask is None and overlap(one, self.nest, other, self.nest):
            self.fail(f"two stores write to one element of {one.buffer}", other)


def overlap(one: Store, one_nest: Nest, other: Store, other_nest: Nest) -> bool:
    """Whether the first element of one store is provably among those of the other."""
    if one.index.indirect or other.index.indirect:
        return False
    # Two dense blocks that overlap contain the first element of one another; stores interleaved otherwise may escape.
    return _contains(one, one_nest, other.index.offset) or _contains(other, other_nest, one.index.offset)


def _contains(store: Store, nest: Nest, element: Int) -> bool:
    left = element - store.index.offset
    pairs = [(stride, nest.sizes[axis]) for axis, stride in store.index.strides]
    if not isinstance(left, int) or not all(isinstance(n, int) and n > 0 for pair in pairs for n in pair):
        # With symbols: equal offsets overlap whatever the sizes, other differences are not decided.
        return left == 0
    # Greedy from the largest stride. It finds every element of a dense layout, and never one that is not stored.
    for stride, size in sorted(pairs, reverse=True):
        left -= min(max(left, 0) // stride, size - 1) * stride
    return left == 0


def _numbers(dtype: torch.dtype) -> bool:
    return dtype != torch.bool


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _integers(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype != torch.bool


def _bools(dtype: torch.dtype) -> bool:
    return dtype == torch.bool


def _any(dtype: torch.dtype) -> bool:
    return True


def _same(
    kind: Callable[[torch.dtype], bool], result: torch.dtype | None = None
) -> Callable[[list[torch.dtype], torch.dtype], bool]:
    """All operands have one dtype of a kind, and the result has the same, or ``result``."""
    # One dtype for all: Triton would promote mixed operands by rules of its own, which are not torch's.
    return lambda operands, dtype: (
        len(set(operands)) == 1 and kind(operands[0]) and dtype == (operands[0] if result is None else result)
    )


# Whether an operation of a signature takes operands of these dtypes and gives this one.
_FITS: Mapping[Signature, Callable[[list[torch.dtype], torch.dtype], bool]] = {
    Signature.NUMBERS: _same(_numbers),
    Signature.FLOATS: _same(_floats),
    Signature.INTEGERS: _same(_integers),
    Signature.BITS: _same(lambda dtype: not dtype.is_floating_point),
    Signature.BOOLS: _same(_bools),
    Signature.ORDERED: _same(_any),
    Signature.FLOAT_TEST: _same(_floats, torch.bool),
    Signature.COMPARISON: _same(_any, torch.bool),
    Signature.WHERE: lambda operands, dtype: operands[0] == torch.bool and operands[1] == operands[2] == dtype,
    Signature.CAST: lambda operands, dtype: True,
    Signature.ROUNDING: lambda operands, dtype: operands[0] == dtype == torch.float32,
    # A sum of bools counts them (`aten.sum` gives int64), so that no cast is needed before it.
    Signature.SUM: lambda operands, dtype: (
        (operands[0] == dtype and _numbers(dtype)) or (operands[0] == torch.bool and _integers(dtype))
    ),
    Signature.RANDOM: lambda operands, dtype: set(operands) == {torch.int64} and dtype == torch.float32,
    Signature.POSITION: lambda operands, dtype: (
        [*operands, dtype] == [torch.int64, torch.int64, torch.bool, torch.int64]
    ),
}


# ---- messages


def listing(nest: Nest, marked: Value | Store | None = None) -> str:
    """A nest as text, one value a line, so that shared values are written once; ``>`` marks a value or store."""
    names: dict[Value, str] = {}
    lines = ["for " + (", ".join(f"d{axis} < {size}" for axis, size in enumerate(nest.sizes)) or "one point") + ":"]
    for value in nest.values():
        text = _text(value, names)
        if not value.operands() and not isinstance(value, Load):
            names[value] = text  # a constant, a number of the step or a position is written where it is used
            here = False
        else:
            names[value] = f"%{len(lines) - 1}"
            text = f"{names[value]} = {text}  # {str(value.dtype).removeprefix('torch.')}"
            here = marked is value or (isinstance(marked, (Const, Scalar, Position)) and marked in value.operands())
            lines.append(f"{'>' if here else ' '}   {text}")
    for store in nest.stores:
        mask = "" if store.mask is None else f" if {names[store.mask]}"
        text = f"{store.buffer}[{_index(store.index, names)}] = {names[store.value]}{mask}"
        lines.append(f"{'>' if store is marked else ' '}   {text}")
    return "\n".join(lines)


def _text(value: Value, names: Mapping[Value, str]) -> str:
    operands = ", ".join(names[operand] for operand in value.operands())
    if isinstance(value, Load):
        mask = "" if value.mask is None else f" if {names[value.mask]} else {value.other}"
        return f"{value.buffer}[{_index(value.index, names)}]{mask}"
    if isinstance(value, Call):
        return f"{value.op}({operands})"
    if isinstance(value, Reduce):
        return f"{value.kind}[{', '.join(f'd{axis}' for axis in value.over)}]({operands})"
    return f"{operands}.{value.at}" if isinstance(value, ReductionResult) else str(value)


def _index(index: Index, names: Mapping[Value, str]) -> str:
    terms = [(f"d{axis}", stride) for axis, stride in index.strides]
    terms += [(names.get(value, "(indirect)"), stride) for value, stride in index.indirect]
    parts = [name if stride == 1 else f"{stride}*{name}" for name, stride in terms]
    return " + ".join([*parts, *([str(index.offset)] if index.offset != 0 or not parts else [])])
