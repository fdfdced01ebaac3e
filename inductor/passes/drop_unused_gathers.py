"""Collectives whose result is never read are dropped.

A wrapper all-gathers every parameter of a module before its backward. Backward does not read all of them (an embedding
table, the scale of a norm). In the graph the wait of such a gather has no users. All ranks have the same graph, so all
ranks drop the same collectives.

Keeps the bits of every result.
"""

from __future__ import annotations

from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_kinds import WAIT, is_collective
from weft.inductor.graph.pass_runner import keeps_bits


@keeps_bits
def drop_unused_gathers(step: StepGraph) -> StepGraph:
    """Erase waits without users, the collectives they leave unwaited, and what only those used. Changes ``step``."""
    # Waits before their collectives.
    for node in reversed(step.graph.nodes):
        if (node.target is WAIT or is_collective(node)) and not node.users:
            step.graph.erase_node(node)
    drop_dead(step.graph)
    return step
