"""Sizes of arguments that a capture keeps symbolic, and what became of them.

A size that the step's Python compares with a number, or that an operation needs as a number, is
*specialised*: the graph serves that one value. That is never silent: a size marked with ``weft.mark_dynamic``
makes it an error, any other a log line, both with the user's line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft import torch_adapter
from weft.capture.user_code import user_line
from weft.errors import MarkedDynamicSpecialised

log = logging.getLogger(__name__)

MARKS = "_weft_dynamic_dims"


@dataclass(frozen=True)
class DynamicSize:
    """A size (or stride) of an argument that a capture began with as a symbol.

    Attributes:
        leaf: number of the argument among the flattened ones.
        dim: dimension of that tensor.
        path: the argument as the user would write it.
        symbol: what stands for the number; unique, even where the step then assumed it equal to another.
        required: marked with ``mark_dynamic``: it must stay a symbol.
        stride: whether it is the stride of that dimension (elements) and not its size.
    """

    leaf: int
    dim: int
    path: str
    symbol: sympy.Symbol
    required: bool = False
    stride: bool = False

    def of(self, tensor: torch.Tensor) -> int:
        return tensor.stride(self.dim) if self.stride else tensor.shape[self.dim]

    def __str__(self) -> str:
        return f"{self.path}.{'stride' if self.stride else 'size'}({self.dim})"


@dataclass(frozen=True)
class Specialised:
    """A size that was to be symbolic and is the number ``value`` in the graph, because of ``line`` of the
    user's code.

    ``size`` is ``args[0].size(1)``.
    """

    size: str
    value: int
    line: str

    def __str__(self) -> str:
        return f"{self.size} is fixed to {self.value} by {self.line}"


class DynamicSizes:
    """The symbolic sizes of one capture.

    Attributes:
        sizes: those that were asked for and could be symbols.
        refused: those asked for that could not be (sizes 0 and 1, arguments that require grad).
    """

    def __init__(self, shape_env: ShapeEnv) -> None:
        self.sizes: list[DynamicSize] = []
        self.refused: list[Specialised] = []
        self._shape_env = shape_env
        self._replaced: dict[sympy.Symbol, tuple[Any, str]] = {}

    def symbol(self, leaf: int, dim: int, path: str, value: int, *, required: bool) -> int | torch.SymInt:
        """A symbol for a size, or the size itself where it is 0 or 1: those behave unlike all others
        (broadcasting, strides), so a graph of their own serves them."""
        if value < 2:
            self.refuse(path, dim, value, "its value: sizes 0 and 1 are always captured as numbers")
            return value
        size = torch_adapter.size_symbol(self._shape_env, value, f"{path}.size({dim})")
        self.sizes.append(DynamicSize(leaf, dim, path, torch_adapter.symbol_of(size), required))
        return size

    def strides(self, leaf: int, path: str, tensor: torch.Tensor, sizes: list[Any]) -> list[Any]:
        """Strides (elements) of ``tensor`` said with ``sizes``: a product of inner sizes stays one; any other
        stride outside a symbolic size (a slice of a longer row) is a symbol of its own."""
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
        self.refused.append(Specialised(f"{path}.size({dim})", value, why))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the user's line wherever a symbol is found equal to something while the step runs."""
        with torch_adapter.on_replacement(self._shape_env, self._note), _symbolic_sqrt():
            yield

    def _note(self, symbol: sympy.Symbol, value: Any) -> None:
        self._replaced.setdefault(symbol, (value, user_line()))

    def specialised(self) -> list[Specialised]:
        """The sizes that were fixed, each with the line that did it; logs every one.

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
        """The line that fixed ``symbol``, by way of what it was found equal to before."""
        value, line = self._replaced.get(symbol, (sympy.Integer(0), "<unknown line>"))
        later = [other for other in value.free_symbols if other in self._replaced]
        return self._line_of(later[0]) if later else line


@contextmanager
def _symbolic_sqrt() -> Iterator[None]:
    """``math.sqrt`` of a symbolic size stays symbolic: attention scales by it, and C would ask for the
    number."""
    original = math.sqrt

    def sqrt(number: Any, /) -> Any:
        return torch.sym_sqrt(number) if isinstance(number, (torch.SymInt, torch.SymFloat)) else original(number)

    math.sqrt = sqrt
    try:
        yield
    finally:
        math.sqrt = original
