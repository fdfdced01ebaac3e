"""One pass of list scheduling: what due times and paces do."""

from __future__ import annotations

import math

from synthetic_steps import Steps

from weft.inductor.comm.list_schedule import ListSchedule, Pace, list_schedule
from weft.inductor.comm.precedence import precedence
from weft.inductor.comm.problem import Kind, Problem
from weft.inductor.comm.reference import Reference

PUNCTUAL, AT_ONCE, IN_ORDER = Pace(0.0, 0.0), Pace(math.inf, math.inf), Pace(math.inf, -math.inf)


def scheduled(problem: Problem, due: dict[str, float], pace: Pace, limit: int | None = None) -> ListSchedule:
    """In the order given, where that is within the limit; what has no due time is due at the end."""
    reference = Reference(problem, precedence(problem), range(len(problem.tasks)), limit)
    return list_schedule(reference, [due.get(task.name, 100.0) for task in problem.tasks], pace)


def names(problem: Problem, found: ListSchedule) -> list[str]:
    return [problem.tasks[at].name for at in found.order]


def chain_and_gather() -> Problem:
    """Three products of a second, and a fourth that needs a gather of a second."""
    steps = Steps()
    x = steps.compute("0", 1.0, (), 1)
    x = steps.compute("1", 1.0, (x,), 1)
    x = steps.compute("2", 1.0, (x,), 1)
    whole = steps.collective("gather", 1.0, (), 10, "lane")
    steps.compute("3", 1.0, (x, whole), 1)
    return steps.problem()


PLAN = {"0": 0.0, "1": 1.0, "2": 2.0, "gather": 2.0, "3": 3.0}


def test_a_collective_starts_when_it_is_due_or_at_once() -> None:
    """Due at 2, and begun a quarter of its second before: so before the task that lasts from 1 to 2."""
    problem = chain_and_gather()
    punctual = scheduled(problem, PLAN, PUNCTUAL)
    assert names(problem, punctual) == ["0", "gather", "1", "2", "gather waited", "3"]
    assert (punctual.seconds, punctual.peak) == (4.0, 12)
    assert names(problem, scheduled(problem, PLAN, AT_ONCE))[0] == "gather"
    assert punctual.ends[problem.tasks.index(next(t for t in problem.tasks if t.kind is Kind.START))] == 2.0


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
    problem = steps.problem()
    found = scheduled(problem, PLAN, AT_ONCE, limit=21)
    assert names(problem, found) == ["0", "1", "gather", "2", "gather waited", "3"]
    assert (found.seconds, found.peak) == (4.0, 21)


def test_what_is_due_first_is_computed_first_unless_the_order_is_kept() -> None:
    steps = Steps()
    steps.compute("aside", 2.0, (), 1)
    x = steps.compute("x", 1.0, (), 1)
    sent = steps.collective("send", 2.0, (x,), 1, "lane")
    steps.compute("last", 1.0, (sent,), 1)
    problem = steps.problem()
    due = {"x": 0.0, "send": 1.0, "aside": 1.0, "last": 3.0}
    assert scheduled(problem, due, PUNCTUAL).seconds == 4.0
    assert scheduled(problem, due, IN_ORDER).seconds == 6.0


def test_a_longer_task_fills_a_gap_that_it_outlasts_by_less() -> None:
    """Of 2 seconds to stand, 3 seconds of work take one more, 5 seconds take three."""
    for work, first in ((3.0, "aside"), (5.0, "last")):
        steps = Steps()
        sent = steps.collective("send", 2.0, (), 1, "lane")
        steps.compute("last", 1.0, (sent,), 1)
        steps.compute("aside", work, (), 1)
        problem = steps.problem()
        found = names(problem, scheduled(problem, {"last": 2.0, "aside": 3.0}, PUNCTUAL))
        assert next(name for name in found if name in ("aside", "last")) == first


def test_what_ended_a_while_ago_is_let_go_of() -> None:
    """A reduction of 1 second is waited for once it has been over for two more, and for what ranks are apart."""
    steps = Steps()
    gradient = steps.compute("gradient", 1.0, (), 8)
    part = steps.collective("reduce", 1.0, (gradient,), 1, "lane")
    x = gradient
    for at in range(5):
        x = steps.compute(f"{at}", 1.01, (x,) if at else (), 1)
    steps.compute("update", 1.0, (part, x))
    problem = steps.problem()
    found = names(problem, scheduled(problem, {}, PUNCTUAL))
    assert found[:7] == ["gradient", "reduce", "0", "1", "2", "reduce waited", "3"]


def test_what_another_collective_gives_goes_on_when_that_has_surely_ended() -> None:
    """A reduction of a second is trusted to be over after three; the gather of its result may go before it is due."""
    steps = Steps()
    x = steps.compute("0", 1.0, (), 1)
    part = steps.collective("reduce", 1.0, (x,), 1, "reductions")
    whole = steps.collective("gather", 1.0, (part,), 1, "gathers")
    for at in range(1, 8):
        x = steps.compute(str(at), 1.0, (x,), 1)
    steps.compute("update", 1.0, (x, whole), 1)
    problem = steps.problem()
    for due, before in ((90.0, "5"), (3.5, "3")):  # half a second before it is due
        found = scheduled(problem, {str(at): float(at) for at in range(8)} | {"gather": due, "reduce": 1.0}, AT_ONCE)
        order = names(problem, found)
        assert order[order.index("gather") + 1] == before
        assert found.seconds == 9.0
