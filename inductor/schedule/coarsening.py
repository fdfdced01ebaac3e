"""Coarsening of a task graph: groups of computations are scheduled as one task each.

A step of eighty layers has five thousand kernels and sixty calls of collectives, and the search for an order takes time
linear in the tasks. Two computations are *alike* if the same WAITs come before both and the same STARTs come after
both. To exchange them lets no collective start sooner and shortens no stall. So alike computations that follow each
other closely in the order of the graph become one task.

What is lost is bounded by the span of a group: a stall is filled with whole groups, and all that a group's tasks read
counts as live until its last task has run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from weft.inductor.cost.simulate import StorageUses
from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph
from weft.inductor.schedule.contraction import Contraction, storage_of_groups
from weft.inductor.schedule.precedence import precedence


def coarsen(task_graph: TaskGraph, span: float) -> Contraction:
    """Merge alike computations that lie within ``span`` seconds of computation in the order of the task graph.

    Takes time near linear in the tasks, their needs, and the machine words that hold a bit per collective.

    Args:
        task_graph: without pinned tasks, as :func:`weft.inductor.schedule.contraction.contract` returns it.

    Returns:
        The coarse task graph and its groups. An order of it takes as long as the expanded order and has at least the
        same peak.
    """
    tasks = task_graph.tasks
    starts = {at for at, task in enumerate(tasks) if task.kind is Kind.START}
    clock, groups = 0.0, list[list[int]]()
    opened: dict[tuple[int, int], tuple[list[int], float]] = {}  # by WAITs and STARTs: the last group, its begin (s)
    for at, (task, alike) in enumerate(zip(tasks, _alike(task_graph), strict=True)):
        # An element of a coalesced result is no computation: WAITs find their START through it.
        if task.kind in (Kind.START, Kind.WAIT) or not starts.isdisjoint(task.needs):
            groups.append([at])
            continue
        ends = clock + task.seconds
        group, begins = opened.get(alike, ([], -span))
        if not group or ends > begins + span:
            group = []
            groups.append(group)
            opened[alike] = group, clock
        group.append(at)
        clock = ends
    return _merged(task_graph, groups)


def _alike(task_graph: TaskGraph) -> list[tuple[int, int]]:
    """By task, the WAITs that come before it and the STARTs that come after it in every order, one bit each.

    Along a chain of needs the first set only grows and the second only shrinks. So groups of alike tasks need each
    other in no cycle: a chain that leaves such a set for another never comes back to it.
    """
    before = precedence(task_graph)
    kinds = [task.kind for task in task_graph.tasks]
    waits, starts = ([at for at, kind in enumerate(kinds) if kind is of] for of in (Kind.WAIT, Kind.START))
    wait_bits, start_bits = ({at: 1 << bit for bit, at in enumerate(each)} for each in (waits, starts))
    ended, started = [0] * len(kinds), [0] * len(kinds)
    for at, needs in enumerate(before.needs):  # tasks are in a valid order
        for need in needs:
            ended[at] |= ended[need]
        ended[at] |= wait_bits.get(at, 0)
    for at in reversed(range(len(kinds))):
        for user in before.users[at]:
            started[at] |= started[user] | start_bits.get(user, 0)
    return list(zip(ended, started, strict=True))


def _merged(task_graph: TaskGraph, groups: list[list[int]]) -> Contraction:
    """The task graph with one task per group, in a valid order."""
    group_of = _group_of(groups)
    needs = [
        # In the order of the tasks' needs: the first need of a WAIT leads to its START.
        list(dict.fromkeys(group_of[need] for task in group for need in task_graph.tasks[task].needs if need not in of))
        for group, of in ((group, set(group)) for group in groups)
    ]
    order = _valid_order(needs)
    place = {group: at for at, group in enumerate(order)}
    groups = [groups[group] for group in order]
    tasks = [
        _joined([task_graph.tasks[task] for task in group], [place[need] for need in needs[at]])
        for group, at in zip(groups, order, strict=True)
    ]
    group_of = _group_of(groups)
    storages, inside = [], [list[int]() for _ in groups]
    users = task_graph.derived(StorageUses).users
    for number, storage in enumerate(task_graph.storages):
        maker = group_of[storage.maker]
        # Without users a storage is live until the end of the step.
        if users[number] and all(group_of[user] == maker for user in users[number]):
            inside[maker].append(number)
        else:
            storages.append(storage_of_groups(storage, group_of))
    for at, group in enumerate(groups):
        if inside[at]:
            storages.append(Storage(_beside_results(task_graph, group, inside[at]), at))
    return Contraction(replace(task_graph, tasks=tasks, storages=storages), groups)


def _group_of(groups: Sequence[Sequence[int]]) -> list[int]:
    """By task, its group."""
    found = [0] * sum(map(len, groups))
    for at, group in enumerate(groups):
        for task in group:
            found[task] = at
    return found


def _joined(tasks: Sequence[Task], needs: Sequence[int]) -> Task:
    """One task for all of a group."""
    if len(tasks) == 1:
        return replace(tasks[0], needs=tuple(needs))
    computes = any(task.kind is Kind.COMPUTE for task in tasks)
    kind = Kind.COMPUTE if computes else Kind.NO_TIME
    return Task(tasks[0].name, kind, tuple(needs), sum(task.seconds for task in tasks))


def _beside_results(task_graph: TaskGraph, group: Sequence[int], inside: Sequence[int]) -> int:
    """Bytes that a group needs beside the results that outlive it, for the storages ``inside`` that do not."""
    uses = task_graph.derived(StorageUses)
    place = {task: at for at, task in enumerate(group)}
    live = uses.allocated[group[0]]
    freed = [0] * len(group)
    for storage in inside:
        freed[max(place[user] for user in uses.users[storage])] += uses.sizes[storage]
    peak = live
    for task, less in zip(group[1:], freed, strict=False):
        live += uses.allocated[task] - less
        peak = max(peak, live)
    return peak - (sum(uses.allocated[task] for task in group) - sum(freed))


def _valid_order(needs: Sequence[Sequence[int]]) -> list[int]:
    """The groups in an order in which none comes before what it needs, of several the one that begins first."""
    users: list[list[int]] = [[] for _ in needs]
    for group, of in enumerate(needs):
        for need in of:
            users[need].append(group)
    lacks = [len(of) for of in needs]
    ready, order = [group for group, left in enumerate(lacks) if not left], list[int]()
    while ready:
        order.append(group := heapq.heappop(ready))
        for user in users[group]:
            lacks[user] -= 1
            if not lacks[user]:
                heapq.heappush(ready, user)
    assert len(order) == len(needs), "groups that need each other"
    return order
