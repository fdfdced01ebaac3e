"""Tensors that a step makes from Python numbers: ``torch.tensor([1.0, 2.0])``.

Such a literal is a real tensor, because torch makes it below all modes. It becomes an input of the graph, read anew by
each call. What the step writes to it belongs to one call: ``total = torch.tensor(0.0); total += loss`` must start from
zero each time. So the tensor that the step works with is tracked in a storage of its own, whose first value is the
input, and a write to it is not an update of the input. A literal that leaves the step is copied, because the caller
may write to what it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter

aten = torch.ops.aten
LIFTS = (aten.lift_fresh.default, aten.lift.default)


class Literals:
    """The literals of one capture.

    Args:
        emit_first: makes a call that stands before all operations of the graph.
    """

    def __init__(self, emit_first: Callable[..., torch.fx.Node]) -> None:
        self._emit_first = emit_first
        self._literals: list[tuple[torch.fx.Node, dict[str, Any]]] = []

    def add(self, placeholder: torch.fx.Node, val: torch.Tensor, **origin: Any) -> None:
        """Note a literal: its input, the fake tensor that the step works with, and metadata of the user's line."""
        self._literals.append((placeholder, {"val": val, "stage": "forward", **origin}))

    def copy_escaping(self, results: list[Any]) -> list[Any]:
        """The results of the graph, with a copy of each literal whose memory they share."""
        shared = [torch_adapter.storage_key(node.meta["val"]) for node in results if _is_tensor(node)]
        for literal, meta in self._literals:
            if literal in results or torch_adapter.storage_key(meta["val"]) in shared:
                copy = self._emit_first(aten.clone.default, literal)
                copy.meta.update(meta)
                literal.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
                results = [copy if node is literal else node for node in results]
        return results


def is_literal(tensor: torch.Tensor) -> bool:
    """Whether a tensor to be lifted was made from Python numbers, and does not share the memory of a numpy array."""
    return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().resizable()


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
