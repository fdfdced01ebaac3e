"""Small graphs that stand for one operation, written once and copied wherever the operation stands.

A fragment is made by running a Python function of ATen calls on fakes under capture's recorder, which turns what the
function writes in place into values. Its inputs are the operation's tensors, then the symbols their sizes are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.node_meta import meta_of
from weft.capture.record.operands import map_operands
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.symbols import Number
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.operations import op_name
from weft.inductor.graph.sizes import symbols_of

Node = torch.fx.Node


@dataclass
class Fragment:
    """The graph of an operation.

    Attributes:
        graph: placeholders for ``symbols``, then for the operation's tensors; the output node holds the flat results
            (nodes, numbers or None).
        symbols: symbols the graph needs the values of.
    """

    graph: torch.fx.Graph
    symbols: list[sympy.Symbol]

    @property
    def results(self) -> list[Any]:
        """The nodes or constants that the fragment returns, in order."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]


def trace(
    function: Callable[..., Any], node: Node, mode: FakeTensorMode, numbers: Mapping[sympy.Symbol, Number]
) -> Fragment | None:
    """What ``function`` does in the place of ``node``; None where it says NotImplemented, or where it asks about
    sizes what the capture did not. The graph is for other sizes too, and only the data decides some of them.

    Args:
        numbers: each symbol of the operands' sizes as a number.
    """
    recorder = OpRecorder(mode)
    vals = [used.meta["val"] for used in node.all_input_nodes]
    # Without the offsets of views: the operands of a fragment lie at the beginning of memory of their own.
    layouts = [[*val.shape, *val.stride()] if isinstance(val, torch.Tensor) else val for val in vals]
    symbols = sorted(symbols_of(layouts), key=str)
    for symbol in symbols:
        recorder.scalar_input(numbers[symbol], str(symbol))
    with torch.no_grad(), torch_adapter.only_mode(mode):
        operands = {used: _stand_in(recorder, used.meta["val"]) for used in node.all_input_nodes}
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: operands[used])
        with recorder, torch_adapter.assuming_nothing(mode.shape_env) as answered:
            try:
                out = function(*args, **kwargs)
            except torch_adapter.data_dependent_errors():
                return None
    if out is NotImplemented or answered:
        return None
    recorder.graph.output([recorder.value(value) for value in (out if isinstance(out, (list, tuple)) else [out])])
    return Fragment(recorder.graph, symbols)


def _stand_in(recorder: OpRecorder, val: Any) -> Any:
    """A tensor like ``val`` in memory of its own, as an input of the recorder; numbers are what they are."""
    if not isinstance(val, torch.Tensor):
        return val
    # Memory of its own: views between operands would become part of the fragment, which serves other nodes too.
    like = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    recorder.new_operand(like, "operand")
    return like


def instantiate(
    fragment: Fragment, graph: torch.fx.Graph, node: Node, sizes: list[Node], mode: FakeTensorMode
) -> list[Any]:
    """Write the fragment into ``graph`` before ``node``, for which it stands; returns its results.

    Each copy has fakes of its own: what lies in one memory in the fragment does so in the copy, and nothing else does.

    Args:
        sizes: nodes that compute the values of ``fragment.symbols``.
    """
    tensors = [used for used in node.all_input_nodes if isinstance(used.meta["val"], torch.Tensor)]
    placeholders = [original for original in fragment.graph.nodes if original.op == "placeholder"]
    copies: dict[Node, Any] = dict(zip(placeholders, [*sizes, *tensors], strict=True))
    with graph.inserting_before(node):
        for original in fragment.graph.nodes:
            if original.op != "call_function":
                continue
            name = op_name(original).rpartition("::")[2]
            args, kwargs = torch.fx.node.map_arg((original.args, original.kwargs), lambda used: copies[used])
            copy = graph.create_node("call_function", original.target, args, kwargs, name=name or None)
            copy.meta = meta_of(node, val=_own_fake(original, copy, mode))
            if "effect" in original.meta:
                copy.meta["effect"] = True
            copies[original] = copy
    return [copies[result] if isinstance(result, Node) else result for result in fragment.results]


def _own_fake(original: Node, copy: Node, mode: FakeTensorMode) -> Any:
    if looks_into(original):
        args, kwargs = torch.fx.node.map_arg((copy.args, copy.kwargs), lambda used: used.meta["val"])
        view: Any = copy.target
        with torch_adapter.only_mode(mode):
            return view(*args, **kwargs)
    return map_operands(original.meta.get("val"), lambda val: _like(val, mode))


def _like(val: Any, mode: FakeTensorMode) -> Any:
    """A fake of the same sizes, strides and dtype in memory of its own."""
    if not isinstance(val, FakeTensor):
        return val
    return torch_adapter.fake_like(mode, val)


def base_of(node: Any) -> Any:
    """What ``node`` looks into, by however many views."""
    while isinstance(node, Node) and looks_into(node):
        node = node.args[0]
    return node
