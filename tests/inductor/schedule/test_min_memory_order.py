"""Orders of little memory, against the least that any order needs."""

from __future__ import annotations

import random

from brute_force import least_peak, random_task_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_steps import Steps, fsdp

from weft.inductor.cost.simulate import simulate
from weft.inductor.cost.task_graph import Kind, TaskGraph
from weft.inductor.schedule.min_memory_order import min_memory_order, order_within, unavoidable_bytes
from weft.inductor.schedule.precedence import precedence


def names(task_graph: TaskGraph, order: list[int]) -> list[str]:
    return [task_graph.tasks[at].name for at in order]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_search_finds_an_order_wherever_there_is_one(seed: int) -> None:
    task_graph = random_task_graph(random.Random(seed), most_tasks=11)
    before, least = precedence(task_graph), least_peak(task_graph)
    order = min_memory_order(task_graph, before)
    assert task_graph.is_order(order)
    found = order_within(task_graph, before, order, least)
    assert found is not None
    assert task_graph.is_order(found)
    assert simulate(task_graph, found).peak == least
    assert order_within(task_graph, before, order, least - 1) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.randoms(use_true_random=False))
def test_unavoidable_bytes_are_held_in_every_order(seed: int, draw: random.Random) -> None:
    task_graph = random_task_graph(random.Random(seed), most_tasks=11)
    before = precedence(task_graph)
    order: list[int] = []
    while len(order) < len(task_graph.tasks):
        ready = [at for at, needs in enumerate(before.needs) if at not in order and set(needs) <= {*order}]
        order.append(draw.choice(ready))
    memory = simulate(task_graph, order).memory
    for place, task in enumerate(order):
        assert unavoidable_bytes(task_graph, before, task) <= memory[place]
    assert max(unavoidable_bytes(task_graph, before, task) for task in order) <= least_peak(task_graph)


def test_activations_are_unavoidable_where_backward_begins() -> None:
    steps = Steps()
    saved = [steps.compute("layer 0", 1.0, (), 4)]
    for at in range(1, 4):
        saved.append(steps.compute(f"layer {at}", 1.0, (saved[-1],), 4))
    gradient = steps.compute("loss", 1.0, (saved[-1],), 1)
    for at in reversed(range(4)):
        gradient = steps.compute(f"backward {at}", 1.0, (saved[at], gradient), 1)
    task_graph = steps.task_graph()
    at = next(at for at, task in enumerate(task_graph.tasks) if task.name == "backward 3")
    assert unavoidable_bytes(task_graph, precedence(task_graph), at) == simulate(task_graph).peak == 18


def test_gathers_move_to_where_they_are_needed_with_their_casts() -> None:
    steps = Steps()
    parts = [steps.compute(f"cast {at}", 1.0, (), 1) for at in range(2)]
    wholes = [steps.collective(f"gather {at}", 1.0, (part,), 8, "lane") for at, part in enumerate(parts)]
    x = steps.compute("embed", 1.0, (), 1)
    for at, whole in enumerate(wholes):
        x = steps.compute(f"product {at}", 1.0, (x, steps.view(f"view {at}", whole)), 1)
    task_graph = steps.task_graph()
    assert simulate(task_graph).peak == 18
    order = min_memory_order(task_graph, precedence(task_graph))
    expected = ["embed"]
    for at in range(2):
        expected += [f"cast {at}", f"gather {at}", f"gather {at} waited", f"view {at}", f"product {at}"]
    assert names(task_graph, order) == expected
    assert simulate(task_graph, order).peak == 10


def test_tasks_with_negligible_memory_keep_their_place() -> None:
    """Ids that ranks gather for a gradient: where they were, while a gather of a weight comes when it is needed."""
    steps = Steps()
    ids = steps.collective("ids", 1.0, (), 1, "lane")
    weight = steps.collective("weight", 1.0, (), 4000, "lane")
    x = steps.compute("forward", 1.0, (), 5000)
    x = steps.compute("backward", 1.0, (x, weight), 1)
    steps.compute("sum", 1.0, (x, ids), 1)
    task_graph = steps.task_graph()
    order = names(task_graph, min_memory_order(task_graph, precedence(task_graph)))
    assert order == ["ids", "ids waited", "forward", "weight", "weight waited", "backward", "sum"]


def test_computation_that_frees_memory_keeps_its_order() -> None:
    task_graph = fsdp(layers=3)
    order = min_memory_order(task_graph, precedence(task_graph))
    computed = [at for at in order if task_graph.tasks[at].kind is Kind.COMPUTE and task_graph.tasks[at].needs]
    assert computed == sorted(computed)
    assert simulate(task_graph, order).peak <= simulate(task_graph).peak


def test_a_search_that_takes_too_long_is_given_up() -> None:
    """Forty tasks that fit two at a time, and one that never fits: there is no end of orders to try."""
    steps = Steps()
    kept = [steps.compute(f"{at}", 1.0, (), 1) for at in range(40)]
    steps.compute("sum", 1.0, kept, 1)
    task_graph = steps.task_graph()
    before = precedence(task_graph)
    assert order_within(task_graph, before, range(41), 40) is None
    assert order_within(task_graph, before, range(41), 41) == list(range(41))
