"""Write StepGraphs by hand, as a capture would write them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from weft.capture.graph import StepGraph
from weft.capture.record.functional_ops import written_arguments
from weft.capture.step_interface import Create, Input, Output, Return, Role, Update
from weft.capture.user_code import Frame, user_frames

Node = torch.fx.Node


def _frames() -> tuple[Frame, ...]:
    return tuple(frame for frame in user_frames(4) if frame.filename != __file__)


class StepBuilder:
    """Appends nodes to a graph; fakes stand for the values and share storages as eager tensors would."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.mode = FakeTensorMode()
        self.inputs: list[Input] = []
        self.outputs: list[Output] = []
        self.results: list[Any] = []

    def input(self, value: Any, role: Role = Role.PARAMETER) -> Node:
        """A placeholder for a real tensor or a number."""
        node = self.graph.placeholder(f"in_{len(self.inputs)}")
        node.meta["val"] = self.mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
        self.inputs.append(Input(node.name, role, node.name))
        return node

    def call(self, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> Node:
        """A functional call; ``val`` overrides the fake (a view written back to its base has the base's)."""
        node = self.graph.call_function(target, args, kwargs)
        if val is None:
            fakes = tree_map_only(Node, lambda n: n.meta["val"], (args, kwargs))
            with self.mode:
                val = target(*fakes[0], **fakes[1])
        node.meta.update(val=val, frames=_frames())
        return node

    def write(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """An in-place call: the node (or list of nodes) of the fresh results and of each written argument."""
        what = written_arguments(op)
        assert what is not None
        fakes = tree_map_only(Node, lambda n: n.meta["val"], (args, kwargs))
        with self.mode:
            functional = what.functional(*fakes[0], **fakes[1])
        results = what.fresh + len(what.writes)
        fresh = [] if results == 1 else list(functional[: what.fresh])
        written = [fakes[0][at] if at < len(args) else fakes[1].get(name) for at, name in what.writes]
        vals = [*fresh, *written]
        node = self.call(what.functional, *args, val=vals[0] if results == 1 else vals, **kwargs)
        node.meta["inplace"] = op
        return self.pick(node)

    def pick(self, node: Node) -> Any:
        """The elements of a list as nodes, lists of lists opened too."""
        val = node.meta["val"]
        if not isinstance(val, (list, tuple)):
            return node
        return [self.pick(self.call(operator.getitem, node, at, val=item)) for at, item in enumerate(val)]

    def effect(self, target: Any, *args: Any, val: Any = None) -> Node:
        node = self.graph.call_function(target, args)
        node.meta.update(val=val, effect=True, frames=_frames())
        return node

    def update(self, placeholder: Node, value: Node) -> None:
        self.outputs.append(Update(placeholder.name))
        self.results.append(value)

    def create(self, value: Any) -> None:
        self.outputs.append(Create("created"))
        self.results.append(value)

    def returns(self, *values: Any) -> None:
        for value in values:
            self.outputs.append(Return(len(self.results)))
            self.results.append(value)

    def build(self, groups: dict[str, str] | None = None) -> StepGraph:
        self.graph.output(tuple(self.results))
        return StepGraph(self.graph, self.inputs, self.outputs, groups or {}).check()
