"""The order of issue that hides communication behind computation, within a limit of memory.

Orders are made by list scheduling (:mod:`weft.inductor.comm.list_schedule`) for several plans and paces, and the
fastest by the simulator's clock is taken, if collectives now and then take longer than predicted: what starts as late
as it may has nothing to spare. Of those that are as fast it is the one of the lowest peak. The order given is among
them.

A *plan* says when each task is due. It comes from a schedule of the step read backwards: there collectives begin as
soon as what waits for them allows, one after the other on their lane; so, read forwards, each begins as late as it may.
Planning backwards and scheduling forwards take turns, each by the times of the other: forward-backward improvement
(K. Y. Li and R. J. Willis, European Journal of Operational Research 56, 1992).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from weft.errors import MemoryLimitUnreachable
from weft.inductor.comm.frugal import fitting, tightened, unavoidable
from weft.inductor.comm.list_schedule import ListSchedule, Pace, list_schedule
from weft.inductor.comm.precedence import Precedence, precedence, reverse, reversed_order
from weft.inductor.comm.problem import Kind, Problem, Storage
from weft.inductor.comm.reference import Reference
from weft.inductor.comm.simulate import Simulation, simulate, users_of

AS_FAST = 2e-3
"""Orders so much slower than the fastest are as fast: no prediction is finer."""

# How many times longer than predicted collectives may take: measured on two H200s, described as eight. How often
# is a guess.
_DELAY = 3.0
_DELAYED = 0.1
# How many of the largest storages an error names.
_NAMED = 3


def overlap(problem: Problem, memory_limit: int | None = None) -> list[int]:
    """An order of the tasks of ``problem`` that takes little time.

    Time and memory are those of :func:`weft.inductor.comm.simulate.simulate`. The order follows from the problem alone,
    ties by position; it takes time near linear in the tasks.

    Args:
        memory_limit: bytes that are not exceeded; None: any.

    Raises:
        MemoryLimitUnreachable: no order was found that needs so little. A step of few tasks has none then.
    """
    before = precedence(problem)
    given = simulate(problem)
    reference = Reference(problem, before, _order_within(problem, before, given, memory_limit), memory_limit)
    found = _schedules(reference)
    if memory_limit is None or given.peak <= memory_limit:
        found.append(ListSchedule(list(given.order), given.seconds, given.peak, []))
    late = _delayed(problem)
    expected = [(1 - _DELAYED) * each.seconds + _DELAYED * simulate(late, each.order).seconds for each in found]
    slowest = min(expected) * (1 + AS_FAST)
    fast = [each for seconds, each in zip(expected, found, strict=True) if seconds <= slowest]
    return min(fast, key=lambda each: (each.peak, each.seconds)).order


def _delayed(problem: Problem) -> Problem:
    """The same where collectives take ``_DELAY`` times as long."""
    tasks = [
        replace(task, seconds=_DELAY * task.seconds) if task.kind is Kind.START else task for task in problem.tasks
    ]
    return replace(problem, tasks=tasks)


def _schedules(reference: Reference) -> list[ListSchedule]:
    """Schedules by several plans and paces."""
    longest = max((task.seconds for task in reference.problem.tasks if task.kind is Kind.START), default=0.0)
    at_once, in_order = Pace(math.inf, math.inf), Pace(math.inf, -math.inf)
    paces = (Pace(0.0, 0.0), Pace(longest, longest), Pace(longest, -math.inf), at_once)
    backwards, earliest = _Backwards(reference), _earliest_ends(reference)
    found = [
        list_schedule(reference, due, pace)
        for due in (backwards.due(earliest, in_order), backwards.due(earliest, at_once))
        for pace in paces
    ]
    fastest = min(found, key=lambda each: each.seconds)
    due = backwards.due(fastest.ends, at_once)
    return [*found, *(list_schedule(reference, due, pace) for pace in paces)]


class _Backwards:
    """A problem read backwards, beside a reference order read backwards."""

    def __init__(self, reference: Reference) -> None:
        problem = reverse(reference.problem)
        self.tasks, self.starts = len(reference.order), list(reference.waits)
        self.seconds = [reference.problem.tasks[start].seconds for start in self.starts]
        self.reference = Reference(problem, precedence(problem), reversed_order(reference.problem, reference.order))

    def due(self, ends: Sequence[float], pace: Pace) -> list[float]:
        """When each task has to begin for the step not to last longer than it does when scheduled backwards.

        Args:
            ends: when tasks end in a schedule made forwards: backwards, those come first that end last; of
                collectives those that began last, since what a lane carries in the order in which it is ready ends
                soonest.
        """
        last = max(ends, default=0.0)
        begins = [ends[start] - seconds for start, seconds in zip(self.starts, self.seconds, strict=True)]
        due = [last - end for end in (*ends, *begins)]
        found = list_schedule(self.reference, due, pace)
        begins = [found.seconds - end for end in found.ends]
        for started, start in enumerate(self.starts, self.tasks):
            begins[start] = begins[started]
        return begins[: self.tasks]


def _earliest_ends(reference: Reference) -> list[float]:
    """When each task would end if computation and lanes could do any number of things at once: the critical path."""
    ends = [0.0] * len(reference.order)
    for task in reference.order:
        ready = max((ends[need] for need in reference.needs[task]), default=0.0)
        ends[task] = ready + reference.problem.tasks[task].seconds
    return ends


def _order_within(problem: Problem, before: Precedence, given: Simulation, limit: int | None) -> Sequence[int]:
    """An order within the limit: of little memory, or else that of the problem.

    Raises:
        MemoryLimitUnreachable: none was found.
    """
    tight = simulate(problem, tightened(problem, before))
    if limit is None:
        return tight.order
    for known in (tight, given):
        if known.peak <= limit:
            return known.order
    hopeless = unavoidable(problem, before, tight.order[tight.peak_at]) > limit
    found = None if hopeless else fitting(problem, before, tight.order, limit)
    if found is None:
        raise unreachable(min(tight, given, key=lambda known: known.peak), limit)
    return found


def unreachable(least: Simulation, limit: int) -> MemoryLimitUnreachable:
    """The error, with what the order of the lowest peak holds at it."""
    problem, at = least.problem, least.peak_at
    place = {task: place for place, task in enumerate(least.order)}
    waits = problem.waits_of()

    def is_held(storage: Storage) -> bool:
        users = users_of(storage, waits)
        return place[storage.maker] <= at and (not users or at <= max(place[user] for user in users))

    held = sorted((storage for storage in problem.storages if is_held(storage)), key=lambda storage: -storage.size)
    names = [(storage.size, problem.tasks[storage.maker].name) for storage in held[:_NAMED]]
    if problem.set_aside:
        names = sorted([(problem.set_aside, "collectives over peers"), *names], key=lambda name: -name[0])[:_NAMED]
    inputs = problem.base - problem.set_aside
    return MemoryLimitUnreachable(limit, least.peak, problem.tasks[least.order[at]].name, inputs, names)
