"""Calls of numpy with arrays that exist only when a step runs: as data, as nodes of the graph, and on sample arrays.

An :class:`ArrayCall` names a function and its arguments, among them other calls: ``idx[:, None]`` is a call of
``getitem``. Calls that give a view (an index, a transpose, a broadcast) are no nodes. They are made again, inside the
node that needs the view, on the array whose memory it shares. So each function of numpy gets arrays of the strides that
it gets in eager, and a write through a view reaches the array.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import RuntimeCheckFailed


@dataclass(frozen=True, eq=False)
class ArrayCall:
    """``function(*args, **kwargs)``; arguments may be calls and, at any depth of containers, leaves."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class ArrayOperand:
    """The value of operand number ``index`` of a node."""

    index: int


def _rebuilt(tree: Any, leaf: Callable[[Any], Any], call: Callable[[Any, Any, Any], Any]) -> Any:
    """``tree`` with ``leaf`` applied to its leaves, and ``call`` to each call's function, arguments and keywords."""
    if isinstance(tree, ArrayCall):
        return call(tree.function, _rebuilt(tree.args, leaf, call), _rebuilt(tree.kwargs, leaf, call))
    if type(tree) in (list, tuple):
        return type(tree)(_rebuilt(each, leaf, call) for each in tree)
    if type(tree) is dict:
        return {key: _rebuilt(each, leaf, call) for key, each in tree.items()}
    if type(tree) is slice:
        return slice(*(_rebuilt(each, leaf, call) for each in (tree.start, tree.stop, tree.step)))
    return leaf(tree)


def map_leaves(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """``tree`` with ``leaf`` applied to all that is no call, list, tuple, dict or slice."""
    return _rebuilt(tree, leaf, ArrayCall)


def evaluate(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value of a call, or of a tree of calls, with ``leaf`` in the place of each leaf."""
    return _rebuilt(tree, leaf, lambda function, args, kwargs: function(*args, **kwargs))


def text_of(tree: Any) -> str:
    """A call as text, equal for equal calls."""
    if isinstance(tree, ArrayCall):
        given = [text_of(each) for each in tree.args] + [f"{key}={text_of(each)}" for key, each in tree.kwargs.items()]
        return f"{name_of(tree.function)}({', '.join(given)})"
    if isinstance(tree, ArrayOperand):
        return f"operands[{tree.index}]"
    if type(tree) in (list, tuple):
        return f"[{', '.join(map(text_of, tree))}]"
    if type(tree) is dict:
        return f"{{{', '.join(f'{key!r}: {text_of(each)}' for key, each in tree.items())}}}"
    if type(tree) is slice:
        return f"slice({text_of(tree.start)}, {text_of(tree.stop)}, {text_of(tree.step)})"
    if isinstance(tree, sys.modules["numpy"].ndarray):
        return f"array({tree.dtype}, {tree.shape}, {hashlib.sha256(tree.tobytes()).hexdigest()[:12]})"
    return getattr(tree, "__qualname__", None) or repr(tree)


def name_of(function: Callable[..., Any]) -> str:
    """``concatenate`` for ``numpy.concatenate``, ``add.reduce`` for a method of a function of numpy's."""
    owner: Any = getattr(function, "__self__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{owner.__name__}.{name}" if type(owner).__name__ == "ufunc" else name


class Layout:
    """Shape, dtype and order in memory of an array, whose values fill its memory without gaps.

    Attributes:
        shape: of the memory, outermost dimension first.
        dtype: of numpy.
        sizes: of the array, with symbols for those that vary from call to call; None where none does. Arrays with such
            sizes are C-contiguous.
        order: for each dimension of the memory, the dimension of the array; None where the result is a number.
    """

    def __init__(self, result: Any, sizes: tuple[Any, ...] | None = None) -> None:
        numpy = sys.modules["numpy"]
        self.sizes = sizes
        self.dtype = numpy.asarray(result).dtype
        self.order: tuple[int, ...] | None = None
        if isinstance(result, numpy.ndarray):
            strides = [abs(each) for each in result.strides]
            by_stride = sorted(range(result.ndim), key=lambda dim: -strides[dim])
            self.order = tuple(range(result.ndim)) if result.flags.c_contiguous else tuple(by_stride)
        self.shape = self.memory(result).shape

    @property
    def inverse(self) -> tuple[int, ...] | None:
        """The order that makes the array of its memory; None where they are the same."""
        if self.order is None or self.order == tuple(range(len(self.order))):
            return None
        return tuple(self.order.index(dim) for dim in range(len(self.order)))

    def memory(self, result: Any) -> Any:
        """An array as its memory has it: C-contiguous, of no dimension for a number."""
        numpy = sys.modules["numpy"]
        return numpy.asarray(result) if self.order is None else result.transpose(self.order)

    def failure(self, result: Any) -> str | None:
        """How a result differs from the one in the capture; None where it does not."""
        numpy = sys.modules["numpy"]
        if isinstance(result, numpy.ndarray) != (self.order is not None):
            return f"a {type(result).__name__}"
        if result is None or numpy.ndim(result) != len(self.order or ()):
            return f"{numpy.ndim(result)} dimensions"
        memory = self.memory(result)
        fixed = [each if type(each) is int else None for each in self.sizes or self.shape]
        alike = all(size in (None, found) for size, found in zip(fixed, memory.shape, strict=True))
        if not alike or memory.dtype != self.dtype:
            return f"{memory.dtype} of shape {memory.shape}"
        return None if memory.flags.c_contiguous else f"strides {result.strides}"


class NumpyCall:
    """The target of a node that calls a function of numpy; its result is the memory of an array, as a CPU tensor.

    Args:
        call: over the operands of the node, and constants.
        layout: of the result; of the array that is written, for a call that writes.
        written: number of the operand that the function writes to; the result is its new value.
        is_pure: whether it depends on the operands alone, and draws no number.
    """

    def __init__(self, call: ArrayCall, layout: Layout, written: int | None = None, *, is_pure: bool = False) -> None:
        self.is_pure = is_pure
        self._call = call
        self._layout = layout
        self._written = written
        self._errors = sys.modules["numpy"].geterr()  # of a ``with numpy.errstate(...)`` around the call
        self.text = text_of(call)
        self.__name__ = self.__qualname__ = f"numpy_{name_of(call.function).replace('.', '_')}"
        self.__module__ = __name__

    def __call__(self, text: str, *operands: Any) -> torch.Tensor:
        """ArrayCall the function.

        Raises:
            RuntimeCheckFailed: the result has another shape, dtype or layout than in the capture.
        """
        numpy = sys.modules["numpy"]
        values = as_numbers_and_arrays(operands)
        written = None if self._written is None else _copied(values[self._written])
        if self._written is not None:
            values[self._written] = written
        with numpy.errstate(**self._errors):
            result = evaluate(self._call, lambda leaf: values[leaf.index] if isinstance(leaf, ArrayOperand) else leaf)
        if written is not None:
            return torch.from_numpy(written)
        if (found := self._layout.failure(result)) is not None:
            expected = f"{self._layout.dtype} of shape {self._layout.shape}"
            raise RuntimeCheckFailed(f"{text} gives {expected}", found)
        memory = self._layout.memory(result)
        shared = any(numpy.may_share_memory(memory, each) for each in values if isinstance(each, numpy.ndarray))
        return torch.from_numpy(memory.copy() if shared or not memory.flags.writeable else memory)


@dataclass(frozen=True)
class ArraySlot:
    """An array that leaves the step, of numbers ``indices`` of the outputs of the graph. ``shares``: in the memory of
    the output, as ``Tensor.numpy()`` gives it."""

    call: Any
    indices: tuple[int, ...]
    shares: bool = False

    def fill(self, outputs: Sequence[Any]) -> Any:
        """The array of one call of the step; in memory of its own, where it does not share that of an output."""
        numpy = sys.modules["numpy"]
        if self.shares:
            return evaluate(
                self.call, lambda leaf: _shared(outputs[self.indices[leaf.index]]) if _is_operand(leaf) else leaf
            )
        values = as_numbers_and_arrays([outputs[at] for at in self.indices])
        values = [each.copy() if isinstance(each, numpy.ndarray) else each for each in values]
        return evaluate(self.call, lambda leaf: _owned(values[leaf.index] if isinstance(leaf, ArrayOperand) else leaf))


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, ArrayOperand)


def _shared(output: Any) -> Any:
    return output.detach().numpy() if isinstance(output, torch.Tensor) else output


def empty_like(array: Any) -> Any:
    """An array with the shape, the dtype and the strides of another one, also where there are gaps between elements:
    functions of numpy may go by them."""
    numpy = sys.modules["numpy"]
    dtype = torch.from_numpy(numpy.zeros(0, array.dtype)).dtype
    return torch.empty_strided(array.shape, [each // array.itemsize for each in array.strides], dtype=dtype).numpy()


def _copied(array: Any) -> Any:
    copy = empty_like(array)
    copy[...] = array
    return copy


def _owned(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, sys.modules["numpy"].ndarray) and not leaf.flags.writeable else leaf


def as_numbers_and_arrays(operands: Sequence[Any]) -> list[Any]:
    """Operands of a node as numpy takes them: tensors on the CPU as arrays that cannot be written to."""
    values: list[Any] = []
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            operand = operand.detach().numpy()  # with the strides of eager
            operand.flags.writeable = False
        values.append(operand)
    return values
