"""Contracted task graphs have the same best orders, and fewer tasks."""

from __future__ import annotations

import random

import pytest
from brute_force import least_peak, least_seconds, random_order, random_task_graph
from exploration import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_steps import fsdp

from weft.inductor.cost.simulate import simulate
from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph
from weft.inductor.schedule.contraction import contract

seeds = st.integers(0, 1 << 32)


def with_instant_tasks(rng: random.Random) -> TaskGraph:
    """A random task graph with inputs, views, second WAITs and tasks that read them. Some views are pinned, some
    allocate memory."""
    inputs = [Task(f"input {at}", Kind.NO_TIME, pinned=rng.random() < 0.5) for at in range(rng.randint(0, 2))]
    drawn = random_task_graph(rng)
    shift = len(inputs)
    tasks = [*inputs]
    for task in drawn.tasks:
        needs = [need + shift for need in task.needs]
        if inputs and task.kind is not Kind.WAIT:
            needs += rng.sample(range(shift), 1)
        task.needs = tuple(needs)
        tasks.append(task)
    storages = [
        Storage(of.size, of.maker + shift, tuple(reader + shift for reader in of.readers), of.kept)
        for of in drawn.storages
    ]
    starts = [at for at, task in enumerate(tasks) if task.kind is Kind.START]
    for _ in range(rng.randint(0, 3)):
        at = len(tasks)
        if rng.random() < 0.4:
            tasks.append(Task(f"wait {at}", Kind.WAIT, (rng.choice(starts),)))
            continue
        # Elements of a collective's result are read after its WAIT only.
        ready = [other for other, task in enumerate(tasks) if task.kind is not Kind.START]
        needs = tuple(rng.sample(ready, min(len(ready), rng.randint(0, 2))))
        tasks.append(Task(f"view {at}", Kind.NO_TIME, needs, pinned=rng.random() < 0.2))
        for storage in storages:
            if storage.maker in needs:
                storage.readers += (at,)
        if rng.random() < 0.2:
            storages.append(Storage(rng.randint(1, 4), at))
    if rng.random() < 0.7:
        tasks.append(Task("last", Kind.COMPUTE, (len(tasks) - 1,), 1.0))
    return TaskGraph(tasks, storages, base=drawn.base)


@settings(max_examples=examples(ci=200, exploring=5_000), deadline=None)
@given(seeds)
def test_an_expanded_order_runs_and_has_the_time_and_the_peak_of_its_groups(seed: int) -> None:
    rng = random.Random(seed)
    task_graph = with_instant_tasks(rng)
    contraction = contract(task_graph)
    assert sorted(task for group in contraction.groups for task in group) == list(range(len(task_graph.tasks)))
    assert contraction.task_graph.is_order(range(len(contraction.groups)))
    order = random_order(rng, contraction.task_graph)
    expanded = contraction.expanded(order)
    assert task_graph.is_order(expanded)
    seen, found = simulate(contraction.task_graph, order), simulate(task_graph, expanded)
    assert (seen.seconds, seen.peak) == (found.seconds, found.peak)


@settings(max_examples=examples(ci=60, exploring=2_000), deadline=None)
@given(seeds)
def test_the_best_orders_are_as_good_as_before(seed: int) -> None:
    task_graph = with_instant_tasks(random.Random(seed))
    contracted = contract(task_graph).task_graph
    least = least_peak(task_graph)
    assert least_peak(contracted) == least
    for limit in (None, least):
        assert least_seconds(contracted, limit) == pytest.approx(least_seconds(task_graph, limit))


def test_inputs_views_elements_and_further_waits_are_merged() -> None:
    tasks = [
        Task("shard", Kind.NO_TIME, (), pinned=True),
        Task("batch", Kind.NO_TIME, (0,), pinned=True),
        Task("gather", Kind.START, (1,), 1.0, "lane", "wire"),
        Task("element 0", Kind.NO_TIME, (2,)),
        Task("element 1", Kind.NO_TIME, (2,)),
        Task("wait 0", Kind.WAIT, (3,)),
        Task("view 0", Kind.NO_TIME, (5,)),
        Task("product", Kind.COMPUTE, (6, 1), 1.0),
        Task("wait 1", Kind.WAIT, (4,)),
        Task("view 1", Kind.NO_TIME, (8, 1)),
        Task("view of the product", Kind.NO_TIME, (7,)),
        Task("copy", Kind.NO_TIME, (10,)),
        Task("sum", Kind.COMPUTE, (9, 11), 1.0),
    ]
    storages = [Storage(8, 2, (5, 8)), Storage(2, 7, (12,)), Storage(2, 11, (12,))]
    contraction = contract(TaskGraph(tasks, storages))
    names = [[tasks[at].name for at in group] for group in contraction.groups]
    assert names == [
        ["shard", "batch"],
        ["gather", "element 0", "element 1"],
        ["wait 0", "view 0", "wait 1", "view 1"],
        ["product", "view of the product"],
        ["copy"],  # allocates memory
        ["sum"],
    ]
    assert [task.needs for task in contraction.task_graph.tasks] == [(), (0,), (1, 0), (2, 0), (3,), (2, 4)]


def test_a_view_that_needs_more_than_its_group_does_stays_apart() -> None:
    tasks = [
        Task("a", Kind.COMPUTE, (), 1.0),
        Task("b", Kind.COMPUTE, (), 1.0),
        Task("of both", Kind.NO_TIME, (0, 1)),
    ]
    assert contract(TaskGraph(tasks)).groups == [[0], [1], [2]]


def test_a_view_between_a_start_and_its_wait_does_not_hold_what_the_collective_does_not_read() -> None:
    """In the START's group it would be an operand of the collective, live until the WAIT."""
    tasks = [
        Task("a", Kind.COMPUTE, (), 1.0),
        Task("send", Kind.START, (0,), 1.0, "lane", "wire"),
        Task("view of a", Kind.NO_TIME, (0, 1)),
        Task("b", Kind.COMPUTE, (2,), 1.0),
        Task("wait", Kind.WAIT, (1,)),
    ]
    task_graph = TaskGraph(tasks, [Storage(4, 0, (2,)), Storage(4, 3)])
    assert contract(task_graph).groups == [[0], [1], [2], [3], [4]]


def test_all_views_of_a_step_are_merged() -> None:
    task_graph = fsdp(layers=4, views=6)
    rest = [task.kind for task in task_graph.tasks if task.kind is not Kind.NO_TIME]
    assert [task.kind for task in contract(task_graph).task_graph.tasks] == rest
