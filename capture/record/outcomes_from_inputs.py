"""Conditions of branches that depend on inputs alone: ``mask.all()``, ``lengths.max().item()``, ``step.item() > 5``.

A capture ends at a branch whose outcome it does not know, and each costs another capture. Masks, lengths and token ids
are there before the step runs, and so are numbers that tensors of the state hold on the host: counts of steps, of which
an optimizer has one for each parameter. Conditions on them are computed at once, by the operations that were recorded.
Conditions on parameters are computed where they take a few operations: Adafactor of transformers branches on the norm
of each. All others are left to the program: what they depend on is mostly computed by the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from weft import torch_adapter
from weft.capture.node_kinds import is_random
from weft.capture.record.array_calls import NumpyCall
from weft.capture.segments import Outcome
from weft.torch_adapter import OpOverload

MOST_OPERATIONS = 8
"""At most how many operations are computed for a condition on parameters: more may be a part of the model."""

# Modules of functions of numbers: comparisons and arithmetic, and torch's own for symbolic ones.
_OF_NUMBERS = frozenset({"_operator", "builtins", "math", "operator", "torch"})


class _Unknown(Exception):
    """A value that depends on more than the inputs, or that must not be computed here."""


def is_host_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one number in the host's memory."""
    return type(tensor) is torch.Tensor and not tensor.dim() and tensor.device.type == "cpu" and tensor.is_leaf


def outcome_from(value: Any, inputs: Mapping[torch.fx.Node, torch.Tensor], most: float = math.inf) -> Outcome | None:
    """The outcome of a branch on the node ``value``; None where ``inputs`` alone do not give it.

    Args:
        inputs: placeholders, with the tensors that they stand for in the captured call.
        most: how many operations may be computed for it.
    """
    computed: dict[torch.fx.Node, Any] = {}

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, torch.fx.Node):
            return of(leaf)
        return _value_in_call(leaf)

    def of(node: torch.fx.Node) -> Any:
        if node not in computed:
            if node in inputs:
                return inputs[node]
            if _is_number(node):
                return _value_in_call(node.meta["val"])
            args, kwargs = (torch.fx.node.map_aggregate(each, plain) for each in (node.args, node.kwargs))
            computed[node] = node.target(*args, **kwargs)  # type: ignore[operator,misc]
        return computed[node]

    if not isinstance(value, torch.fx.Node) or not _can_be_computed(value, inputs, most):
        return None
    with torch.no_grad(), torch_adapter.real_tensors(), torch_adapter.no_torch_function_modes():
        try:
            outcome = of(value)
        except Exception:  # noqa: BLE001 (what cannot be computed here, the program computes)
            return None
    return outcome if type(outcome) in (bool, int) else None


def _can_be_computed(value: torch.fx.Node, inputs: Mapping[torch.fx.Node, torch.Tensor], most: float) -> bool:
    """Whether at most so many operations, and none with an effect, lead from the inputs to a node."""
    operations: set[torch.fx.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node in operations or node in inputs or _is_number(node):
            continue
        operations.add(node)
        if len(operations) > most or not _is_pure(node):
            return False
        pending += node.all_input_nodes
    return True


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a node is a Python number that changes from call to call."""
    return node.op == "placeholder" and isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat))


def _value_in_call(leaf: Any) -> Any:
    """The value that a symbolic number has in the captured call; anything else as it is."""
    if not isinstance(leaf, (torch.SymInt, torch.SymFloat)):
        return leaf
    if not leaf.node.has_hint():
        raise _Unknown
    return leaf.node.hint


def _is_pure(node: torch.fx.Node) -> bool:
    if isinstance(node.target, NumpyCall):
        return node.target.is_pure
    if node.op != "call_function" or node.meta.get("effect") or is_random(node):
        return False
    if isinstance(node.target, OpOverload):
        return node.target.namespace == "aten" and not node.target._schema.is_mutable
    return getattr(node.target, "__module__", None) in _OF_NUMBERS
