"""A problem read backwards."""

from __future__ import annotations

import random

import pytest
from brute_force import random_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_steps import fsdp, tensor_parallel

from weft.inductor.comm.precedence import precedence, reverse, reversed_order
from weft.inductor.comm.problem import Kind, Problem, Task
from weft.inductor.comm.simulate import simulate


def test_pinned_tasks_need_each_other() -> None:
    tasks = [Task("a", Kind.COMPUTE, pinned=True), Task("b", Kind.COMPUTE), Task("c", Kind.COMPUTE, (1,), pinned=True)]
    found = precedence(Problem(tasks))
    assert found.needs == [(), (), (1, 0)]
    assert found.users == [[2], [2], []]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_an_order_read_backwards_runs(seed: int) -> None:
    problem = random_problem(random.Random(seed), most_tasks=14)
    backwards = reverse(problem)
    assert backwards.is_order(reversed_order(problem, range(len(problem.tasks))))
    starts = [at for at, task in enumerate(problem.tasks) if task.kind is Kind.START]
    for started, start in enumerate(starts, len(problem.tasks)):
        assert backwards.start_of(start) == started
        assert backwards.tasks[started].seconds == problem.tasks[start].seconds


@pytest.mark.parametrize("problem", [fsdp(layers=3, interference=0.3), tensor_parallel(layers=3)])
def test_without_overlap_it_takes_as_long(problem: Problem) -> None:
    backwards = simulate(reverse(problem), reversed_order(problem, range(len(problem.tasks))))
    assert backwards.seconds == pytest.approx(simulate(problem).seconds)
