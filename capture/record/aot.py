"""Converts a graph of AOTAutograd to a StepGraph, for ``torch.compile(model, backend="weft")``.

AOTAutograd gives functional graphs of ATen operations, one for forward and one for backward, with fake tensors in the
metadata of their nodes. This module adds the meaning of inputs and outputs. Sizes and other numbers become scalars. A
``copy_`` into an input at the end becomes an ``Update``. Tensors that the graph holds as attributes become inputs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_meta import meta_of
from weft.capture.record.functional_ops import executable_form
from weft.capture.record.group_names import canonical_groups
from weft.capture.record.readable_names import readable_name
from weft.capture.step_interface import Input, Output, Return, Role, Update
from weft.capture.user_code import Frame
from weft.errors import UncapturableMutation
from weft.source_files import is_user_file
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

_COPY = torch.ops.aten.copy_.default
_LINE = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """An input of the model's graph: its path as the user would write it, and its role."""

    path: str
    role: Role


class Subgraph:
    """A branch or body of a higher-order operation (``cond``, ``while_loop``). It runs operation by operation."""

    def __init__(self, module: torch.fx.GraphModule, name: str) -> None:
        self.module = module
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def __repr__(self) -> str:
        return self.__name__


def dynamo_sources(module: torch.fx.GraphModule) -> list[Source]:
    """Path and role of each input of a graph of Dynamo, in order."""
    return [_source(node) for node in module.graph.nodes if node.op == "placeholder"]


def step_graph(module: torch.fx.GraphModule, sources: Sequence[Source]) -> tuple[StepGraph, list[torch.Tensor]]:
    """The StepGraph of one graph of AOTAutograd, and the constant tensors that are its last inputs in every call.

    Args:
        module: forward, backward or inference graph; it is not changed.
        sources: path and role of the inputs of the model's graph (:func:`dynamo_sources`).

    Raises:
        UncapturableMutation: the graph writes to anything but its inputs.
        MalformedGraph: the result is not a valid StepGraph.
    """
    return _Conversion(module, sources).run()


class _Conversion:
    def __init__(self, module: torch.fx.GraphModule, sources: Sequence[Source]) -> None:
        self.module = module
        self.sources = sources
        self.graph = torch.fx.Graph()
        self.values: dict[Node, Any] = {}
        self.inputs: list[Input] = []
        self.outputs: list[Output] = []
        self.results: list[Any] = []
        self.constants: list[torch.Tensor] = []

    def run(self) -> tuple[StepGraph, list[torch.Tensor]]:
        nodes = list(self.module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.values[node] = self._input(_described(node, self.sources), node.meta.get("val"))
        for node in nodes:
            if node.op == "get_attr":
                self.values[node] = self._attribute(node)
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
        self._return(nodes[-1].args[0])
        groups = canonical_groups(self.graph)
        return StepGraph(self.graph, self.inputs, self.outputs, groups).check(), self.constants

    def _input(self, source: Source, val: Any) -> Node:
        node = self.graph.placeholder(readable_name(source.path))
        node.meta["val"] = val
        role = source.role if isinstance(val, torch.Tensor) else Role.SCALAR
        self.inputs.append(Input(node.name, role, source.path))
        return node

    def _attribute(self, node: Node) -> Any:
        """An attribute of the graph. A tensor becomes an input; another object becomes an operand of its users."""
        attribute: Any = self.module
        for name in str(node.target).split("."):
            attribute = getattr(attribute, name)
        if isinstance(attribute, torch.fx.GraphModule):
            return Subgraph(attribute, str(node.target))
        if not isinstance(attribute, torch.Tensor):
            return attribute
        self.constants.append(attribute)
        return self._input(Source(str(node.target), Role.BUFFER), self._fake(attribute))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        known = (node.meta.get("val") for node in self.module.graph.nodes)
        mode = next((val.fake_mode for val in known if isinstance(val, FakeTensor)), None) or FakeTensorMode()
        return mode.from_tensor(tensor, static_shapes=True)

    def _call(self, node: Node) -> None:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        target = node.target
        if target is _COPY and isinstance(args[0], Node) and args[0].op == "placeholder":
            self.outputs.append(Update(args[0].name))
            self.results.append(args[1])
            self.values[node] = args[1]
            return
        if isinstance(target, OpOverload):
            if target._schema.is_mutable:
                raise UncapturableMutation(f"{target} at {_line(node)}: the graph writes to a tensor that is no input")
            target = executable_form(target)
        call = self.graph.create_node("call_function", target, args, kwargs, name=node.name)
        own = {"frames": _frames(node), "module": _module(node), "stage": _stage(node)}
        call.meta = meta_of((), val=node.meta.get("val"), **own)
        if node.is_impure(impure_random=False):
            call.meta["effect"] = True
        self.values[node] = call

    def _return(self, returned: Sequence[Any]) -> None:
        for value in returned:
            self.outputs.append(Return(len(self.results)))
            self.results.append(self.values[value] if isinstance(value, Node) else value)
        self.graph.output(tuple(self.results))


def _source(node: Node) -> Source:
    path = _as_user_writes(torch_adapter.dynamo_source(node) or node.name)
    if isinstance(node.meta.get("example_value"), torch.nn.Parameter):
        return Source(path, Role.PARAMETER)
    return Source(path, Role.BUFFER if "_buffers" in (torch_adapter.dynamo_source(node) or "") else Role.BATCH)


def _described(node: Node, sources: Sequence[Source]) -> Source:
    at = torch_adapter.aot_input_index(node)
    if at is not None and at < len(sources):
        return sources[at]
    return Source(node.name, Role.BATCH)


def _as_user_writes(source: str) -> str:
    """``self.layer.weight`` for ``L['self']._modules['layer']._parameters['weight']``."""
    source = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source)
    return re.sub(r"(?:\._(?:modules|parameters|buffers))?\['(\w+)'\]", r".\1", source)


def _frames(node: Node) -> tuple[Frame, ...]:
    lines = _LINE.findall(node.meta.get("stack_trace") or "")
    frames = [Frame(filename, int(line), name) for filename, line, name in reversed(lines)]
    return tuple(frame for frame in frames if is_user_file(frame.filename))


def _line(node: Node) -> str:
    frames = _frames(node)
    return f"{frames[0].filename}:{frames[0].lineno}" if frames else "an unknown line"


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return _as_user_writes(list(stack.values())[-1][0]) if stack else ""


def _stage(node: Node) -> str:
    return "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
