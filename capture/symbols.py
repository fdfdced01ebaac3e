"""Sizes and numbers that are not fixed in a captured graph.

Three kinds share one mechanism, a symbol of torch's ShapeEnv with a node of the graph behind it: the size of an input
marked dynamic, a number the tensors decide at run time (``.item()``, ``.tolist()``, the length of ``nonzero``), and a
Python number that changes every step (the learning rate).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from weft import torch_adapter

log = logging.getLogger(__name__)

Number = torch.SymInt | torch.SymFloat | torch.SymBool


def _call(function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """A node that calls ``function``; Python's own conversions ask their operand for a number instead."""
    return x.tracer.create_proxy("call_function", function, (x, *args), {})


class _Arithmetic(PythonReferenceAnalysis):
    """Expressions as calls of functions; for these torch's own has sympy's classes, conversions or methods."""

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
    def round_to_int(a: Any, dtype: torch.dtype) -> Any:
        return _call(round, a)

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


class Symbols:
    """Knows for each symbol which node computes it, and writes expressions over symbols into a graph.

    Args:
        shape_env: where the symbols come from.
        graph: the graph that expressions are appended to.
        stamp: marks each node of an expression with where it came from.
    """

    def __init__(
        self, shape_env: ShapeEnv, graph: torch.fx.Graph, stamp: Callable[[torch.fx.Node], None] = lambda node: None
    ) -> None:
        self.shape_env = shape_env
        self._tracer = _StampingTracer(graph, stamp)
        self._origins: dict[sympy.Symbol, Callable[[], torch.fx.Node]] = {}
        self._nodes: dict[sympy.Expr, torch.fx.Node] = {}

    def define(self, value: Number, origin: Callable[[], torch.fx.Node]) -> None:
        """Say where the symbol behind ``value`` comes from; ``origin`` makes the node when it is first needed."""
        expr = value.node.expr
        if isinstance(expr, sympy.Eq) and expr.args[1] == 1:  # a bool is the question whether a number is 1
            expr = expr.args[0]
        if isinstance(expr, sympy.Symbol):
            self._origins.setdefault(expr, origin)

    def define_sizes(self, val: torch.Tensor, node: torch.fx.Node, emit: Callable[..., torch.fx.Node]) -> None:
        """Say that the symbols among the sizes and strides of ``val`` are those of ``node``."""
        for op, numbers in ((torch.ops.aten.sym_size.int, val.shape), (torch.ops.aten.sym_stride.int, val.stride())):
            for dim, size in enumerate(numbers):
                if isinstance(size, torch.SymInt):
                    self.define(size, lambda op=op, dim=dim, size=size: emit(op, node, dim, val=size))

    def node(self, value: Number) -> torch.fx.Node | int | float | bool:
        """The node that computes ``value``, or the plain number where it is known."""
        expr = value.node.expr
        if expr.is_number or expr in (sympy.true, sympy.false):
            return value.node.pytype(expr)
        node = self.expression(expr)
        if not isinstance(expr, sympy.Symbol):
            node.meta["val"] = value
        return node

    def expression(self, expr: Any) -> Any:
        """Like :meth:`node` for a bare sympy expression over known symbols; each is written once."""
        if not expr.free_symbols:
            return bool(expr) if expr in (sympy.true, sympy.false) else expr
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._nodes:
                self._nodes[symbol] = self._origins[symbol]()
        if expr not in self._nodes:
            env = {symbol: torch.fx.Proxy(self._nodes[symbol], self._tracer) for symbol in expr.free_symbols}
            with torch_adapter.torch_functions():  # by which proxies see calls
                self._nodes[expr] = sympy_interp(_Arithmetic, env, expr).node
        return self._nodes[expr]

    def shown(self, expr: Any) -> str:
        """An expression as a Python programmer would write it."""
        return PythonPrinter().doprint(expr)

    def knows(self, symbol: sympy.Symbol) -> bool:
        return symbol in self._origins or symbol in self._nodes
