"""One pass of list scheduling: what due times and paces do."""

from __future__ import annotations

import math

import pytest
from synthetic_steps import Steps, fsdp

from weft.inductor.cost.task_graph import Kind, TaskGraph
from weft.inductor.schedule.list_schedule import LeadTime, ListSchedule, list_schedule
from weft.inductor.schedule.partial_schedule import PartialSchedule
from weft.inductor.schedule.precedence import precedence
from weft.inductor.schedule.reference_order import Reference

PUNCTUAL, AT_ONCE, IN_ORDER = LeadTime(0.0, 0.0), LeadTime(math.inf, math.inf), LeadTime(math.inf, -math.inf)


def scheduled(
    task_graph: TaskGraph, due: dict[str, float], lead_time: LeadTime, limit: int | None = None
) -> ListSchedule:
    """In the order given, where that is within the limit; what has no due time is due at the end."""
    reference = Reference(task_graph, precedence(task_graph), range(len(task_graph.tasks)), limit)
    return list_schedule(reference, [due.get(task.name, 100.0) for task in task_graph.tasks], lead_time)


def names(task_graph: TaskGraph, found: ListSchedule) -> list[str]:
    return [task_graph.tasks[at].name for at in found.order]


def chain_and_gather() -> TaskGraph:
    """Three products of a second, and a fourth that needs a gather of a second."""
    steps = Steps()
    x = steps.compute("0", 1.0, (), 1)
    x = steps.compute("1", 1.0, (x,), 1)
    x = steps.compute("2", 1.0, (x,), 1)
    whole = steps.collective("gather", 1.0, (), 10, "lane")
    steps.compute("3", 1.0, (x, whole), 1)
    return steps.task_graph()


PLAN = {"0": 0.0, "1": 1.0, "2": 2.0, "gather": 2.0, "3": 3.0}


def test_a_collective_starts_when_it_is_due_or_at_once() -> None:
    """Due at 2, and begun a quarter of its second before: so before the task that lasts from 1 to 2."""
    task_graph = chain_and_gather()
    punctual = scheduled(task_graph, PLAN, PUNCTUAL)
    assert names(task_graph, punctual) == ["0", "gather", "1", "2", "gather waited", "3"]
    assert (punctual.seconds, punctual.peak) == (4.0, 12)
    assert names(task_graph, scheduled(task_graph, PLAN, AT_ONCE))[0] == "gather"
    assert punctual.ends[task_graph.tasks.index(next(t for t in task_graph.tasks if t.kind is Kind.START))] == 2.0


def test_a_step_ahead_of_its_plan_starts_collectives_sooner() -> None:
    late = {name: when + 50 for name, when in PLAN.items()}
    assert scheduled(chain_and_gather(), late, PUNCTUAL).seconds == 4.0


def test_memory_decides_how_early() -> None:
    """With room for one product beside the gather it starts before the last, with none when it is needed."""
    steps = Steps()
    x = steps.compute("0", 1.0, (), 20)
    x = steps.compute("1", 1.0, (x,), 1)
    x = steps.compute("2", 1.0, (x,), 1)
    whole = steps.collective("gather", 1.0, (), 10, "lane")
    steps.compute("3", 1.0, (x, whole), 1)
    task_graph = steps.task_graph()
    found = scheduled(task_graph, PLAN, AT_ONCE, limit=21)
    assert names(task_graph, found) == ["0", "1", "gather", "2", "gather waited", "3"]
    assert (found.seconds, found.peak) == (4.0, 21)


def test_computation_runs_by_due_time_unless_the_reference_order_is_kept() -> None:
    steps = Steps()
    steps.compute("aside", 2.0, (), 1)
    x = steps.compute("x", 1.0, (), 1)
    sent = steps.collective("send", 2.0, (x,), 1, "lane")
    steps.compute("last", 1.0, (sent,), 1)
    task_graph = steps.task_graph()
    due = {"x": 0.0, "send": 1.0, "aside": 1.0, "last": 3.0}
    assert scheduled(task_graph, due, PUNCTUAL).seconds == 4.0
    assert scheduled(task_graph, due, IN_ORDER).seconds == 6.0


def test_a_longer_task_fills_a_gap_that_it_outlasts_by_less() -> None:
    """Of 2 seconds to stand, 3 seconds of work take one more, 5 seconds take three."""
    for work, first in ((3.0, "aside"), (5.0, "last")):
        steps = Steps()
        sent = steps.collective("send", 2.0, (), 1, "lane")
        steps.compute("last", 1.0, (sent,), 1)
        steps.compute("aside", work, (), 1)
        task_graph = steps.task_graph()
        found = names(task_graph, scheduled(task_graph, {"last": 2.0, "aside": 3.0}, PUNCTUAL))
        assert next(name for name in found if name in ("aside", "last")) == first


def test_operands_of_a_finished_collective_are_freed() -> None:
    """A reduction of 1 second is waited for once it has been over for two more, and for what ranks are apart."""
    steps = Steps()
    gradient = steps.compute("gradient", 1.0, (), 8)
    part = steps.collective("reduce", 1.0, (gradient,), 1, "lane")
    x = gradient
    for at in range(5):
        x = steps.compute(f"{at}", 1.01, (x,) if at else (), 1)
    steps.compute("update", 1.0, (part, x))
    task_graph = steps.task_graph()
    found = names(task_graph, scheduled(task_graph, {}, PUNCTUAL))
    assert found[:7] == ["gradient", "reduce", "0", "1", "2", "reduce waited", "3"]


def test_a_dependent_collective_starts_after_a_margin_for_late_results() -> None:
    """A reduction of a second is trusted to be over after three; the gather of its result may go before it is due."""
    steps = Steps()
    x = steps.compute("0", 1.0, (), 1)
    part = steps.collective("reduce", 1.0, (x,), 1, "reductions")
    whole = steps.collective("gather", 1.0, (part,), 1, "gathers")
    for at in range(1, 8):
        x = steps.compute(str(at), 1.0, (x,), 1)
    steps.compute("update", 1.0, (x, whole), 1)
    task_graph = steps.task_graph()
    for due, before in ((90.0, "5"), (3.5, "3")):  # half a second before it is due
        found = scheduled(task_graph, {str(at): float(at) for at in range(8)} | {"gather": due, "reduce": 1.0}, AT_ONCE)
        order = names(task_graph, found)
        assert order[order.index("gather") + 1] == before
        assert found.seconds == 9.0


def test_what_a_task_lacks_is_found_anew_after_a_part_of_it_was_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lengths = PartialSchedule.lacking, set[int]()

    def checked(step: PartialSchedule, task: int) -> list[int]:
        found = kept(step, task)
        assert found == step._find_lacking(task)
        lengths.add(len(found))
        return found

    monkeypatch.setattr(PartialSchedule, "lacking", checked)
    task_graph = fsdp(6, views=2, gather=4.0)
    for limit in (None, 6_000):
        for lead_time in (PUNCTUAL, AT_ONCE, IN_ORDER):
            found = scheduled(task_graph, {}, lead_time, limit)
            assert sorted(found.order) == list(range(len(task_graph.tasks)))
    assert max(lengths) > 3  # views and waits that follow a collective
