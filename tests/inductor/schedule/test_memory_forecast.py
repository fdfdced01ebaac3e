"""What the rest of a step needs, against walking through it."""

from __future__ import annotations

import random

from brute_force import random_task_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.inductor.cost.simulate import LiveMemory
from weft.inductor.cost.task_graph import TaskGraph
from weft.inductor.schedule.memory_forecast import MemoryForecast


def ahead(task_graph: TaskGraph, issued: list[int], left: list[int]) -> dict[int, int]:
    """Bytes held while each of ``left`` is issued, after ``issued``."""
    live_memory = LiveMemory(task_graph)
    for task in issued:
        live_memory.issue(task)
    return {task: live_memory.issue(task) for task in left}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_forecast_equals_the_memory_of_the_rest_of_the_order(seed: int) -> None:
    rng = random.Random(seed)
    task_graph = random_task_graph(rng, most_tasks=12)
    left = list(range(len(task_graph.tasks)))
    forecast, live_memory, issued = MemoryForecast(task_graph, tuple(left)), LiveMemory(task_graph), list[int]()
    flags = bytearray(len(left))
    while left:
        place = left[0]
        ready = [at for at in left if all(flags[need] for need in task_graph.tasks[at].needs)]
        task = rng.choice(ready)
        if task != place:
            before = [at for at in left if at < task]
            known = ahead(task_graph, issued, left)
            most = forecast.copy().most(place, task)
            assert most == max(known[at] for at in before)
            assert forecast.last_place_of(most, place, task) == max(at for at in before if known[at] == most)
            forecast.issue_ahead(task, live_memory.during(task) - live_memory.now, place)
        allocated = live_memory.during(task) - live_memory.now
        assert live_memory.freed([task]) == live_memory.now + allocated - live_memory.after(task)
        live_memory.issue(task)
        flags[task] = True
        issued.append(task)
        left.remove(task)


def test_a_copy_is_independent() -> None:
    task_graph = random_task_graph(random.Random(1))
    last = len(task_graph.tasks) - 1
    forecast = MemoryForecast(task_graph, range(last + 1))
    most = forecast.most(0, last)
    forecast.copy().issue_ahead(last, 1000, 0)
    assert forecast.most(0, last) == most
