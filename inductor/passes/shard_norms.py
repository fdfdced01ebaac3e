"""The norm of gathered tensors is computed from their shards and summed over the ranks.

Clipping by the norm of all gradients of a replicated model reads every gradient on every rank. Once each all-reduce is
split into a reduce-scatter and an all-gather (:mod:`weft.inductor.passes.split_all_reduce`), a rank need read only its
own shard, one n-th, and ranks all-reduce the sums of squares. Transports over peers have computed even those
(:mod:`weft.inductor.transports.fuse_grad_norm`). The norm then need not wait for the all-gathers.

Changes results: squares are summed in another order. All ranks get the same bits, as an all-reduce gives them.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_kinds import WAIT, group_of, is_wait
from weft.inductor.graph.collectives import ALL_GATHER, ALL_REDUCE, is_single, payload_of
from weft.inductor.graph.emitter import emitter
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.graph.sizes import node_bytes
from weft.inductor.multi_tensor.norm import Norm, NormOfSquares
from weft.inductor.passes.tensor_lists import multi_tensor_call

Node = torch.fx.Node

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default)

# Reading this much takes as long as a small all-reduce: 65 us at 4 TB/s on an H200.
LEAST_BYTES = 256 << 20


@changes_bits("squares are summed by shard, then over ranks")
def shard_norms(step: StepGraph) -> StepGraph:
    """Compute norms that are only read all together from shards, where that reads at least ``LEAST_BYTES`` less per
    group. Changes ``step``."""
    for node in list(step.graph.nodes):
        if isinstance(node.target, Norm) and node.target.together:
            _use_shards(step.graph, node)
    return step


def _use_shards(graph: torch.fx.Graph, node: Node) -> None:
    tensors: Any = node.args[0]
    gathers = {tensor: members for tensor in tensors if (members := _gather_of(tensor)) is not None}
    groups: dict[Any, list[Node]] = {}
    for tensor, gather in gathers.items():
        groups.setdefault(group_of(gather), []).append(tensor)
    saved = {
        group: sum(node_bytes(tensor) - node_bytes(payload_of(gathers[tensor])[0]) for tensor in members)
        for group, members in groups.items()
    }
    # By group: each costs an all-reduce of its own.
    taken = {group: members for group, members in groups.items() if saved[group] >= LEAST_BYTES}
    if not taken or len(set(tensors)) < len(tensors):
        return
    ((norms,),) = node.meta["val"]
    squares = [_squares(graph, node, [gathers[tensor] for tensor in members]) for members in taken.values()]
    others = [tensor for tensor in tensors if tensor not in gathers or group_of(gathers[tensor]) not in taken]
    ((new,),) = multi_tensor_call(graph, node, NormOfSquares(len(norms), norms.dtype), (squares, others), [[norms]])
    for old in [element for list_ in node.users for element in list_.users]:
        old.replace_all_uses_with(new)
    drop_dead(graph)


def _squares(graph: torch.fx.Graph, node: Node, gathers: list[Node]) -> Node:
    """The sum of squares of each gathered tensor, from the sums of squares of their shards."""
    shards = [shard for gather in gathers for shard in payload_of(gather)]
    sums = shards[0].meta["val"].new_empty(len(shards))
    ((norms,),) = multi_tensor_call(graph, node, Norm(2.0, together=True), (shards,), [[sums]])
    with graph.inserting_before(node):
        emit = emitter(graph, norms)
        start = emit(ALL_REDUCE.op, emit(aten.pow.Tensor_Scalar, norms, 2.0), "sum", group_of(gathers[0]))
        start.meta["capture_order"] = max(gather.meta.get("capture_order", 0) for gather in gathers)
        return emit(WAIT, start)


def _gather_of(tensor: Node) -> Node | None:
    """The all-gather whose whole result ``tensor`` is, if its shard is the float32 result of a reduction; else None.

    Any gathered tensor would do. One that is not reduced first is a parameter, and nobody clips by the norm of that.
    """
    while tensor.target in _VIEWS:
        tensor = tensor.args[0]  # type: ignore[assignment]
    gather: Any = tensor.args[0] if tensor.target is WAIT else None
    if gather is None or not is_single(gather, ALL_GATHER.kind):
        return None
    (shard,) = payload_of(gather)
    return gather if is_wait(shard) and shard.meta["val"].dtype == torch.float32 else None
