"""Constant folding of ``.item()`` and ``.tolist()``: numbers that Python reads from a tensor, equal at every call.

Libraries look at positions that they have just made by ``arange`` to see whether a sequence is packed. They put sizes
into ``torch.tensor([...])``, join them by ``cat`` and read them back. They draw a random number to decide whether a
layer is dropped, with probability 0. None of this depends on an input of the step. The capture computes such numbers at
once from the nodes of the graph, so that the step's Python may branch on them, and use them as sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from weft import torch_adapter
from weft.capture.node_kinds import is_random
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
_COMPARISONS = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}
_LARGEST_DRAW = math.nextafter(1.0, 0.0)


Literals = dict[Node, torch.Tensor]


def constant_scalar(node: Node, literals: Literals) -> Any:
    """The number in the one-element tensor that ``node`` computes; None where inputs or random draws decide it.

    Args:
        literals: by placeholder, each tensor that the step makes from Python numbers.
    """
    compared = _compared_draw(node)
    if compared is not None:
        return compared
    return constant_numbers(node, literals, torch.Tensor.item)


def constant_numbers(node: Node, literals: Literals, read: Callable[[torch.Tensor], Any] = torch.Tensor.tolist) -> Any:
    """What ``read`` gives for the tensor that ``node`` computes; None where inputs or random draws decide it."""
    sources = _constant_sources(node, literals)
    return None if sources is None else _computed(sources, literals, read)


def _compared_draw(node: Node) -> bool | None:
    """The result of comparing a draw from [0, 1) with a bound, where every draw gives the same; else None."""
    compare = _COMPARISONS.get(node.target)  # type: ignore[arg-type]
    if compare is None:
        return None
    draw, bound = node.args
    if not isinstance(draw, Node) or draw.target is not aten.rand.default or not isinstance(bound, (int, float)):
        return None
    of_smallest, of_largest = compare(0.0, bound), compare(_LARGEST_DRAW, bound)
    return of_smallest if of_smallest == of_largest else None


def _constant_sources(node: Node, literals: Literals) -> list[Node] | None:
    """All nodes that ``node`` is computed from, in order, itself last; None where one of them is not constant."""
    found: dict[Node, None] = {}
    pending = [node]
    while pending:
        current = pending[-1]
        if current in found:
            pending.pop()
            continue
        if current not in literals and not _is_constant(current):
            return None
        missing = [used for used in current.all_input_nodes if used not in found]
        if not missing:
            found[pending.pop()] = None
        pending += missing
    return list(found)


def _is_constant(node: Node) -> bool:
    """Whether the operation of a node gives equal results for equal operands at every call."""
    if node.target is operator.getitem:
        return True
    aten_kernel = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    return aten_kernel and not is_random(node) and not node.meta.get("effect")


def _computed(nodes: list[Node], literals: Literals, read: Callable[[torch.Tensor], Any]) -> Any:
    values: dict[Node, Any] = {}
    with torch_adapter.only_mode(), torch.no_grad(), torch_adapter.no_autocast():
        for node in nodes:
            if node in literals:
                values[node] = literals[node]
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return read(values[nodes[-1]])
