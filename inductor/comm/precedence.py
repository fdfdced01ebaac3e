"""What has to come before what in a step, read forwards and from the end.

A schedule read backwards is a schedule of the *reversed* problem: what needed a task comes before it, a collective is
handed to its lane where it was waited for and waited for where it was handed over. So one scheduler says both how early
tasks can run, and how late they may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.inductor.comm.problem import Kind, Problem, Task


@dataclass(eq=False)
class Precedence:
    """The order that tasks need.

    Attributes:
        needs: by task, the tasks that come before it: what it needs, and the pinned task before a pinned one.
        users: by task, those that need it, in order of position.
    """

    needs: list[tuple[int, ...]]
    users: list[list[int]]


def precedence(problem: Problem) -> Precedence:
    """The order that the tasks of a problem need."""
    needs = [task.needs for task in problem.tasks]
    pinned = [at for at, task in enumerate(problem.tasks) if task.pinned]
    for before, after in pairwise(pinned):
        needs[after] = (*needs[after], before)
    needs = [tuple(dict.fromkeys(of)) for of in needs]
    users: list[list[int]] = [[] for _ in needs]
    for at, of in enumerate(needs):
        for need in of:
            users[need].append(at)
    return Precedence(needs, users)


def reverse(problem: Problem) -> Problem:
    """The problem read from its end, without its storages.

    Its first tasks are those of ``problem``, of the same positions: a START has become the WAIT of its collective, a
    WAIT costs nothing. The STARTs follow, one for each START of ``problem`` and in the same order.
    """
    users = precedence(problem).users
    waits = problem.waits_of()
    started = {start: at for at, start in enumerate(waits, len(problem.tasks))}
    tasks = [
        Task(
            task.name,
            Kind.WAIT if at in started else Kind.COMPUTE if task.kind is Kind.COMPUTE else Kind.FREE,
            needs=(started[at], *users[at]) if at in started else tuple(users[at]),
            seconds=0.0 if at in started else task.seconds,
        )
        for at, task in enumerate(problem.tasks)
    ]
    starts = [
        replace(problem.tasks[start], name=f"{problem.tasks[start].name} started", needs=tuple(of), pinned=False)
        for start, of in waits.items()
    ]
    return Problem(tasks + starts)


def reversed_order(problem: Problem, order: Sequence[int]) -> list[int]:
    """An order of ``problem`` as one of ``reverse(problem)``: every collective starts just before it is waited for."""
    starts = (at for at, task in enumerate(problem.tasks) if task.kind is Kind.START)
    started = {start: at for at, start in enumerate(starts, len(problem.tasks))}
    found: list[int] = []
    for at in reversed(order):
        found.extend((started[at], at) if at in started else (at,))
    return found
