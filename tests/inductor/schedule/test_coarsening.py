"""Coarse task graphs: what they merge, and that their orders are orders of the task graph, with its time and memory."""

from __future__ import annotations

import random

import pytest
from brute_force import random_order, random_task_graph
from exploration import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_steps import data_parallel, fsdp, hybrid, mixture_of_experts, tensor_parallel

from weft.errors import MemoryLimitUnreachable
from weft.inductor.cost.simulate import peak_memory, simulate
from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph
from weft.inductor.schedule import search_order as search_order_module
from weft.inductor.schedule.coarsening import coarsen
from weft.inductor.schedule.contraction import contract
from weft.inductor.schedule.search_order import search_order

seeds = st.integers(0, 1 << 32)


def groups_of(task_graph: TaskGraph, span: float) -> list[list[str]]:
    """The names in groups of more than one task."""
    groups = coarsen(task_graph, span).groups
    return [[task_graph.tasks[task].name for task in group] for group in groups if len(group) > 1]


@settings(max_examples=examples(ci=150, exploring=20_000), deadline=None)
@given(seeds, st.sampled_from([0.0, 3.0, 10.0, 1e9]))
def test_an_expanded_order_runs_in_the_time_of_its_groups_and_within_their_peak(seed: int, span: float) -> None:
    rng = random.Random(seed)
    task_graph = contract(random_task_graph(rng, 24)).task_graph
    coarse = coarsen(task_graph, span)
    assert sorted(task for group in coarse.groups for task in group) == list(range(len(task_graph.tasks)))
    assert coarse.task_graph.is_order(range(len(coarse.groups)))
    order = random_order(rng, coarse.task_graph)
    expanded = coarse.expanded(order)
    assert task_graph.is_order(expanded)
    assert simulate(coarse.task_graph, order).seconds == pytest.approx(simulate(task_graph, expanded).seconds)
    assert peak_memory(coarse.task_graph, order) >= peak_memory(task_graph, expanded)


@settings(max_examples=examples(ci=100, exploring=5_000), deadline=None)
@given(seeds)
def test_groups_of_single_tasks_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    task_graph = contract(random_task_graph(rng, 16)).task_graph
    coarse = coarsen(task_graph, -1.0)
    order = random_order(rng, coarse.task_graph)
    assert all(len(group) == 1 for group in coarse.groups)
    seen, found = simulate(coarse.task_graph, order), simulate(task_graph, coarse.expanded(order))
    assert (seen.seconds, seen.memory) == (found.seconds, found.memory)


def test_computation_is_merged_between_the_same_collectives_only() -> None:
    tasks = [
        Task("norm", Kind.COMPUTE, (), 1.0),
        Task("up", Kind.COMPUTE, (0,), 1.0),
        Task("gradient of a weight", Kind.COMPUTE, (0,), 1.0),  # no START comes after it
        Task("down", Kind.COMPUTE, (1,), 1.0),
        Task("reduce", Kind.START, (3,), 1.0, "lane", "wire"),
        Task("gradient of another", Kind.COMPUTE, (2,), 1.0),
        Task("wait", Kind.WAIT, (4,)),
        Task("next norm", Kind.COMPUTE, (6,), 1.0),
        Task("next up", Kind.COMPUTE, (7, 5), 1.0),
    ]
    assert groups_of(TaskGraph(tasks), 100.0) == [
        ["norm", "up", "down"],
        ["gradient of a weight", "gradient of another"],
        ["next norm", "next up"],
    ]


def test_a_group_spans_no_more_computation_than_it_may() -> None:
    tasks = [Task(f"{at}", Kind.COMPUTE, (at - 1,) if at else (), 1.0) for at in range(7)]
    assert groups_of(TaskGraph(tasks), 3.0) == [["0", "1", "2"], ["3", "4", "5"]]
    # What lies between counts as well: "a" and "c" are alike, and "b", which starts a collective, is long.
    tasks = [
        Task("a", Kind.COMPUTE, (), 1.0),
        Task("b", Kind.COMPUTE, (), 5.0),
        Task("c", Kind.COMPUTE, (), 1.0),
        Task("send", Kind.START, (1,), 1.0, "lane", "wire"),
        Task("wait", Kind.WAIT, (3,)),
    ]
    assert groups_of(TaskGraph(tasks), 6.0) == []
    assert groups_of(TaskGraph(tasks), 7.0) == [["a", "c"]]


def test_an_element_between_a_start_and_its_wait_stays_apart() -> None:
    tasks = [
        Task("a", Kind.COMPUTE, (), 1.0),
        Task("b", Kind.COMPUTE, (), 1.0),
        Task("gather", Kind.START, (), 1.0, "lane", "wire"),
        Task("element", Kind.NO_TIME, (2,)),
        Task("wait", Kind.WAIT, (3,)),
    ]
    coarse = coarsen(TaskGraph(tasks, [Storage(4, 3, (4,))]), 100.0)
    assert coarse.groups == [[0, 1], [2], [3], [4]]
    assert coarse.task_graph.start_of(3) == 1


def test_what_lives_inside_of_a_group_counts_at_its_largest_moment() -> None:
    """Three results of 10 bytes in a chain, of which the last outlives the group: two are live at once."""
    tasks = [Task(f"{at}", Kind.COMPUTE, (at - 1,) if at else (), 1.0) for at in range(3)]
    storages = [Storage(10, 0, (1,)), Storage(10, 1, (2,)), Storage(10, 2, kept=True)]
    coarse = coarsen(TaskGraph(tasks, storages), 100.0)
    assert len(coarse.groups) == 1
    assert simulate(coarse.task_graph).peak == simulate(TaskGraph(tasks, storages)).peak == 20
    assert [(of.size, of.kept) for of in coarse.task_graph.storages] == [(10, True), (10, False)]


@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Task graphs of any size are searched in groups, of a tenth of a step's computation at most."""
    monkeypatch.setattr(search_order_module, "_MAX_TASKS", 0)
    monkeypatch.setattr(search_order_module, "_SPAN", 1 / 10)


@pytest.mark.usefixtures("in_groups")
@settings(max_examples=examples(ci=50, exploring=5_000), deadline=None)
@given(seeds, st.floats(0.0, 1.0))
def test_orders_found_in_groups_keep_the_limit_and_are_no_slower_than_the_given(seed: int, part: float) -> None:
    task_graph = random_task_graph(random.Random(seed), 20)
    own = simulate(task_graph)
    unlimited = simulate(task_graph, search_order(task_graph))
    assert unlimited.seconds <= own.seconds * (1 + 1e-9)
    limit = round(own.peak + part * max(unlimited.peak - own.peak, 0))
    found = simulate(task_graph, search_order(task_graph, limit))
    assert found.peak <= limit
    assert found.seconds <= own.seconds * (1 + 1e-9)


@pytest.mark.usefixtures("in_groups")
def test_a_limit_that_groups_exceed_is_kept_task_by_task() -> None:
    """Both tasks read and free 10 bytes and make 10: 20 are live task by task, and 30 as a group."""
    tasks = [
        Task("a", Kind.COMPUTE, (), 10.0),
        Task("b", Kind.COMPUTE, (0,), 0.1),
        Task("c", Kind.COMPUTE, (1,), 0.1),
    ]
    storages = [Storage(20, 0, (1,)), Storage(10, 1, kept=True), Storage(10, 2, kept=True)]
    task_graph = TaskGraph(tasks, storages)
    coarse = coarsen(task_graph, 0.5)
    assert len(coarse.groups) == 2
    limit = peak_memory(task_graph, range(3))
    with pytest.raises(MemoryLimitUnreachable):
        search_order_module._search(coarse.task_graph, limit)
    assert peak_memory(task_graph, search_order(task_graph, limit)) == limit


@pytest.mark.parametrize("make", [fsdp, tensor_parallel, data_parallel, mixture_of_experts, hybrid])
def test_steps_in_groups_are_as_fast(make, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    task_graph = make()
    task_by_task = simulate(task_graph, search_order(task_graph)).seconds
    monkeypatch.setattr(search_order_module, "_MAX_TASKS", 0)
    monkeypatch.setattr(search_order_module, "_SPAN", 1 / 250)
    assert simulate(task_graph, search_order(task_graph)).seconds <= task_by_task * 1.005
