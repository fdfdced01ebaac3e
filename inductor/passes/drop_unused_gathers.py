"""Collectives whose result is never read are dropped.

A wrapper all-gathers every parameter of a module before its backward. Backward does not read all of them (an embedding
table, the scale of a norm). In the graph the wait of such a gather has no users. All ranks have the same graph, so all
ranks drop the same collectives.

Small all-reduces stay. Where one rank logs the result and the others do not read it, all ranks must issue the
all-reduce.

Keeps the bits of every result.
"""

from __future__ import annotations

import torch

from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_kinds import WAIT, is_collective
from weft.inductor.graph.collectives import ALL_REDUCE, collective_op
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.graph.sizes import node_bytes

Node = torch.fx.Node

# Largest all-reduce that stays. Up to this size the time of one is latency. A choice.
_MAX_KEPT_BYTES = 64 << 10


@keeps_bits
def drop_unused_gathers(step: StepGraph) -> StepGraph:
    """Erase waits without users, the collectives they leave unwaited, and what only those used. Changes ``step``."""
    # Waits before their collectives.
    for node in reversed(step.graph.nodes):
        if (node.target is WAIT or is_collective(node)) and not node.users and not _is_small_all_reduce(node):
            step.graph.erase_node(node)
    drop_dead(step.graph)
    return step


def _is_small_all_reduce(node: Node) -> bool:
    """Whether a node is a small all-reduce, or the wait for one."""
    start = node.all_input_nodes[0] if node.target is WAIT else node
    row = collective_op(start.target)
    return row is not None and row.kind == ALL_REDUCE.kind and node_bytes(start) <= _MAX_KEPT_BYTES
