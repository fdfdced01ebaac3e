"""Contraction of a task graph: tasks that take neither time nor memory are merged with the task that they follow.

Four fifths of a training step's tasks are inputs, views, elements of lists, and further WAITs for one collective. To
issue such a task as soon as its needs are issued makes no order slower and no peak higher: it costs nothing itself, it
lets its users come earlier, and it frees what it reads earlier. So the search for an order leaves these tasks where
they are and places the others only, see :func:`contract`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph
from weft.inductor.schedule.precedence import precedence


@dataclass(eq=False)
class Contraction:
    """A task graph with fewer tasks, each of which stands for a group of tasks of another task graph.

    Attributes:
        task_graph: with one task per group.
        groups: by task of ``task_graph``, the tasks that were merged into it, in a valid order.
    """

    task_graph: TaskGraph
    groups: list[list[int]]

    def expanded(self, order: Iterable[int]) -> list[int]:
        """The order of single tasks that an order of ``task_graph`` stands for. It takes the same time."""
        return [task for group in order for task in self.groups[group]]


def contract(task_graph: TaskGraph) -> Contraction:
    """Merge tasks that take neither time nor memory with the tasks that they follow. Takes time linear in the tasks
    and their needs.

    Two kinds of task are merged, unless they allocate memory: a NO_TIME task with the last task that it needs, and a
    WAIT with an earlier WAIT for the same START, since the collective has ended then. All other needs have to be issued
    before that group begins. NO_TIME tasks without needs are one group, which can come before all others.

    The first task of a group has the group's time and memory, so expanded orders have the same peak. The contracted
    task graph has no pinned tasks: where the order of two is kept, one needs the other.
    """
    return _Contractor(task_graph).run()


def storage_of_groups(storage: Storage, group_of: Sequence[int]) -> Storage:
    """A storage as groups of tasks make and read it. ``group_of``: by task, its group."""
    maker = group_of[storage.maker]
    readers = dict.fromkeys(group_of[reader] for reader in storage.readers)
    # A reader that was merged into the maker's group is issued with it, and extends no live range.
    readers.pop(maker, None)
    return Storage(storage.size, maker, tuple(readers), storage.kept)


class _Contractor:
    """Assigns tasks to groups, in order of position."""

    def __init__(self, task_graph: TaskGraph) -> None:
        self.task_graph = task_graph
        self.groups: list[list[int]] = []
        self.group_of: list[int] = []
        self.needs: list[dict[int, None]] = []  # by group
        self.without_needs: int | None = None  # the group of NO_TIME tasks that need nothing
        self.waits: dict[int, int] = {}  # by START, the group of its first WAIT
        self.allocates = {storage.maker for storage in task_graph.storages if storage.size}
        self.storages: list[list[int]] = [[] for _ in task_graph.tasks]  # by task, those that it makes or reads
        for at, storage in enumerate(task_graph.storages):
            for user in (storage.maker, *storage.readers):
                self.storages[user].append(at)

    def run(self) -> Contraction:
        # Contracted needs contain the chain of pinned tasks, so `pinned` can be dropped below.
        before = precedence(self.task_graph)
        for at, task in enumerate(self.task_graph.tasks):
            needs = dict.fromkeys(self.group_of[need] for need in before.needs[at])
            group = None if at in self.allocates else self.followed(at, task.kind, needs)
            if group is None:
                group = len(self.groups)
                self.groups.append([])
                self.needs.append(needs)
            self.groups[group].append(at)
            self.group_of.append(group)
        firsts = [self.task_graph.tasks[group[0]] for group in self.groups]
        tasks = [
            Task(first.name, first.kind, tuple(needs), first.seconds, first.stream, first.link, first.interference)
            for first, needs in zip(firsts, self.needs, strict=True)
        ]
        storages = [storage_of_groups(storage, self.group_of) for storage in self.task_graph.storages]
        return Contraction(replace(self.task_graph, tasks=tasks, storages=storages), self.groups)

    def followed(self, at: int, kind: Kind, needs: dict[int, None]) -> int | None:
        """The group that a task which allocates nothing is merged into; None if it begins a group."""
        # `len(self.groups)` is the number that this task's own group will get.
        if kind is Kind.WAIT:
            group = self.waits.setdefault(self.task_graph.start_of(at), len(self.groups))
        elif kind is not Kind.NO_TIME:
            return None
        elif not needs:
            # Inputs and constants. One group for all of them keeps the needs of other groups short.
            if self.without_needs is None:
                self.without_needs = len(self.groups)
            group = self.without_needs
        else:
            # Groups are numbered in the order of their first tasks, so the largest number is the group that begins
            # last. Whether the other needs come before it in every order is tested below.
            group = max(needs)
        # The last task that it needs is not enough: if another need came after that group, the merged task could come
        # too early.
        if group == len(self.groups) or not self.comes_before(needs, group):
            return None
        # Operands of a START are live until its collective ends, so it must not get any that it does not have.
        start = self.groups[group][0]
        if self.task_graph.tasks[start].kind is Kind.START and not set(self.storages[at]) <= set(self.storages[start]):
            return None
        # Tasks without needs can come before any group.
        if self.without_needs in needs and self.without_needs != group:
            self.needs[group][self.without_needs] = None
        return group

    def comes_before(self, needs: Iterable[int], group: int) -> bool:
        """Whether ``needs`` are in ``group`` or issued before it in every order."""
        # Direct needs only. A transitive test would merge a few tasks more, and would no longer be linear.
        return all(need in (group, self.without_needs) or need in self.needs[group] for need in needs)
