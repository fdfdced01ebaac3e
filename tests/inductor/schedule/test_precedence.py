"""A task graph read backwards."""

from __future__ import annotations

import random

import pytest
from brute_force import random_task_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_steps import fsdp, tensor_parallel

from weft.inductor.cost.simulate import simulate
from weft.inductor.cost.task_graph import Kind, Task, TaskGraph
from weft.inductor.schedule.precedence import precedence, reversed_graph, reversed_order


def test_pinned_tasks_need_each_other() -> None:
    tasks = [Task("a", Kind.COMPUTE, pinned=True), Task("b", Kind.COMPUTE), Task("c", Kind.COMPUTE, (1,), pinned=True)]
    found = precedence(TaskGraph(tasks))
    assert found.needs == [(), (), (1, 0)]
    assert found.users == [[2], [2], []]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_an_order_read_backwards_runs(seed: int) -> None:
    task_graph = random_task_graph(random.Random(seed), most_tasks=14)
    backwards = reversed_graph(task_graph)
    assert backwards.is_order(reversed_order(task_graph, range(len(task_graph.tasks))))
    starts = [at for at, task in enumerate(task_graph.tasks) if task.kind is Kind.START]
    for started, start in enumerate(starts, len(task_graph.tasks)):
        assert backwards.start_of(start) == started
        assert backwards.tasks[started].seconds == task_graph.tasks[start].seconds


@pytest.mark.parametrize("task_graph", [fsdp(layers=3, interference=0.3), tensor_parallel(layers=3)])
def test_without_overlap_it_takes_as_long(task_graph: TaskGraph) -> None:
    backwards = simulate(reversed_graph(task_graph), reversed_order(task_graph, range(len(task_graph.tasks))))
    assert backwards.seconds == pytest.approx(simulate(task_graph).seconds)
