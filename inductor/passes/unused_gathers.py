"""Collectives whose result nobody reads are not issued.

A wrapper gathers all parameters of a module before its backward; some of them backward never reads (an embedding's
table, a norm's scale that its saved values replace). In the graph that is visible: the gather's wait has no users. The
same graph stands on every rank, so all ranks drop the same collectives.

Keeps the bits of every result.
"""

from __future__ import annotations

from weft.capture.graph import WAIT, StepGraph, drop_dead, is_collective


def drop_unused_gathers(step: StepGraph) -> StepGraph:
    """Erase waits without users, the collectives they leave unwaited, and what only those used. Changes ``step``."""
    for node in reversed(step.graph.nodes):
        if (node.target is WAIT or is_collective(node)) and not node.users:
            step.graph.erase_node(node)
    drop_dead(step.graph)
    return step
