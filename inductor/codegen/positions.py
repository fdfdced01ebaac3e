"""Where a program is: the variables for positions along the dimensions of a kernel, and masks for their ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy
from torch.utils._sympy.printers import PythonPrinter

from weft.inductor.codegen.expressions import Text
from weft.inductor.codegen.plan import Dim, Plan, product
from weft.inductor.ir import Index, Int, Value


class Scope:
    """A block of statements: the function's body, or that of a loop.

    Args:
        goes_on: the block whose statements these are too; only their values have names of their own.
    """

    def __init__(self, outer: Scope | None = None, goes_on: Scope | None = None) -> None:
        self.outer = outer
        # Index variables and masks: name -> expression.
        self.head: dict[str, str] = {} if goes_on is None else goes_on.head
        self.lines: list[str] = [] if goes_on is None else goes_on.lines
        self.names: dict[Value, Text] = {}

    def text(self, value: Value) -> Text:
        """How a value that was computed is written."""
        if value in self.names or self.outer is None:
            return self.names[value]
        return self.outer.text(value)

    def statements(self) -> list[str]:
        return [*(f"{name} = {code}" for name, code in self.head.items()), *self.lines]


class Positions:
    """Writes positions. Each variable is made when it is first needed, at the head of the block where it belongs.

    Args:
        sizes: of the nest's axes.
        body: the function's own block.
    """

    def __init__(self, plan: Plan, sizes: Sequence[Int], body: Scope) -> None:
        self.plan, self.sizes, self.body = plan, sizes, body

    def tile(self, axes: Iterable[int]) -> frozenset[Dim]:
        """The dimensions of a tile that changes along ``axes``."""
        return self.plan.dims_of(frozenset(axes)) & frozenset(self.plan.tile)

    def shape(self, dims: frozenset[Dim]) -> str:
        """The shape of a tile along ``dims``, as it is written."""
        if not dims:
            return "[]"
        return f"[{', '.join(dim.block_name if dim in dims else '1' for dim in self.plan.tile)}]"

    def _home(self, dim: Dim, scope: Scope) -> Scope:
        return scope if dim.walk == "loop" else self.body

    def index(self, dim: Dim, scope: Scope) -> str:
        """The variable that says where along a dimension the program is."""
        head = self._home(dim, scope).head
        if dim.name not in head and (start := self._start(dim)) is not None:
            offsets = f"tl.arange(0, {dim.block_name}){self._along(dim)}"
            code = offsets if not start else f"{start} + {offsets}" if dim.block > 1 else start
            if dim.wide and dim.walk != "grid":
                code = f"tl.full([], {start}, tl.int64)" if dim.block == 1 else f"({code}).to(tl.int64)"
            head[dim.name] = code
        return dim.name

    def _start(self, dim: Dim) -> str | None:
        """Where a dimension's block starts; None where the loop's variable is the index."""
        if dim.walk == "whole":
            return ""
        if dim.walk == "loop":
            return f"{dim.name}_start" if dim.block > 1 or dim.wide else None
        block = self._program(dim)
        return f"{block} * {dim.block_name}" if dim.block > 1 else block

    def _program(self, dim: Dim) -> str:
        """Which block of a dimension the program takes."""
        grid = self.plan.grid
        pid = "tl.program_id(0).to(tl.int64)" if any(other.wide for other in grid) else "tl.program_id(0)"
        if len(grid) == 1:
            return pid
        self.body.head.setdefault("pid", pid)
        at = grid.index(dim)
        for other in grid[: at + 1][: len(grid) - 1]:
            self.body.head.setdefault(f"{other.name}_blocks", _blocks(other))
        inner = [f"{other.name}_blocks" for other in grid[:at]]
        code = " // ".join(["pid", *inner])
        return code if at == len(grid) - 1 else f"{code} % {dim.name}_blocks"

    def _along(self, dim: Dim) -> str:
        if len(self.plan.tile) < 2:
            return ""
        return "[:, None]" if dim == self.plan.tile[0] else "[None, :]"

    def mask(self, dim: Dim, scope: Scope) -> str:
        """The variable that says where a dimension has elements."""
        name = f"{dim.name}mask"
        index = self.index(dim, scope)
        self._home(dim, scope).head.setdefault(name, f"{index} < {size_text(dim.size)}")
        return name

    def run(self, dim: Dim, first: int, last: int, scope: Scope) -> str:
        """The variable of neighbouring axes of a dimension, walked as one."""
        index = self.index(dim, scope)
        end = len(dim.axes) - 1
        if (first, last) == (0, end):
            return index
        sizes = [self.sizes[axis] for axis in dim.axes]
        name = f"{dim.name}{first}" if first == last else f"{dim.name}{first}{last}"
        code = index
        if last != end:
            code += f" // {size_text(product(sizes[last + 1 :]))}"
        if first != 0:
            code += f" % {size_text(product(sizes[first : last + 1]))}"
        self._home(dim, scope).head.setdefault(name, code)
        return name

    def terms(self, index: Index, dim: Dim, scope: Scope, form: str = "{}") -> list[str]:
        """What a dimension adds to an offset: one term for each run of axes that memory is walked along evenly."""
        terms = []
        last = len(dim.axes) - 1
        while last >= 0:
            stride = index.stride(dim.axes[last])
            first, reach = last, product([stride, self.sizes[dim.axes[last]]])
            while stride != 0 and first > 0 and index.stride(dim.axes[first - 1]) == reach:
                first -= 1
                reach = product([reach, self.sizes[dim.axes[first]]])
            if stride != 0:
                run = form.format(self.run(dim, first, last, scope))
                terms.append(run if stride == 1 else f"{run} * {size_text(stride)}")
            last = first - 1
        return terms[::-1]

    def quads(self, dim: Dim, scope: Scope) -> str:
        """The variable for a quarter of the positions along a dimension, those of every fourth divided by four."""
        start = self._start(dim)
        block = f"tl.arange(0, {dim.block_name} // 4){self._along(dim)}"
        name = f"{dim.name}_quads"
        self._home(dim, scope).head.setdefault(name, f"{start} // 4 + {block}" if start else block)
        return name


def _blocks(dim: Dim) -> str:
    block = dim.block_name if dim.block > 1 else "1"
    return f"tl.cdiv({size_text(dim.size)}, {block})"


def size_text(size: Int) -> str:
    """A size, stride or offset as an operand."""
    if isinstance(size, int):
        return str(size)
    text = PythonPrinter().doprint(size)
    return text if isinstance(size, (sympy.Symbol, sympy.Integer)) else f"({text})"
