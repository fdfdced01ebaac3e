"""Symbolic numbers of a captured graph, and the nodes that compute them.

Three kinds of numbers are symbols of torch's ``ShapeEnv``: the size of an input that is dynamic, a number that the
data decides at run time (``.item()``, ``.tolist()``, the length of ``nonzero``), and a Python number that changes from
step to step (the learning rate). Torch does arithmetic with them as sympy expressions. :class:`Symbols` knows the node
of each symbol and writes expressions as nodes where an operation takes one as operand.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

from weft import torch_adapter
from weft.capture.user_code import Frame, RunningCall, format_frame, running_call

log = logging.getLogger(__name__)

Number = torch.SymInt | torch.SymFloat | torch.SymBool
_UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def _call(function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """A node that calls ``function``. Calling Python's own conversions on a proxy would ask it for a number."""
    return x.tracer.create_proxy("call_function", function, (x, *args), {})


class _Arithmetic(PythonReferenceAnalysis):
    """Interprets sympy expressions as calls of Python functions; replaces methods of torch's that no graph can call."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def to_dtype(x: Any, dtype: torch.dtype) -> Any:
        return _call(torch.sym_float, x) if dtype is torch.float64 else PythonReferenceAnalysis.to_dtype(x, dtype)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.trunc, x)

    @staticmethod
    def round_to_int(a: Any, dtype: torch.dtype) -> Any:
        return _call(round, a)

    @staticmethod
    def round_decimal(a: Any, b: Any) -> Any:
        return _call(round, a, b)

    @staticmethod
    def expr_cond_pair(expr: Any, cond: Any) -> Any:
        return expr, cond

    @staticmethod
    def piecewise(*pairs: Any) -> Any:
        result = pairs[-1][0]
        for value, condition in reversed(pairs[:-1]):
            result = _call(torch.sym_ite, condition, value, result)
        return result


class _StampingTracer(torch.fx.proxy.GraphAppendingTracer):
    def __init__(self, graph: torch.fx.Graph, stamp: Callable[[torch.fx.Node], None]) -> None:
        super().__init__(graph)
        self._stamp = stamp

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        self._stamp(node)
        return node


@dataclass(frozen=True)
class Computed:
    """How a symbol is computed: ``function`` of plain and symbolic numbers."""

    function: Callable[..., Any]
    operands: list[Any]


class Symbols:
    """The node of each symbol of a graph, and expressions over symbols as nodes.

    Args:
        shape_env: where the symbols come from.
        graph: the graph that expressions are appended to.
        stamp: sets the metadata of each new node of an expression.

    Attributes:
        computed: the symbols that are results of one operation on other numbers, in the order in which they were made.
        booleans: the symbols that are booleans, as 0 and 1.
    """

    def __init__(
        self, shape_env: ShapeEnv, graph: torch.fx.Graph, stamp: Callable[[torch.fx.Node], None] = lambda node: None
    ) -> None:
        self.shape_env = shape_env
        self._tracer = _StampingTracer(graph, stamp)
        self._origins: dict[sympy.Symbol, Callable[[], torch.fx.Node]] = {}
        self._read_by: dict[sympy.Symbol, tuple[RunningCall | None, bool]] = {}
        self._nodes: dict[sympy.Expr, torch.fx.Node] = {}
        self._asserted: set[Any] = set()
        self.computed: dict[sympy.Symbol, Computed] = {}
        self.booleans: set[sympy.Symbol] = set()

    def define(self, value: Number, origin: Callable[[], torch.fx.Node], *, is_size: bool = False) -> None:
        """Define the symbol behind ``value``; ``origin`` makes its node when it is first needed.

        Args:
            is_size: whether it is a size or stride of a result, not the result itself.
        """
        expr = value.node.expr
        if isinstance(expr, sympy.Eq) and expr.args[1] == 1:  # a bool is the question whether a number is 1
            expr = expr.args[0]
            self.booleans.add(expr)
        if isinstance(expr, sympy.Symbol) and expr not in self._origins:
            self._origins[expr] = origin
            if symbol_is_type(expr, _UNBACKED):
                self._read_by[expr] = running_call(), is_size

    def define_sizes(self, val: torch.Tensor, node: torch.fx.Node, emit: Callable[..., torch.fx.Node]) -> None:
        """Define the symbols among the sizes and strides of ``val``, the fake result of ``node``."""
        for op, numbers in ((torch.ops.aten.sym_size.int, val.shape), (torch.ops.aten.sym_stride.int, val.stride())):
            for dim, size in enumerate(numbers):
                if isinstance(size, torch.SymInt):
                    self.define(size, lambda op=op, dim=dim, size=size: emit(op, node, dim, val=size), is_size=True)

    def node(self, value: Number) -> torch.fx.Node | int | float | bool:
        """The node that computes ``value``, or the number itself where it is constant."""
        expr = value.node.expr
        if expr.is_number or expr in (sympy.true, sympy.false):
            return value.node.pytype(expr)
        node = self.expression(expr)
        if not isinstance(expr, sympy.Symbol):
            node.meta["val"] = value
        return node

    def expression(self, expr: Any) -> Any:
        """Like :meth:`node` for a sympy expression over defined symbols; equal expressions share a node."""
        if not expr.free_symbols:
            return bool(expr) if expr in (sympy.true, sympy.false) else expr
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._nodes:
                self._nodes[symbol] = self._origins[symbol]()
        if expr not in self._nodes:
            env = {symbol: torch.fx.Proxy(self._nodes[symbol], self._tracer) for symbol in expr.free_symbols}
            with torch_adapter.torch_functions():  # proxies see calls through them
                self._nodes[expr] = sympy_interp(_Arithmetic, env, expr).node
        return self._nodes[expr]

    def shown(self, expr: Any, names: Mapping[sympy.Symbol, str] | None = None) -> str:
        """An expression as Python text, with ``names`` in the place of symbols."""
        text = PythonPrinter().doprint(expr)
        by_text = {str(symbol): name for symbol, name in (names or {}).items()}
        return re.sub(r"\b\w+\b", lambda word: by_text.get(word[0], word[0]), text)

    def names(self, symbols: Sequence[sympy.Symbol]) -> list[str]:
        """A name for each symbol, no two alike: the call that read it, as the user wrote it."""
        texts = [self.described(symbol, lines=False) for symbol in symbols]
        several = [f"{text} ({texts[:at].count(text) + 1})" for at, text in enumerate(texts)]
        return [each if texts.count(text) > 1 else text for text, each in zip(texts, several, strict=True)]

    def described(self, symbol: sympy.Symbol, frame: Frame | None = None, *, lines: bool = True) -> str:
        """A data-dependent number as the user knows it: the call that read it, with its line.

        Args:
            frame: a line that the message names anyway.
            lines: whether to name lines at all.
        """
        if symbol in self.computed:
            texts = [self.described(root, frame, lines=lines) for root in self.roots([symbol])]
            return f"a number computed from {' and '.join(dict.fromkeys(texts))}"
        expression, is_size = self._read_by.get(symbol, (None, False))
        if expression is None or not (text := expression.text()):
            return "a number that only the data decides" if symbol in self._read_by else str(symbol)
        line = Frame(expression.code.co_filename, expression.lineno, expression.code.co_name)
        where = "" if line == frame or not lines else f" at {format_frame(line)}"
        return f"{'a size of ' if is_size else ''}`{text}`{where}"

    def roots(self, symbols: Iterable[sympy.Symbol]) -> list[sympy.Symbol]:
        """The symbols that these were computed from, in the order of their names."""
        found, pending = set(), list(symbols)
        while pending:
            symbol = pending.pop()
            made = self.computed.get(symbol)
            if made is None:
                found.add(symbol)
            for operand in made.operands if made is not None else ():
                if isinstance(operand, Number):
                    pending += torch_adapter.expression(operand).free_symbols
        return sorted(found, key=str)

    def new_assumptions(self) -> Iterator[tuple[Any, ...]]:
        """What torch has assumed about data-dependent numbers since the last call: operands of
        :func:`weft.capture.record.runtime_checks.check`."""
        for expr, _ in torch_adapter.new_runtime_asserts(self.shape_env, self._asserted):
            if all(map(self.knows, expr.free_symbols)):
                symbols = sorted(expr.free_symbols, key=str)
                # Without files and lines: ranks compare the arguments of nodes, and may have other paths.
                names = self.names(symbols)
                shown = self.shown(expr, dict(zip(symbols, names, strict=True)))
                yield self.expression(expr), shown, "\n".join(names), *map(self.expression, symbols)

    def end_segment(self) -> list[torch.fx.Node]:
        """The nodes of all numbers that the data decides; what was computed from them is computed anew from here on."""
        for symbol in [each for each in self._origins if symbol_is_type(each, _UNBACKED) and each not in self._nodes]:
            self._nodes[symbol] = self._origins[symbol]()
        self._nodes = {each: node for each, node in self._nodes.items() if isinstance(each, sympy.Symbol)}
        crosses = lambda symbol: symbol_is_type(symbol, _UNBACKED) or symbol in self.computed
        return [node for symbol, node in self._nodes.items() if crosses(symbol)]

    def end(self) -> None:
        """Let go of what would make nodes: it holds numbers."""
        self._origins.clear()

    def knows(self, symbol: sympy.Symbol) -> bool:
        """Whether the symbol is defined."""
        return symbol in self._origins or symbol in self._nodes
