"""What a node costs in the candidates of the planner, which are many copies of one graph."""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.inductor.cost.cluster import Gpu
from weft.inductor.cost.compute_cost import ComputeCosts
from weft.inductor.schedule.select_transport import LIBRARY
from weft.inductor.schedule.simulated_step import assume_reachable
from weft.inductor.transports.apply_transports import replace_collectives

Node = torch.fx.Node


class CachedCosts(ComputeCosts):
    """Caches the costs of nodes over copies of a graph: a copy has the name and the fake value of its node."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self._known: dict[tuple[str, int], tuple[Any, bool, float]] = {}

    def seconds(self, node: Node) -> float:
        """See :meth:`ComputeCosts.seconds`."""
        return self._of(node)[2]

    def is_free(self, node: Node) -> bool:
        """See :func:`weft.inductor.cost.compute_cost.is_free`."""
        return self._of(node)[1]

    def _of(self, node: Node) -> tuple[Any, bool, float]:
        val = node.meta.get("val")
        key = node.name, id(val)
        known = self._known.get(key)
        if known is None:  # its id is its own as long as it is held
            free = super().is_free(node)
            known = self._known[key] = val, free, 0.0 if free else super().seconds(node)
        return known


class TransportedCosts(ComputeCosts):
    """Costs of computation once transports are applied, for a graph in which they are not applied yet.

    A transport may do a cast on the way. Counting that cast as computation would hide communication behind work that
    does not exist in the final step.
    """

    def __init__(self, costs: ComputeCosts, step: StepGraph) -> None:
        super().__init__(costs.gpu)
        self._costs = costs
        handed = step.copy()
        replace_collectives(handed, LIBRARY, assume_reachable)
        self._left = {node.name: node for node in handed.graph.nodes}

    def seconds(self, node: Node) -> float:
        """As above; 0 for what a transport does on the way."""
        left = self._left.get(node.name)
        return 0.0 if left is None else self._costs.seconds(left)

    def is_free(self, node: Node) -> bool:
        """As above."""
        return self._costs.is_free(node)
