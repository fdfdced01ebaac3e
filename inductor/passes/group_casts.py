"""Casts of many parameters to one dtype become one multi-tensor cast.

Under autocast, and where shards are gathered in half precision, every parameter is cast by an operation of its own. For
most parameters of most models the launch takes longer than the cast. A parameter does not change before the optimizer,
so its cast may run as early as one likes. The price is memory, which bounds how much is cast at once. A cast whose
result is gathered becomes such a call even by itself: a transport can then cast while it sends, which it could not if
the cast were fused into some other kernel.

Keeps the bits of every result.
"""

from __future__ import annotations

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective
from weft.capture.step_interface import Role
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.graph.sizes import node_bytes
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.multi_tensor.chunked_kernel import COLUMN_DTYPES
from weft.inductor.passes.tensor_lists import iterable_by_kernels, multi_tensor_call, same_layouts

Node = torch.fx.Node

# Casting this much takes tens of microseconds: the launch overhead is small against it.
BYTES_AT_A_TIME = 64 << 20


@keeps_bits
def group_casts(step: StepGraph) -> StepGraph:
    """Join casts of parameters to one dtype, up to ``BYTES_AT_A_TIME`` of results each. Changes ``step``."""
    parameters = {entry.name for entry in step.inputs if entry.role is Role.PARAMETER}
    casts = step.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    casts = [node for node in casts if _is_cast(node, parameters)]
    for group in _groups(casts):
        first = group[0]
        sources = [node.args[0] for node in group]
        cast = Cast(first.kwargs["dtype"])  # type: ignore[arg-type]
        (results,) = multi_tensor_call(step.graph, first, cast, (sources,), [[node.meta["val"] for node in group]])
        for node, result in zip(group, results, strict=True):
            node.replace_all_uses_with(result)
            step.graph.erase_node(node)
    return step


def _is_cast(node: Node, parameters: set[str]) -> bool:
    if list(node.kwargs) != ["dtype"]:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    return (
        source.name in parameters
        and node.kwargs["dtype"] in COLUMN_DTYPES
        and iterable_by_kernels([[source]])
        and same_layouts([[source], [node]])
    )


def _groups(casts: list[Node]) -> list[list[Node]]:
    """Groups of casts to one dtype on one device: two or more, or a single one that a collective reads."""
    full: list[list[Node]] = []
    by_kind: dict[object, list[Node]] = {}
    for node in casts:
        kind = node.kwargs["dtype"], node.meta["val"].device
        group = by_kind.setdefault(kind, [])
        # All casts of a group are made at the place of the first, so their results are live together from there on.
        if group and sum(map(node_bytes, [*group, node])) > BYTES_AT_A_TIME:
            full.append(group)
            group = by_kind[kind] = []
        group.append(node)
    return [group for group in (*full, *by_kind.values()) if len(group) > 1 or any(map(is_collective, group[0].users))]
