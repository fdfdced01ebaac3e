"""Calls written into a graph one by one, each with the fake value of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.node_kinds import is_wait
from weft.capture.node_meta import meta_of
from weft.inductor.graph.sizes import tensors_of

Node = torch.fx.Node
Emit = Callable[..., Node]


def emitter(graph: torch.fx.Graph, like: Node) -> Emit:
    """A function of an operation and its operands that appends the call where ``graph`` inserts, and returns its node.

    Nodes get the user's lines, the module and the stage of ``like``, and fakes of its mode.
    """

    def emit(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        with torch_adapter.only_mode(_mode_of(like)):
            arguments, named = torch.fx.node.map_arg((args, kwargs), lambda used: used.meta["val"])
            val = arguments[0] if is_wait(node) else target(*arguments, **named)  # a wait hands back what it is given
        node.meta = meta_of(like, val=val)
        return node

    return emit


def _mode_of(node: Node) -> Any:
    fake: Any = tensors_of(node)[0]
    return fake.fake_mode
