"""A task graph with a reference order: the common input of all list scheduling passes over it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.inductor.cost.simulate import LiveMemory, Machine
from weft.inductor.cost.task_graph import TaskGraph
from weft.inductor.schedule.memory_forecast import MemoryForecast
from weft.inductor.schedule.precedence import Precedence


class Reference:
    """A valid order of a task graph within a memory limit.

    Args:
        task_graph: the task graph.
        before: the precedence of its tasks.
        order: valid, with a peak within ``limit``.
        limit: memory limit in bytes; None: no limit.

    Attributes:
        order: the order.
        limit: in bytes; infinity if there is none.
        place: by task, its index in the order.
        kinds: by task.
        needs, users: as in :class:`weft.inductor.schedule.precedence.Precedence`.
        waits: the WAITs of each START.
        start_of: the START of each WAIT.
        machine, live_memory: time and memory before the first task. Every list scheduling pass starts from copies.
        forecast: memory of the whole order; None without a limit.
    """

    def __init__(
        self, task_graph: TaskGraph, before: Precedence, order: Sequence[int], limit: int | None = None
    ) -> None:
        self.task_graph = task_graph
        self.order = order
        # The order is the proof that the limit can be kept: departures from it are allowed only while the rest of the
        # step still fits in this order. With a reference that exceeds the limit, a pass could reach states from which
        # no order fits.
        self.limit = math.inf if limit is None else limit
        self.place = [0] * len(order)
        for place, task in enumerate(order):
            self.place[task] = place
        self.kinds = [task.kind for task in task_graph.tasks]
        self.needs, self.users = before.needs, before.users
        self.waits = task_graph.waits_of()
        self.start_of = {wait: start for start, waits in self.waits.items() for wait in waits}
        # Reading the task graph costs as much as a whole pass. A dozen passes share these tables through copies.
        self.machine, self.live_memory = Machine(task_graph), LiveMemory(task_graph)
        self.forecast = None if limit is None else MemoryForecast(task_graph, order)
