"""A norm of tensors that were just gathered is that of the shards, added up over the ranks.

Every rank would read all that it has gathered to learn what it could from its own part. Clipping by the norm of all
gradients of a replicated model does that, once their reductions are in two halves
(:mod:`weft.inductor.passes.split_all_reduce`): each rank reads one n-th, and ranks tell each other the sums of squares.
Reductions over peers know even those (:mod:`weft.inductor.comm.squares`). What is gathered last need not be there.

Changes numerics: squares are added in another order. All ranks get the same bits, which an all-reduce gives them.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.graph import WAIT, StepGraph, drop_dead, is_wait
from weft.inductor.multi_tensor.norm import Norm, NormOfSquares
from weft.inductor.passes.emitter import emitter
from weft.inductor.passes.lists import list_call
from weft.inductor.passes.sizes import node_bytes

Node = torch.fx.Node

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_GATHER = _c10d.all_gather_into_tensor.default
_VIEWS = (aten.view.default, aten.reshape.default)

# Reading this much takes as long as a small all-reduce: 65 us at 4 TB/s, measured on H200.
LEAST_BYTES = 256 << 20


def norms_of_shards(step: StepGraph) -> StepGraph:
    """Take norms, of which only all together are read, from shards where that reads ``LEAST_BYTES`` less a group.
    Changes ``step``."""
    for node in list(step.graph.nodes):
        if isinstance(node.target, Norm) and node.target.together:
            _use_shards(step.graph, node)
    return step


def _use_shards(graph: torch.fx.Graph, node: Node) -> None:
    tensors: Any = node.args[0]
    gathers = {tensor: found for tensor in tensors if (found := _gather_of(tensor)) is not None}
    groups: dict[Any, list[Node]] = {}
    for tensor, gather in gathers.items():
        groups.setdefault(gather.args[2], []).append(tensor)
    saved = {
        group: sum(node_bytes(tensor) - node_bytes(gathers[tensor].args[0]) for tensor in found)  # type: ignore[arg-type]
        for group, found in groups.items()
    }
    taken = {group: found for group, found in groups.items() if saved[group] >= LEAST_BYTES}
    if not taken or len(set(tensors)) < len(tensors):
        return
    ((norms,),) = node.meta["val"]
    squares = [_squares(graph, node, [gathers[tensor] for tensor in found]) for found in taken.values()]
    others = [tensor for tensor in tensors if tensor not in gathers or gathers[tensor].args[2] not in taken]
    ((new,),) = list_call(graph, node, NormOfSquares(len(norms), norms.dtype), (squares, others), [[norms]])
    for old in [element for list_ in node.users for element in list_.users]:
        old.replace_all_uses_with(new)
    drop_dead(graph)


def _squares(graph: torch.fx.Graph, node: Node, gathers: list[Node]) -> Node:
    """The sums of the squares of what ``gathers`` give, one a tensor, from those of their shards."""
    shards: Any = [gather.args[0] for gather in gathers]
    sums = shards[0].meta["val"].new_empty(len(shards))
    ((norms,),) = list_call(graph, node, Norm(2.0, together=True), (shards,), [[sums]])
    with graph.inserting_before(node):
        emit = emitter(graph, norms)
        start = emit(_c10d.all_reduce.default, emit(aten.pow.Tensor_Scalar, norms, 2.0), "sum", gathers[0].args[2])
        start.meta["number"] = max(gather.meta.get("number", 0) for gather in gathers)
        return emit(WAIT, start)


def _gather_of(tensor: Node) -> Node | None:
    """The all-gather of a float32 shard just reduced of which ``tensor`` is the whole result; None where it is another.

    Whatever is gathered would do; what is not reduced before is a parameter, whose norm nobody clips by.
    """
    while tensor.target in _VIEWS:
        tensor = tensor.args[0]  # type: ignore[assignment]
    if tensor.target is not WAIT or tensor.args[0].target is not _GATHER:  # type: ignore[union-attr]
        return None
    gather: Any = tensor.args[0]
    shard = gather.args[0]
    return gather if is_wait(shard) and shard.meta["val"].dtype == torch.float32 else None
