"""Sizes of arguments that a capture keeps symbolic, and the sizes that it had to fix to a number.

A size that the step's Python compares with a number, or that an operation needs as a number, is *specialised*: the
graph then serves that one value only. This is never silent. For a size marked with ``weft.mark_dynamic`` it is an
error, for any other a log line. Both name the user's line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft import torch_adapter
from weft.capture.record.number_lists import NumberList
from weft.capture.user_code import user_line
from weft.errors import MarkedDynamicSpecialised

log = logging.getLogger(__name__)

MARKS = "_weft_dynamic_dims"


@dataclass(frozen=True)
class DynamicSize:
    """A size or stride of an argument that is a symbol when the capture begins.

    Attributes:
        leaf: number of the argument among the flattened ones.
        dim: dimension of that tensor.
        path: the argument as the user would write it.
        symbol: of the number. It is unique, even where the step later assumes it equal to another one.
        required: whether it must stay a symbol, because it was marked with ``mark_dynamic``.
        stride: whether it is the stride of that dimension (in elements) and not its size.
    """

    leaf: int
    dim: int
    path: str
    symbol: sympy.Symbol
    required: bool = False
    stride: bool = False

    def of(self, tensor: torch.Tensor) -> int:
        """Its value for the argument ``tensor`` of another call."""
        return tensor.stride(self.dim) if self.stride else tensor.shape[self.dim]

    def __str__(self) -> str:
        return f"{self.path}.{'stride' if self.stride else 'size'}({self.dim})"


@dataclass(frozen=True)
class Specialised:
    """A size that was requested as a symbol and is a number in the graph.

    Attributes:
        size: as the user would write it: ``args[0].size(1)``.
        value: the number.
        line: the user's line that fixed it, or another reason.
    """

    size: str
    value: int
    line: str

    def __str__(self) -> str:
        return f"{self.size} is fixed to {self.value} by {self.line}"


class DynamicSizes:
    """The symbolic sizes of one capture.

    Attributes:
        sizes: the requested sizes that are symbols.
        refused: the requested sizes that cannot be symbols (0 and 1, sizes of arguments that require grad).
    """

    def __init__(self, shape_env: ShapeEnv) -> None:
        self.sizes: list[DynamicSize] = []
        self.refused: list[Specialised] = []
        self._shape_env = shape_env
        self._replaced: dict[sympy.Symbol, tuple[Any, str]] = {}

    def symbol(self, leaf: int, dim: int, path: str, value: int, *, required: bool) -> int | torch.SymInt:
        """A symbol for a size, or the size itself where it is 0 or 1.

        Sizes 0 and 1 behave unlike all others (broadcasting, strides), so each gets a graph of its own.
        """
        if value < 2:
            self.refuse(path, dim, value, "its value: sizes 0 and 1 are always captured as numbers")
            return value
        size = torch_adapter.size_symbol(self._shape_env, value, f"{path}.size({dim})")
        self.sizes.append(DynamicSize(leaf, dim, path, torch_adapter.symbol_of(size), required))
        return size

    def strides(self, leaf: int, path: str, tensor: torch.Tensor, sizes: list[Any]) -> list[Any]:
        """Strides of ``tensor`` in elements, as expressions over ``sizes``.

        A stride that is the product of the inner sizes stays this product. Any other stride outside of a symbolic size
        (the tensor is a slice of longer rows) becomes a symbol of its own.
        """
        strides: list[Any] = list(tensor.stride())
        product: Any = 1
        value, inner = 1, False
        for dim in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d)):
            stride = tensor.stride(dim)
            if stride == value:
                strides[dim] = product
            elif inner and stride > 1:
                strides[dim] = torch_adapter.size_symbol(self._shape_env, stride, f"{path}.stride({dim})")
                symbol = torch_adapter.symbol_of(strides[dim])
                self.sizes.append(DynamicSize(leaf, dim, path, symbol, stride=True))
            inner = inner or isinstance(sizes[dim], torch.SymInt)
            value, product = stride * tensor.shape[dim], strides[dim] * sizes[dim]
        return strides

    def refuse(self, path: str, dim: int, value: int, why: str) -> None:
        """Note a requested size that cannot be a symbol, and why."""
        self.refused.append(Specialised(f"{path}.size({dim})", value, why))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While active, note the user's line wherever a symbol is assumed equal to a number or another symbol."""
        with torch_adapter.on_replacement(self._shape_env, self._note):
            yield

    def _note(self, symbol: sympy.Symbol, value: Any) -> None:
        self._replaced.setdefault(symbol, (value, user_line()))

    def specialised(self) -> list[Specialised]:
        """The sizes that are fixed, each with the line that fixed it; logs each of them.

        Raises:
            MarkedDynamicSpecialised: one of them was marked with ``mark_dynamic``.
        """
        found = list(self.refused)
        for size in self.sizes:
            value = torch_adapter.replaced(self._shape_env, size.symbol)
            if value.is_number:
                fixed = Specialised(str(size), int(value), self._line_of(size.symbol))
                if size.required:
                    raise MarkedDynamicSpecialised(fixed.size, fixed.value, fixed.line)
                found.append(fixed)
        for fixed in found:
            log.info("specialised: %s", fixed)
        return found

    def _line_of(self, symbol: sympy.Symbol) -> str:
        """The line that fixed ``symbol``, found through the symbols that it was assumed equal to before."""
        value, line = self._replaced.get(symbol, (sympy.Integer(0), "<unknown line>"))
        later = [other for other in value.free_symbols if other in self._replaced]
        return self._line_of(later[0]) if later else line


def sizes_of(value: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor, of an array of numpy's, or of a list that is one leaf; None for any other value."""
    if isinstance(value, torch.Tensor):
        return None if value.is_nested else value.shape
    if type(value) is NumberList:
        return value.sizes
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
    return value.shape if is_array else None


def changed_dims(leaves: Sequence[Any], shapes: Sequence[Sequence[int] | None]) -> set[tuple[int, int]]:
    """(leaf, dimension) of all sizes of a call's tensors and arrays that are not those of another call, whose
    ``shapes`` these are."""
    changed = set()
    for at, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
        now = sizes_of(leaf)
        if now is not None and shape is not None and len(now) == len(shape):
            changed |= {(at, dim) for dim, (a, b) in enumerate(zip(now, shape, strict=True)) if a != b}
    return changed
