"""Numbers that Python asks of a tensor and that are the same at every call.

Libraries look at positions they have just counted out (``arange``) to see whether a sequence is packed, or draw a
number to decide whether a layer is dropped with probability 0. Neither depends on what the step is called with, so a
capture answers at once, as the eager step would be answered.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Node

from weft import torch_adapter
from weft.capture.graph import is_random
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
_COMPARISONS = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}
_LARGEST_DRAW = math.nextafter(1.0, 0.0)


def known_number(node: Node) -> Any:
    """The number in a tensor of one element, None where it depends on an input of the step or on what is drawn."""
    compared = _compared_draw(node)
    if compared is not None:
        return compared
    made_of = _made_of(node)
    return None if made_of is None else _computed(made_of)


def _compared_draw(node: Node) -> bool | None:
    """How a draw from [0, 1) compares with a bound, where the smallest and the largest one compare alike."""
    compare = _COMPARISONS.get(node.target)  # type: ignore[arg-type]
    if compare is None:
        return None
    draw, bound = node.args
    if not isinstance(draw, Node) or draw.target is not aten.rand.default or not isinstance(bound, (int, float)):
        return None
    of_smallest, of_largest = compare(0.0, bound), compare(_LARGEST_DRAW, bound)
    return of_smallest if of_smallest == of_largest else None


def _made_of(node: Node) -> list[Node] | None:
    """All nodes that ``node`` is computed from, itself last; None where they are not constant."""
    found: dict[Node, None] = {}
    pending = [node]
    while pending:
        current = pending[-1]
        if current in found:
            pending.pop()
            continue
        if not _is_constant(current):
            return None
        missing = [used for used in current.all_input_nodes if used not in found]
        if not missing:
            found[pending.pop()] = None
        pending += missing
    return list(found)


def _is_constant(node: Node) -> bool:
    """Whether a node gives the same at every call, as far as its own operation goes."""
    if node.target is operator.getitem:
        return True
    aten_kernel = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    return aten_kernel and not is_random(node) and not node.meta.get("effect")


def _computed(nodes: list[Node]) -> Any:
    values: dict[Node, Any] = {}
    with torch_adapter.only_mode(), torch.no_grad(), torch_adapter.no_autocast():
        for node in nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values[nodes[-1]].item()
