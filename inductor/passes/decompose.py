"""Operations that have no lowering are decomposed into operations that have one.

A decomposition is traced once for each combination of operand sizes, strides, dtypes and constants, and its graph is
copied for every further layer. An operation stays whole where its decomposition would not leave the result that the
graph expects: another layout, or memory that it shares with an operand.

Changes results: the parts of an operation round where the whole did not. In half precision it is mostly the other way
around, since kernels keep intermediate values in float32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft.capture.graph import StepGraph, calls, drop_dead
from weft.capture.node_meta import meta_of
from weft.capture.record.functional_ops import Functionalized
from weft.capture.record.symbols import Number
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.fake_values import take_memory
from weft.inductor.graph.inline_function import Fragment, base_of, instantiate, trace
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.graph.sizes import layout_text, tensors_of
from weft.inductor.passes.decompositions import decompositions, functionalized_decompositions

Node = torch.fx.Node

aten = torch.ops.aten


@changes_bits("the parts of an operation round where the whole did not")
def decompose(step: StepGraph) -> StepGraph:
    """Decompose every operation that :mod:`decompositions` lists. Changes ``step``."""
    mode = next((val.fake_mode for n in step.graph.nodes if isinstance(val := n.meta.get("val"), FakeTensor)), None)
    if mode is not None:
        _Decomposer(mode).run(step.graph, _Sizes(step.graph))
        drop_dead(step.graph)
    return step


class _Sizes:
    """Where in a graph the value of each symbol is to be had.

    Args:
        graph: the graph, of which each symbol is the size of a tensor or a number.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.numbers: dict[sympy.Symbol, Number] = {}
        self._nodes: dict[sympy.Symbol, Node] = {}
        self._places: dict[sympy.Symbol, tuple[Node, int]] = {}
        for node in graph.nodes:
            val = node.meta.get("val")
            if isinstance(val, Number):
                self._note(val, lambda symbol, node=node: self._nodes.setdefault(symbol, node))
            elif isinstance(val, torch.Tensor):
                for dim, size in enumerate(val.shape):
                    self._note(size, lambda symbol, at=(node, dim): self._places.setdefault(symbol, at))

    def _note(self, number: Any, where: Callable[[sympy.Symbol], object]) -> None:
        expr = number.node.expr if isinstance(number, Number) else None
        if isinstance(expr, sympy.Symbol) and expr not in self.numbers:
            self.numbers[expr] = number
            where(expr)

    def node(self, symbol: sympy.Symbol) -> Node:
        """The node that computes ``symbol``, right behind the tensor that has it as a size."""
        if symbol not in self._nodes:
            tensor, dim = self._places[symbol]
            last = next(reversed(self.graph.find_nodes(op="placeholder"))) if tensor.op == "placeholder" else tensor
            with self.graph.inserting_after(last):
                size = self.graph.call_function(aten.sym_size.int, (tensor, dim))
            size.meta = meta_of(tensor, val=self.numbers[symbol])
            self._nodes[symbol] = size
        return self._nodes[symbol]


class _Decomposer:
    """Decomposes graphs over fakes of one mode; knows the fragments it has traced."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.fragments: dict[Hashable, Fragment | None] = {}

    def run(self, graph: torch.fx.Graph, sizes: _Sizes) -> None:
        """Last nodes first: what only a decomposed backward needed of its forward is not asked for any more."""
        for node in reversed(calls(graph)):
            function = _decomposition(node)
            fragment = self._fragment(function, node, sizes) if function is not None else None
            if fragment is not None and _fits(fragment, node):
                numbers = [sizes.node(s) for s in fragment.symbols]
                before = node.prev
                results = instantiate(fragment, graph, node, numbers, self.mode)
                _hand_over(graph, node, results, _between(before, node))

    def _fragment(self, function: Callable[..., Any], node: Node, sizes: _Sizes) -> Fragment | None:
        key = _key(node)
        # Traced once per layout: 32 equal layers copy one fragment.
        if key not in self.fragments:
            fragment = trace(function, node, self.mode, sizes.numbers)
            if fragment is not None:
                self.run(fragment.graph, _Sizes(fragment.graph))
                drop_dead(fragment.graph)
            self.fragments[key] = fragment
        return self.fragments[key]


def _decomposition(node: Node) -> Callable[..., Any] | None:
    # No kernel is generated for results without elements, and torch's decompositions divide by their number.
    results = tensors_of(node)
    if results and all(any(type(size) is int and size == 0 for size in val.shape) for val in results):
        return None
    if isinstance(node.target, Functionalized):
        return functionalized_decompositions().get(node.target.op)
    return decompositions().get(node.target)  # type: ignore[arg-type]


def _results(node: Node) -> dict[int, Node] | None:
    """The nodes that hold the results that are used, by number; None where a user takes the whole list.

    A result that only a backward read which is decomposed already (cuDNN's scratch space) is picked, and not used.
    """
    if not isinstance(node.meta["val"], (list, tuple)):
        return {0: node}
    picked = all(user.target is operator.getitem and type(user.args[1]) is int for user in node.users)
    return {user.args[1]: user for user in node.users if user.users} if picked else None  # type: ignore[misc]


def _fits(fragment: Fragment, node: Node) -> bool:
    """Whether the fragment's results can stand for those of ``node``, in their layout and in memory of their own."""
    wanted = _results(node)
    views = looks_into(node)
    return wanted is not None and all(_is_like(fragment.results[at], use, views) for at, use in wanted.items())


def _is_like(result: Any, wanted: Node, is_view: bool) -> bool:
    if not isinstance(result, Node) or not isinstance(wanted.meta["val"], torch.Tensor):
        return False
    val, ours = wanted.meta["val"], result.meta["val"]
    # A view must stay a view of its operand, and a new tensor new memory: liveness and in-place writes rely on it.
    if is_view != (base_of(result).op == "placeholder"):
        return False
    return layout_text(val) == layout_text(ours) and (
        is_view or str(val.storage_offset()) == str(ours.storage_offset())
    )


def _between(before: Node, node: Node) -> list[Node]:
    """The nodes behind ``before`` and in front of ``node``."""
    nodes, at = [], before.next
    while at is not node:
        nodes.append(at)
        at = at.next
    return nodes


def _hand_over(graph: torch.fx.Graph, node: Node, results: list[Any], copies: list[Node]) -> None:
    """Give the users of ``node`` the results, in the memory that views of them are recorded in.

    Args:
        copies: all nodes that stand for ``node``.
    """
    for at, wanted in (_results(node) or {}).items():
        if "inplace" not in node.meta:
            take_memory(copies, results[at].meta["val"], wanted.meta["val"])
            results[at].meta["val"] = wanted.meta["val"]
        wanted.replace_all_uses_with(results[at])
    for user in list(node.users):
        graph.erase_node(user)
    graph.erase_node(node)


def _key(node: Node) -> Hashable:
    """Everything about the operands that a decomposition may look at."""
    at = {used: index for index, used in enumerate(node.all_input_nodes)}

    def operand(value: Any) -> Hashable:
        if isinstance(value, (list, tuple)):
            return tuple([operand(item) for item in value])
        if isinstance(value, Node):
            val = value.meta["val"]
            return at[value], layout_text(val) if isinstance(val, torch.Tensor) else str(val)
        return type(value), repr(value)

    kwargs = tuple((name, operand(node.kwargs[name])) for name in sorted(node.kwargs))
    return node.target, operand(node.args), kwargs
