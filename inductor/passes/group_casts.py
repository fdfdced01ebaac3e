"""Casts of parameters that follow each other in a step become one cast of them all.

Under autocast, and where shards are gathered in half precision, each parameter is cast by itself: for most parameters
of most models that is a launch which takes longer than its work. A parameter holds its value all step long, so a cast
may be made as early as one likes; what that costs is memory, which bounds how much is cast at a time. A cast of what is
gathered is one of these even by itself: what carries the collective can then do it on the way, where a kernel could not
be told apart from others.

Keeps the bits of every result.
"""

from __future__ import annotations

import torch

from weft.capture.graph import Role, StepGraph, is_collective
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.multi_tensor.text import TRITON_DTYPES
from weft.inductor.passes.lists import alike, list_call, walkable
from weft.inductor.passes.sizes import node_bytes

Node = torch.fx.Node

# Casting this much takes tens of microseconds, many times a launch.
BYTES_AT_A_TIME = 64 << 20


def group_casts(step: StepGraph) -> StepGraph:
    """Join casts of parameters to one dtype, up to ``BYTES_AT_A_TIME`` of results each. Changes ``step``."""
    parameters = {entry.name for entry in step.inputs if entry.role is Role.PARAMETER}
    casts = [node for node in step.graph.nodes if _is_cast(node, parameters)]
    for group in _groups(casts):
        first = group[0]
        sources = [node.args[0] for node in group]
        cast = Cast(first.kwargs["dtype"])  # type: ignore[arg-type]
        (results,) = list_call(step.graph, first, cast, (sources,), [[node.meta["val"] for node in group]])
        for node, result in zip(group, results, strict=True):
            node.replace_all_uses_with(result)
            step.graph.erase_node(node)
    return step


def _is_cast(node: Node, parameters: set[str]) -> bool:
    if node.target is not torch.ops.aten._to_copy.default or list(node.kwargs) != ["dtype"]:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    return (
        source.name in parameters
        and node.kwargs["dtype"] in TRITON_DTYPES
        and walkable([[source]])
        and alike([[source], [node]])
    )


def _groups(casts: list[Node]) -> list[list[Node]]:
    """Neighbours of one dtype and device: two or more, or what a collective takes."""
    full: list[list[Node]] = []
    by_kind: dict[object, list[Node]] = {}
    for node in casts:
        kind = node.kwargs["dtype"], node.meta["val"].device
        group = by_kind.setdefault(kind, [])
        if group and sum(map(node_bytes, [*group, node])) > BYTES_AT_A_TIME:
            full.append(group)
            group = by_kind[kind] = []
        group.append(node)
    return [group for group in (*full, *by_kind.values()) if len(group) > 1 or any(map(is_collective, group[0].users))]
