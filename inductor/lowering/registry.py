"""The table of lowerings, and the interface through which a lowering reads operands and stores results.

A lowering is a function ``lower(out: Lowering, node: Node) -> bool | None`` registered for ATen operations with
:func:`register_lowering`. It stores the node's results through ``out``. It returns False for a case that it does not
support; the node then runs as its ATen kernel.

Equal operations share their loops. So a lowering may depend on nothing but the arguments of the node, the layout, the
base and the memory orders of its tensor operands, how an operand such as ``arange(6)`` was made from numbers, and the
layout of the results: all that :mod:`weft.inductor.lowering.repeated_operations` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from weft import torch_adapter
from weft.inductor.graph.aliasing import is_lazy
from weft.inductor.graph.sizes import tensors_of
from weft.inductor.loop_ir.ir import (
    Buffer,
    Call,
    Const,
    Index,
    Int,
    Load,
    Nest,
    Scalar,
    Store,
    Value,
    register_dtype,
    rewrite,
)

Node = torch.fx.Node
Lower = Callable[["Lowering", Node], bool | None]

# By overload (`aten.add.Tensor`), not by packet: overloads differ in broadcasting, promotion and arguments.
LOWERINGS: dict[Any, Lower] = {}

# The buffer of seeds that the program draws once a step (int64), one for each random operation.
SEEDS = "rng.seed"

# What is missing has no arithmetic that matches eager's in Triton: complex numbers, float8 (eager has few operations
# on it), uint16 to uint64, quantised types. Operations on these run as ATen's kernels.
_LOWERED_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def register_lowering(*targets: Any) -> Callable[[Lower], Lower]:
    """Register a lowering for ATen operations."""

    def register(lower: Lower) -> Lower:
        for target in targets:
            # The second registration would win by the order of imports, which nobody sees.
            assert target not in LOWERINGS, f"{target} has two lowerings"
            LOWERINGS[target] = lower
        return lower

    return register


@dataclass(frozen=True)
class Operand:
    """A strided view of a buffer: how the readers of a tensor-valued node address its elements.

    Attributes:
        sizes, strides, offset: of the view, in elements of the buffer.
    """

    buffer: str
    dtype: torch.dtype
    sizes: tuple[Int, ...]
    strides: tuple[Int, ...]
    offset: Int = 0

    def index(self, axes: Sequence[int | None] | None = None, offset: Int = 0) -> Index:
        """The element at the nest's ``axes`` (one a dimension, None for position 0; by default 0, 1, ...)."""
        axes = range(len(self.sizes)) if axes is None else axes
        # A dimension of size 1 has no stride: torch leaves an arbitrary one there, and broadcasting walks it with
        # stride 0. This one line is all that broadcasting needs.
        pairs = [(a, s) for a, s, n in zip(axes, self.strides, self.sizes, strict=True) if a is not None and n != 1]
        return Index(_summed(pairs), self.offset + offset)

    def load(self, index: Index, mask: Value | None = None, other: float = 0) -> Load:
        """A load of the element at ``index`` of the buffer, in the dtype of a register."""
        return Load(self.buffer, index, register_dtype(self.dtype), mask, other)


def base_of_views(operands: Mapping[Node, Operand], source: Node) -> Operand:
    """The tensor that ``source`` is a view of, by however many views."""
    operand = operands[source]
    # Views have their base's buffer in `operands`; the first node with another buffer made the memory.
    while source.all_input_nodes and (before := operands.get(source.all_input_nodes[0])) is not None:
        if before.buffer != operand.buffer:
            break
        source, operand = source.all_input_nodes[0], before
    return operand


def _summed(pairs: Iterable[tuple[int, Int]]) -> list[tuple[int, Int]]:
    """One pair an axis: a diagonal has two dimensions along one axis."""
    total: dict[int, Int] = {}
    for axis, stride in pairs:
        total[axis] = total.get(axis, 0) + stride
    return list(total.items())


class Lowering:
    """The lowering of one node: reads operands, makes values, stores results.

    Attributes:
        nests: the nests added so far, in order.
        buffers: the node's results and temporaries that were requested so far.
        seeds: the random operations of the step so far, each with a seed of its own.
        multiprocessors: of the GPU that the kernels are for.
        orders: the strides at which an operand is read, see :mod:`weft.inductor.lowering.memory_order`.
    """

    def __init__(
        self,
        node: Node,
        operands: Mapping[Node, Operand],
        seeds: list[Node],
        multiprocessors: int,
        orders: Callable[[Operand], tuple[tuple[Int, ...], ...]],
    ) -> None:
        self.node = node
        # By node of the graph. Nodes that are views have an operand on their base's buffer, so lowerings never see a
        # view.
        self.operands = operands
        self.seeds = seeds
        self.multiprocessors = multiprocessors
        self.orders = orders
        self.nests: list[Nest] = []
        self.buffers: dict[str, Buffer] = {}

    # ---- operands

    def operand(self, arg: Any) -> Operand:
        """A tensor node as a view of its buffer."""
        return self.operands[arg]

    def value(
        self,
        arg: Any,
        sizes: Sequence[Int],
        axes: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Value:
        """``arg`` at each point of a space of ``sizes``, broadcast as torch does.

        Args:
            arg: a tensor node, a number or a number node.
            axes: which axis of the nest each dimension of the space is (default: 0, 1, ...).
            dtype: the type to compute in; the value has its register type.
        """
        if isinstance(arg, Node) and isinstance(arg.meta["val"], torch.Tensor):
            operand = self.operands[arg]
            axes = list(range(len(sizes)) if axes is None else axes)
            # Torch aligns shapes at the last dimension: leading axes are missing from an operand of lower rank.
            value: Value = operand.load(operand.index(axes[len(axes) - len(operand.sizes) :]))
        else:
            value = number(arg, dtype)
        return value if dtype is None else convert(value, dtype)

    def read_at(self, operand: Operand) -> list[Index]:
        """The indices of the whole operand at which kernels read it, or the largest of what it is computed from."""
        return [replace(operand, strides=strides).index() for strides in self.orders(operand)]

    def seed(self) -> Value:
        """The seed of this node's random numbers (int64), another at every step."""
        # By node, not by call: a lowering may ask twice for the seed of the same numbers (a mask that is read again).
        if self.node not in self.seeds:
            self.seeds.append(self.node)
        return Load(SEEDS, Index(offset=self.seeds.index(self.node)), torch.int64)

    def fake(self, result: int = 0) -> torch.Tensor:
        """The fake tensor of a result."""
        val = self.node.meta["val"]
        return val[result] if isinstance(val, (list, tuple)) else val

    # ---- results

    def result(self, result: int = 0) -> Operand:
        """A result of the node, as a view of its buffer to store to."""
        val = self.node.meta["val"]
        name = f"{self.node.name}.{result}" if isinstance(val, (list, tuple)) else self.node.name
        fake = self.fake(result)
        # The layout that eager chooses, recorded by the fake tensor. ATen kernels and the user read the result by it.
        sizes, strides = tuple(map(size_of, fake.shape)), tuple(map(size_of, fake.stride()))
        return self._buffer(name, fake.dtype, sizes, strides)

    def temporary(
        self, suffix: str, dtype: torch.dtype, sizes: Sequence[Int], order: Sequence[int] | None = None
    ) -> Operand:
        """A tensor without gaps between two nests of this node. ``order`` is that of its dimensions in memory, the
        outermost first; by default their own."""
        strides: list[Int] = [1] * len(sizes)
        step: Int = 1
        for dim in reversed(range(len(sizes)) if order is None else order):
            strides[dim] = step
            step = step * sizes[dim]
        return self._buffer(f"{self.node.name}.{suffix}", dtype, tuple(sizes), tuple(strides))

    def _buffer(self, name: str, dtype: torch.dtype, sizes: tuple[Int, ...], strides: tuple[Int, ...]) -> Operand:
        # Asked for more than once by a lowering that stores a result and reads it again: the first description
        # stands.
        self.buffers.setdefault(name, Buffer(name, dtype, self.device, sizes, strides))
        return Operand(name, dtype, sizes, strides)

    @property
    def device(self) -> torch.device:
        """The device of the results."""
        val = self.node.meta["val"]
        # A result that was not asked for (`output_mask`) is None.
        return next(v for v in (val if isinstance(val, (list, tuple)) else [val]) if v is not None).device

    def store(
        self,
        value: Value,
        sizes: Sequence[Int] | None = None,
        *,
        result: int = 0,
        axes: Sequence[int | None] | None = None,
        offset: Int = 0,
        mask: Value | None = None,
    ) -> None:
        """Add a nest over ``sizes`` (default: the result's) that stores ``value`` in a result of the node.

        Args:
            axes: which axis of the nest each dimension of the result is (default: 0, 1, ...).
            offset: elements from the result's start.
            mask: where to store.
        """
        # A nest of its own, not a further store of the last one: fusion joins nests where their loops correspond, and
        # knows better.
        target = self.result(result)
        sizes = target.sizes if sizes is None else sizes
        self.nest(sizes, [Store(target.buffer, target.index(axes, offset), value, mask)])

    def nest(self, sizes: Sequence[Int], stores: Sequence[Store]) -> None:
        """Add a nest over ``sizes`` with these stores."""
        self.nests.append(Nest(tuple(sizes), tuple(stores)))

    def takes_operands(self) -> bool:
        """Whether every operand and result is strided, has elements, is on one device and has a dtype that kernels
        support, and no two elements of a result share memory."""
        results = tensors_of(self.node)
        operands = [n.meta["val"] for n in self.node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        tensors = results + operands
        # No elements: nothing to launch, while shapes still follow eager's rules, so ATen does it. Several devices: a
        # kernel cannot read a tensor on the host, as ATen does with a 0-dim one.
        if any(t.device != tensors[0].device or any(type(n) is int and n == 0 for n in t.shape) for t in tensors):
            return False
        # A lazy conjugate or negative has the memory of another value (`aliasing.is_lazy`): a load of it would be
        # wrong.
        plain = all(t.dtype in _LOWERED_DTYPES and t.layout is torch.strided and not is_lazy(t) for t in tensors)
        return plain and all(map(_has_distinct_elements, results))


def _has_distinct_elements(val: torch.Tensor) -> bool:
    # Along an axis of stride 0, programs would store different values in one element, in no order. A stride that only
    # the data decides is a product of sizes, and 0 only where there is no element.
    return all(size_of(s) != 0 or size_of(n) == 1 for n, s in zip(val.shape, val.stride(), strict=True))


def size_of(value: Any) -> Int:
    """A size, stride or offset as an int, or as a sympy expression where it is symbolic."""
    if type(value) is int:
        return value
    expression = torch_adapter.expression(value)
    # A size that guards made constant is an int, so that loops over it count as static.
    return int(expression) if expression.is_Integer else expression


def number(arg: Any, dtype: torch.dtype | None = None) -> Value:
    """A number of the graph as a value: a constant, or read when the step is called."""
    val = arg.meta["val"] if isinstance(arg, Node) else arg
    # A replayed CUDA graph repeats the scalar arguments of its recording, so numbers that change are read from memory.
    if isinstance(arg, Node) and "scalar_in_memory" in arg.meta:
        # float64 in memory, whatever the number's kind: Python's floats survive, and integers up to 2**53.
        buffer, at = arg.meta["scalar_in_memory"]
        return Load(buffer, Index(offset=at), torch.float64)
    # Before int: True is an int, and would become a number that adds.
    if isinstance(val, bool):
        return Const(val, torch.bool)
    if isinstance(val, int):
        return Const(val, torch.int64)
    if isinstance(val, float):
        # ATen passes a Python number to a kernel in the type that the kernel computes in (`opmath_t`): float32 next
        # to halves. Rounding it to bfloat16 first would change `x * 0.1`.
        return Const(val, dtype if dtype == torch.float64 else torch.float32)
    expression = torch_adapter.expression(val)
    # A SymFloat has float64, as a Python float has; its user converts it.
    whole = isinstance(val, torch.SymInt)
    if expression.is_number:
        return Const(int(expression), torch.int64) if whole else Const(float(expression), torch.float64)
    return Scalar(sympy.sympify(expression), torch.int64 if whole else torch.float64)


def convert(value: Value, dtype: torch.dtype) -> Value:
    """``value`` in the register type of ``dtype``."""
    wanted = register_dtype(dtype)
    # Halves share a register type: between them nothing changes here, and a cast that rounds is `casts.cast`'s.
    if value.dtype == wanted:
        return value
    # Converted now, so that equal constants are one object and arithmetic on them folds.
    if isinstance(value, Const):
        return literal(value.value, wanted)
    return Call("to", (value,), wanted)


def literal(value: bool | int | float, dtype: torch.dtype) -> Const:
    """A Python number as a constant of a register type."""
    cast = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    return Const(cast(value), dtype)


def masked(value: Value, mask: Value, other: float) -> Value:
    """``value`` where ``mask`` holds, ``other`` elsewhere, where nothing is read."""

    def mask_load(old: Value) -> Value:
        # Where the mask is off, the index may lie outside of the buffer, and a position outside of its dimension.
        if isinstance(old, Load):
            both = mask if old.mask is None else Call("and", (mask, old.mask), torch.bool)
            return Load(old.buffer, old.index, old.dtype, both, old.other)
        if isinstance(old, Call) and old.op == "checked_index":
            position, size, condition = old.args
            both = mask if isinstance(condition, Const) else Call("and", (mask, condition), torch.bool)
            return Call(old.op, (position, size, both), old.dtype)
        return old

    # The loads are masked for their addresses, the result for its value: an operation on masked loads need not give
    # what is wanted there (exp(0) is 1).
    return Call("where", (mask, rewrite([value], mask_load)[value], literal(other, value.dtype)), value.dtype)
