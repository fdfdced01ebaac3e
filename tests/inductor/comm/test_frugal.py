"""Orders of little memory, against the least that any order needs."""

from __future__ import annotations

import random

from brute_force import least_peak, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_steps import Steps, fsdp

from weft.inductor.comm.frugal import fitting, tightened, unavoidable
from weft.inductor.comm.precedence import precedence
from weft.inductor.comm.problem import Kind, Problem
from weft.inductor.comm.simulate import simulate


def names(problem: Problem, order: list[int]) -> list[str]:
    return [problem.tasks[at].name for at in order]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_search_finds_what_there_is(seed: int) -> None:
    problem = random_problem(random.Random(seed), most_tasks=11)
    before, least = precedence(problem), least_peak(problem)
    order = tightened(problem, before)
    assert problem.is_order(order)
    found = fitting(problem, before, order, least)
    assert found is not None
    assert problem.is_order(found)
    assert simulate(problem, found).peak == least
    assert fitting(problem, before, order, least - 1) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.randoms(use_true_random=False))
def test_what_is_unavoidable_is_held_in_every_order(seed: int, draw: random.Random) -> None:
    problem = random_problem(random.Random(seed), most_tasks=11)
    before = precedence(problem)
    order: list[int] = []
    while len(order) < len(problem.tasks):
        ready = [at for at, needs in enumerate(before.needs) if at not in order and set(needs) <= {*order}]
        order.append(draw.choice(ready))
    memory = simulate(problem, order).memory
    for place, task in enumerate(order):
        assert unavoidable(problem, before, task) <= memory[place]
    assert max(unavoidable(problem, before, task) for task in order) <= least_peak(problem)


def test_what_is_kept_for_backward_is_unavoidable_where_backward_begins() -> None:
    steps = Steps()
    saved = [steps.compute("layer 0", 1.0, (), 4)]
    for at in range(1, 4):
        saved.append(steps.compute(f"layer {at}", 1.0, (saved[-1],), 4))
    gradient = steps.compute("loss", 1.0, (saved[-1],), 1)
    for at in reversed(range(4)):
        gradient = steps.compute(f"backward {at}", 1.0, (saved[at], gradient), 1)
    problem = steps.problem()
    at = next(at for at, task in enumerate(problem.tasks) if task.name == "backward 3")
    assert unavoidable(problem, precedence(problem), at) == simulate(problem).peak == 18


def test_gathers_move_to_where_they_are_needed_with_their_casts() -> None:
    steps = Steps()
    parts = [steps.compute(f"cast {at}", 1.0, (), 1) for at in range(2)]
    wholes = [steps.collective(f"gather {at}", 1.0, (part,), 8, "lane") for at, part in enumerate(parts)]
    x = steps.compute("embed", 1.0, (), 1)
    for at, whole in enumerate(wholes):
        x = steps.compute(f"product {at}", 1.0, (x, steps.view(f"view {at}", whole)), 1)
    problem = steps.problem()
    assert simulate(problem).peak == 18
    order = tightened(problem, precedence(problem))
    expected = ["embed"]
    for at in range(2):
        expected += [f"cast {at}", f"gather {at}", f"gather {at} waited", f"view {at}", f"product {at}"]
    assert names(problem, order) == expected
    assert simulate(problem, order).peak == 10


def test_what_is_hardly_any_memory_keeps_its_place() -> None:
    """Ids that ranks gather for a gradient: where they were, while a gather of a weight comes when it is needed."""
    steps = Steps()
    ids = steps.collective("ids", 1.0, (), 1, "lane")
    weight = steps.collective("weight", 1.0, (), 4000, "lane")
    x = steps.compute("forward", 1.0, (), 5000)
    x = steps.compute("backward", 1.0, (x, weight), 1)
    steps.compute("sum", 1.0, (x, ids), 1)
    problem = steps.problem()
    order = names(problem, tightened(problem, precedence(problem)))
    assert order == ["ids", "ids waited", "forward", "weight", "weight waited", "backward", "sum"]


def test_computation_that_reads_what_is_let_go_of_keeps_its_order() -> None:
    problem = fsdp(layers=3)
    order = tightened(problem, precedence(problem))
    computed = [at for at in order if problem.tasks[at].kind is Kind.COMPUTE and problem.tasks[at].needs]
    assert computed == sorted(computed)
    assert simulate(problem, order).peak <= simulate(problem).peak


def test_a_search_that_comes_to_no_end_is_given_up() -> None:
    """Forty tasks that fit two at a time, and one that never fits: there is no end of orders to try."""
    steps = Steps()
    kept = [steps.compute(f"{at}", 1.0, (), 1) for at in range(40)]
    steps.compute("sum", 1.0, kept, 1)
    problem = steps.problem()
    before = precedence(problem)
    assert fitting(problem, before, range(41), 40) is None
    assert fitting(problem, before, range(41), 41) == list(range(41))
