"""A step with its transports, simulated: what a schedule predicts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.capture.graph import StepGraph
from weft.inductor.cost.build_task_graph import build
from weft.inductor.cost.cluster import Cluster
from weft.inductor.cost.compute_cost import ComputeCosts
from weft.inductor.cost.simulate import Simulation, simulate
from weft.inductor.graph.liveness import liveness
from weft.inductor.graph.node_order import reorder
from weft.inductor.transports.apply_transports import replace_collectives
from weft.inductor.transports.arena_layout import lay_out
from weft.transport_rows import LIBRARY

Node = torch.fx.Node


def assume_reachable(step: StepGraph, node: Node) -> None:
    """Predictions assume that all ranks have peer access."""


def simulated_in_order(
    step: StepGraph, order: Sequence[int], cluster: Cluster, costs: ComputeCosts
) -> tuple[Simulation, list[Node]]:
    """As :func:`simulated`, of a copy of ``step`` with its nodes in an order, given as their positions."""
    step = step.copy()
    nodes = list(step.graph.nodes)
    reorder(step, [nodes[at] for at in order])
    return simulated(step, cluster, costs)


def simulated(step: StepGraph, cluster: Cluster, costs: ComputeCosts) -> tuple[Simulation, list[Node]]:
    """Apply the transports of ``step`` and simulate it in the order of its nodes. Returns the simulation and the node
    of each of its tasks. Changes ``step``."""
    replace_collectives(step, LIBRARY, assume_reachable)
    memory = liveness(step)
    lay_out(step, memory)
    task_graph, nodes = build(step, cluster, costs, memory)
    return simulate(task_graph), nodes


def simulated_as_is(step: StepGraph, cluster: Cluster, costs: ComputeCosts) -> tuple[Simulation, list[Node]]:
    """As :func:`simulated`, of a step that has its transports. ``step`` is not changed."""
    task_graph, nodes = build(step, cluster, costs)
    return simulate(task_graph), nodes
