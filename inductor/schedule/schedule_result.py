"""A scheduled step, and what is predicted of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from weft.capture.graph import StepGraph
from weft.inductor.cost.simulate import Simulation
from weft.inductor.schedule.decisions import Decisions
from weft.inductor.schedule.schedule_tables import BucketReport

Node = torch.fx.Node


class SchedulePrediction(NamedTuple):
    """What is predicted of a scheduled step.

    Attributes:
        simulation: the predicted run, with the chosen transports, if all ranks have peer access to each other.
        nodes: the node of each task of ``simulation``, of a copy of the step with its transports; empty where the
            schedule is only kept for its numbers.
        reports: one per collective, with the numbers that decided about it.
    """

    simulation: Simulation
    nodes: list[Node]
    reports: list[BucketReport]


@dataclass(eq=False)
class Schedule:
    """A scheduled step.

    Attributes:
        step: the step, its nodes in order of issue.
        decisions: what turns the original step into ``step``.
        predict: makes :attr:`prediction`.
        limit: memory limit in bytes. The default one may be exceeded, with a warning.
        candidates: how many candidates were evaluated.
        warnings: messages for the user.
        replayed: whether the passes of ``decisions`` made ``step``. On the rank that decides, the planner made it.
    """

    step: StepGraph
    decisions: Decisions
    predict: Callable[[], SchedulePrediction]
    limit: int
    candidates: int = 0
    warnings: list[str] = field(default_factory=list)
    replayed: bool = False

    @cached_property
    def prediction(self) -> SchedulePrediction:
        """What is predicted of the step: made when it is first asked for, as a rank that follows decisions needs it for
        nothing but to tell of it.

        Raises:
            GroupGone: it was not asked for while the process groups of the step were there.
        """
        return self.predict()

    @property
    def simulation(self) -> Simulation:
        """See :class:`SchedulePrediction`."""
        return self.prediction.simulation

    @property
    def nodes(self) -> list[Node]:
        """See :class:`SchedulePrediction`."""
        return self.prediction.nodes

    @property
    def reports(self) -> list[BucketReport]:
        """See :class:`SchedulePrediction`."""
        return self.prediction.reports

    def without_nodes(self) -> Schedule:
        """The schedule, kept for its numbers only: it holds no second copy of the graph."""
        predict = self.predict
        if "prediction" in vars(self):  # what is known needs no graph; what is not yet, starts from `step`
            known = self.prediction._replace(nodes=[])
            return replace(self, predict=lambda: known)
        return replace(self, predict=lambda: predict()._replace(nodes=[]))
