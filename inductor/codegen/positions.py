"""Index variables of a kernel: positions along its dimensions, and the masks of their tails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy
from torch.utils._sympy.printers import PythonPrinter

from weft.inductor.codegen.expressions import Text
from weft.inductor.codegen.kernel_plan import Dim, KernelPlan, product
from weft.inductor.loop_ir.ir import Index, Int, Value


class Scope:
    """A block of statements: the function's body, or that of a loop.

    Args:
        goes_on: a block that this one appends its statements to; only the names of values are its own.
    """

    def __init__(self, outer: Scope | None = None, goes_on: Scope | None = None) -> None:
        self.outer = outer
        # Index variables and masks: name -> expression.
        # In the order of their definition, and each once: index variables may refer to earlier ones.
        self.head: dict[str, str] = {} if goes_on is None else goes_on.head
        self.lines: list[str] = [] if goes_on is None else goes_on.lines
        self.names: dict[Value, Text] = {}

    def text(self, value: Value) -> Text:
        """How a value that was computed is written."""
        # Outwards only: a name inside a loop has another value in each iteration, and means nothing behind the loop.
        if value in self.names or self.outer is None:
            return self.names[value]
        return self.outer.text(value)

    def statements(self) -> list[str]:
        """The lines of the block, index variables first."""
        return [*(f"{name} = {code}" for name, code in self.head.items()), *self.lines]


class Positions:
    """Writes index variables. Each is defined on first use, at the head of its block, so unused ones do not appear.

    Args:
        sizes: of the nest's axes.
        body: the function's own block.
    """

    def __init__(self, plan: KernelPlan, sizes: Sequence[Int], body: Scope) -> None:
        self.plan, self.sizes, self.body = plan, sizes, body

    def tile(self, axes: Iterable[int]) -> frozenset[Dim]:
        """The dimensions of a tile that changes along ``axes``."""
        return self.plan.dims_of(frozenset(axes)) & frozenset(self.plan.tile)

    def shape(self, dims: frozenset[Dim]) -> str:
        """The shape of a tile along ``dims``, as it is written."""
        if not dims:
            return "[]"
        # Size 1 along the others, so that tiles broadcast against each other as NumPy's arrays do.
        return f"[{', '.join(dim.block_name if dim in dims else '1' for dim in self.plan.tile)}]"

    def _home(self, dim: Dim, scope: Scope) -> Scope:
        # The index of a loop changes with each iteration; all others are computed once, before any loop.
        # Loop-invariant code motion is done here, by the place of the definition; the interpreter has none.
        return scope if dim.tiling == "loop" else self.body

    def index(self, dim: Dim, scope: Scope) -> str:
        """The variable that says where along a dimension the program is."""
        head = self._home(dim, scope).head
        if dim.name not in head and (start := self._start(dim)) is not None:
            offsets = f"tl.arange(0, {dim.block_name}){self._along(dim)}"
            code = offsets if not start else f"{start} + {offsets}" if dim.block > 1 else start
            # `tl.arange` is int32. A grid's index is wide by its `program_id`, which is cast instead.
            if dim.wide and dim.tiling != "grid":
                code = f"tl.full([], {start}, tl.int64)" if dim.block == 1 else f"({code}).to(tl.int64)"
            head[dim.name] = code
        return dim.name

    def _start(self, dim: Dim) -> str | None:
        """Where a dimension's block starts; None where the loop's variable is the index."""
        if dim.tiling == "whole":
            return ""
        if dim.tiling == "loop":
            return f"{dim.name}_start" if dim.block > 1 or dim.wide else None
        block = self._program(dim)
        return f"{block} * {dim.block_name}" if dim.block > 1 else block

    def _program(self, dim: Dim) -> str:
        """Which block of a dimension the program takes."""
        # Grids are launched along one axis, as CUDA limits the others to 65,535 programs.
        # So a program divides its number into the blocks of each dimension, as an index of a row-major array is taken
        # apart.
        grid = self.plan.grid
        # Cast before the product with the block, which is where 32 bits would overflow.
        pid = "tl.program_id(0).to(tl.int64)" if any(other.wide for other in grid) else "tl.program_id(0)"
        if len(grid) == 1:
            return pid
        self.body.head.setdefault("pid", pid)
        at = grid.index(dim)
        for other in grid[: at + 1][: len(grid) - 1]:
            self.body.head.setdefault(f"{other.name}_blocks", _blocks(other))
        # Fastest dimension first; the slowest needs no remainder.
        inner = [f"{other.name}_blocks" for other in grid[:at]]
        code = " // ".join(["pid", *inner])
        return code if at == len(grid) - 1 else f"{code} % {dim.name}_blocks"

    def _along(self, dim: Dim) -> str:
        if len(self.plan.tile) < 2:
            return ""
        # Tiles have two dimensions at most.
        return "[:, None]" if dim == self.plan.tile[0] else "[None, :]"

    def mask(self, dim: Dim, scope: Scope) -> str:
        """The variable that says where a dimension has elements."""
        name = f"{dim.name}mask"
        index = self.index(dim, scope)
        # `setdefault`: the mask is one comparison for all accesses of the block.
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
        # Dividing by the sizes inside, then the remainder by the run's own size; the outermost run needs no
        # remainder.
        if last != end:
            code += f" // {size_text(product(sizes[last + 1 :]))}"
        if first != 0:
            code += f" % {size_text(product(sizes[first : last + 1]))}"
        self._home(dim, scope).head.setdefault(name, code)
        return name

    def terms(self, index: Index, dim: Dim, scope: Scope, form: str = "{}") -> list[str]:
        """The terms of a dimension in an offset: one for each run of neighbouring axes with a common stride."""
        terms = []
        last = len(dim.axes) - 1
        # From the innermost axis out, since a run grows outwards as long as strides multiply out.
        while last >= 0:
            stride = index.stride(dim.axes[last])
            first, reach = last, product([stride, self.sizes[dim.axes[last]]])
            # Axes whose strides multiply out are walked by one variable: no division to separate them.
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
    # The text stands inside products and quotients.
    return text if isinstance(size, (sympy.Symbol, sympy.Integer)) else f"({text})"
