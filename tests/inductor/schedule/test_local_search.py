"""Moves on an order of issue: valid, within the limit, and never for the worse."""

from __future__ import annotations

import random

import pytest
from brute_force import least_peak, random_task_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_steps import fsdp

from weft.inductor.cost.simulate import simulate
from weft.inductor.cost.task_graph import TaskGraph
from weft.inductor.schedule.local_search import ExpectedTime, LocalSearch
from weft.inductor.schedule.precedence import precedence


def improved(task_graph: TaskGraph, order: list[int], limit: int | None = None) -> tuple[list[int], float]:
    """Without a weight for late collectives."""
    expected = ExpectedTime(task_graph, 3.0, 0.0)
    search = LocalSearch(task_graph, precedence(task_graph), expected, limit)
    return search.improve_by_perturbations(*search.improve(order, expected(order)))


def test_a_long_collective_makes_way_for_an_urgent_one() -> None:
    """Of one stream: the collective of 10 s, which nothing needs before the end, began before that of 1 s, which
    computation waits for."""
    task_graph = random_task_graph(random.Random(3894))
    own = list(range(len(task_graph.tasks)))
    order, seconds = improved(task_graph, own)
    assert simulate(task_graph, own).seconds == 31.0
    assert simulate(task_graph, order).seconds == pytest.approx(seconds) == pytest.approx(21.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_what_is_found_is_an_order_within_the_limit_and_not_slower(seed: int, limited: bool) -> None:
    task_graph = random_task_graph(random.Random(seed))
    own = simulate(task_graph)
    limit = max(own.peak, least_peak(task_graph)) if limited else None
    order, seconds = improved(task_graph, list(own.order), limit)
    found = simulate(task_graph, order)  # asserts that it is an order
    assert found.seconds == pytest.approx(seconds)
    assert found.seconds <= own.seconds
    assert limit is None or found.peak <= limit


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_lower_bound_holds_for_every_order(seed: int) -> None:
    rng = random.Random(seed)
    task_graph = random_task_graph(rng, most_tasks=14)
    before = precedence(task_graph)
    expected = ExpectedTime(task_graph, 3.0, 0.1)
    left, order = list(range(len(task_graph.tasks))), list[int]()
    while left:
        ready = [task for task in left if all(need in order for need in before.needs[task])]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    assert expected.least(before) <= expected(order) + 1e-9


def test_the_number_of_simulations_is_bounded_for_large_graphs() -> None:
    task_graph = fsdp(32, products=16)
    calls = 0

    class Counted(ExpectedTime):
        def _run(self, machine, order):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return super()._run(machine, order)

    expected = Counted(task_graph, 3.0, 0.1)
    search = LocalSearch(task_graph, precedence(task_graph), expected)
    own = list(range(len(task_graph.tasks)))
    search.improve_by_perturbations(*search.improve(own, expected(own)))
    assert 2 < calls * len(own) <= 2 * 60_000 + 4 * len(own)
