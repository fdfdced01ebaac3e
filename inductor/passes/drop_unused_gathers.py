"""Collectives whose result is never read are dropped.

A wrapper all-gathers every parameter of a module before its backward. Backward does not read all of them (an embedding
table, the scale of a norm). In the graph the wait of such a gather has no users. All ranks have the same graph, so all
ranks drop the same collectives.

Small all-reduces stay: they add up numbers that one rank logs, and the others do not read.

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

# A choice: takes less time than its launch.
_MAX_NUMBERS_BYTES = 64 << 10


@keeps_bits
def drop_unused_gathers(step: StepGraph) -> StepGraph:
    """Erase waits without users, the collectives they leave unwaited, and what only those used. Changes ``step``."""
    # Waits before their collectives.
    for node in reversed(step.graph.nodes):
        start = node.all_input_nodes[0] if node.target is WAIT else node
        if is_collective(start) and not node.users and not _adds_numbers(start):
            step.graph.erase_node(node)
    drop_dead(step.graph)
    return step


def _adds_numbers(start: Node) -> bool:
    row = collective_op(start.target)
    return row is not None and row.kind == ALL_REDUCE.kind and node_bytes(start) <= _MAX_NUMBERS_BYTES
