"""A problem with an order to go by: what all passes of list scheduling over it read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.inductor.comm.outlook import Outlook
from weft.inductor.comm.precedence import Precedence
from weft.inductor.comm.problem import Problem
from weft.inductor.comm.simulate import Holding, Machine


class Reference:
    """An order of a problem that runs, within a limit.

    Args:
        problem: the problem.
        before: what comes before what in it.
        order: of a peak within ``limit``.
        limit: bytes not to be exceeded; None: any.

    Attributes:
        order: the order.
        limit: infinity for None.
        place: by task, where it stands in the order.
        kinds: by task.
        needs, users: as in :class:`weft.inductor.comm.precedence.Precedence`.
        waits: the WAITs of each START.
        start_of: the START of each WAIT.
        machine, holding: nothing issued.
        outlook: likewise; None without a limit.
    """

    def __init__(self, problem: Problem, before: Precedence, order: Sequence[int], limit: int | None = None) -> None:
        self.problem = problem
        self.order = order
        self.limit = math.inf if limit is None else limit
        self.place = [0] * len(order)
        for place, task in enumerate(order):
            self.place[task] = place
        self.kinds = [task.kind for task in problem.tasks]
        self.needs, self.users = before.needs, before.users
        self.waits = problem.waits_of()
        self.start_of = {wait: start for start, waits in self.waits.items() for wait in waits}
        self.machine, self.holding = Machine(problem), Holding(problem)
        self.outlook = None if limit is None else Outlook(problem, order)
