"""Precedence of the tasks of a step, and the reversed task graph.

A schedule read backwards is a schedule of the *reversed* task graph: the users of a task come before it, and a
collective starts where it was waited for and is waited for where it started. So one scheduler computes both the
earliest and the latest start of each task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.inductor.cost.task_graph import Kind, Task, TaskGraph


@dataclass(eq=False)
class Precedence:
    """The order that tasks need.

    Attributes:
        needs: by task, the tasks that come before it: what it needs, and the pinned task before a pinned one.
        users: by task, those that need it, in order of position.
    """

    needs: list[tuple[int, ...]]
    users: list[list[int]]


def precedence(task_graph: TaskGraph) -> Precedence:
    """The precedence of the tasks of a task graph."""
    needs = [task.needs for task in task_graph.tasks]
    # A chain of pairs keeps the order of all pinned tasks: precedence is transitive.
    pinned = [at for at, task in enumerate(task_graph.tasks) if task.pinned]
    for before, after in pairwise(pinned):
        needs[after] = (*needs[after], before)
    # A need that is listed twice would be counted twice by whoever counts missing needs.
    needs = [tuple(dict.fromkeys(of)) if len(of) > 1 else of for of in needs]
    users: list[list[int]] = [[] for _ in needs]
    for at, of in enumerate(needs):
        for need in of:
            users[need].append(at)
    return Precedence(needs, users)


def reversed_graph(task_graph: TaskGraph) -> TaskGraph:
    """The task graph read from its end, without its storages.

    Its first tasks are those of ``task_graph``, of the same positions: a START has become the WAIT of its collective, a
    WAIT costs nothing. The STARTs follow, one for each START of ``task_graph`` and in the same order.
    """
    users = precedence(task_graph).users
    waits = task_graph.waits_of()
    started = {start: at for at, start in enumerate(waits, len(task_graph.tasks))}
    # Read backwards, the users of a task are what it needs. A START becomes a WAIT: there the collective has ended. A
    # collective that nothing waits for starts at once.
    tasks = [
        Task(
            task.name,
            Kind.WAIT if at in started else Kind.COMPUTE if task.kind is Kind.COMPUTE else Kind.NO_TIME,
            # Its START first: `TaskGraph.start_of` follows the first need of a WAIT.
            needs=(started[at], *users[at]) if at in started else tuple(users[at]),
            seconds=0.0 if at in started else task.seconds,
        )
        for at, task in enumerate(task_graph.tasks)
    ]
    # Stream, link and interference stay, so that collectives compete backwards as they do forwards. Effects keep their
    # order through `users`, which has the chain of pinned tasks.
    starts = [
        replace(task_graph.tasks[start], name=f"{task_graph.tasks[start].name} started", needs=tuple(of), pinned=False)
        for start, of in waits.items()
    ]
    # Without storages: only times are taken from this graph. The forward passes that use them keep the memory limit.
    return TaskGraph(tasks + starts)


def reversed_order(task_graph: TaskGraph, order: Sequence[int]) -> list[int]:
    """``order`` as an order of ``reversed_graph(task_graph)``: every collective starts just before it is waited for."""
    starts = (at for at, task in enumerate(task_graph.tasks) if task.kind is Kind.START)
    started = {start: at for at, start in enumerate(starts, len(task_graph.tasks))}
    found: list[int] = []
    for at in reversed(order):
        # The added START has no place in the forward order. Just before its WAIT is the latest, and the list scheduler
        # moves it ahead.
        found.extend((started[at], at) if at in started else (at,))
    return found
