"""Orders of low peak memory, without regard to time: a greedy one, the search for one within a limit, and two lower
bounds of the peak."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence

from weft.inductor.cost.simulate import StorageUses
from weft.inductor.cost.task_graph import Kind, TaskGraph
from weft.inductor.schedule.precedence import Precedence

# A task that allocates less than 1/4096 of all bytes is not postponed. So the ids that are gathered for an embedding's
# gradient go early, and there is a barrier before the first gradient, which can then be written into the arena
# directly.
_NEGLIGIBLE_PART = 4096
# Bounds of the search for an order within a limit. Ready tasks that are considered at each position:
_MAX_READY = 64
# Budget of the whole search, in ready tasks considered: per task of the graph, and the minimum. Choices.
_LOOKS_PER_TASK, _FEWEST_LOOKS = 200, 2_000_000


def min_memory_order(task_graph: TaskGraph, before: Precedence) -> list[int]:
    """The task graph's own order, except that tasks that only allocate memory come as late as possible.

    So an all-gather, and the cast of a parameter before it, come just before the first task that needs them. WAITs and
    views directly follow their operands. All other tasks keep their order.
    """
    tasks = task_graph.tasks
    allocated, read = [0] * len(tasks), [0] * len(tasks)
    for storage, users in zip(task_graph.storages, task_graph.derived(StorageUses).users, strict=True):
        allocated[storage.maker] += storage.size
        for user in users:
            if user != storage.maker:
                read[user] += storage.size
    # WAITs and views that allocate nothing follow their operands at once: a WAIT frees the operands of its collective.
    follows = [task.kind in (Kind.NO_TIME, Kind.WAIT) and not allocated[at] for at, task in enumerate(tasks)]
    # Postponing a task keeps its operands live for longer. That pays for a START whose result is larger, and for
    # computation whose operands are inputs of the step, which are live anyway.
    little = sum(allocated) // _NEGLIGIBLE_PART
    # Typical sinks: an all-gather of a parameter, the cast of a shard in front of it, a tensor of zeros. Typical
    # others: a reduce-scatter, whose result is smaller than its operand.
    sinks = [
        allocated[at] > little
        and (allocated[at] > read[at] if task.kind is Kind.START else task.kind is Kind.COMPUTE and not read[at])
        for at, task in enumerate(tasks)
    ]
    lacks = [len(of) for of in before.needs]
    order: dict[int, None] = {}

    def issue(task: int) -> None:
        """Issue a task after its unissued needs; after each task, the tasks in ``follows`` that lack nothing more."""
        # A stack, since chains of needs are longer than Python lets functions recurse.
        todo = [task]
        while todo:
            at = todo[-1]
            need = None if at in order else next((need for need in before.needs[at] if need not in order), None)
            if need is not None:
                todo.append(need)
                continue
            todo.pop()
            if at not in order:
                order[at] = None
                for user in reversed(before.users[at]):
                    lacks[user] -= 1
                    if not lacks[user] and follows[user]:
                        todo.append(user)

    for task in range(len(tasks)):
        if not sinks[task] and not (follows[task] and lacks[task]):
            issue(task)
    for task in range(len(tasks)):  # what no task needed
        issue(task)
    return list(order)


def unavoidable_bytes(task_graph: TaskGraph, before: Precedence, task: int) -> int:
    """Lower bound of the live bytes while ``task`` runs, for every order: storages allocated by a predecessor and used
    by ``task`` or a successor."""
    # Whatever the order, predecessors run before `task` and successors after it. All other tasks may be moved away, so
    # their storages do not count.
    earlier, later = _reached(before.needs, task), _reached(before.users, task)
    live_bytes = task_graph.base
    for storage, users in zip(task_graph.storages, task_graph.derived(StorageUses).users, strict=True):
        # Without users a storage is live until the end of the step.
        if storage.maker in earlier and not (users and later.isdisjoint(users)):
            live_bytes += storage.size
    return live_bytes


def operands_bytes(task_graph: TaskGraph, tasks: Collection[int]) -> int:
    """Lower bound of the peak of every order, and of every graph in which ``tasks`` have the same operands and results:
    the inputs of the step with all that one of these tasks reads and makes."""
    # While a task runs, its operands and results are live at once, in every graph that still has the task.
    live = [0] * len(task_graph.tasks)
    for storage, users in zip(task_graph.storages, task_graph.derived(StorageUses).users, strict=True):
        for task in {storage.maker, *users}:
            live[task] += storage.size
    return task_graph.base + max((live[task] for task in tasks), default=0)


def _reached(edges: Sequence[Sequence[int]], start: int) -> set[int]:
    """``start`` and every task that can be reached from it along ``edges``."""
    reached, todo = {start}, [start]
    while todo:
        new = [task for task in edges[todo.pop()] if task not in reached]
        reached.update(new)
        todo += new
    return reached


def order_within(task_graph: TaskGraph, before: Precedence, order: Sequence[int], limit: int) -> list[int] | None:
    """An order with a peak within ``limit``, close to ``order``; None where none exists or none was found in time.

    Depth-first search. A task that fits and leaves no more memory held than before is issued at once, since every order
    from there on can begin with it. Otherwise each task that fits is tried in turn, in the order of ``order``. States
    that led to no solution are remembered. A step of few tasks is searched exhaustively.
    """
    return _Search(task_graph, before, order, limit).run()


class _Search:
    """Depth-first search over issue orders, with undo."""

    def __init__(self, task_graph: TaskGraph, before: Precedence, order: Sequence[int], limit: int) -> None:
        self.before, self.limit, self.order = before, limit, order
        self.place = [0] * len(order)
        for place, task in enumerate(order):
            self.place[task] = place
        storages = StorageUses(task_graph)
        self.sizes, self.allocated, self.used = storages.sizes, storages.allocated, storages.used
        self.left = storages.uses  # by storage: tasks not issued that it is held for
        self.now = task_graph.base
        self.lacks = [len(of) for of in before.needs]
        self.ready = [place for place, task in enumerate(order) if not self.lacks[task]]
        self.issued: list[int] = []
        # One bit per task: whether it is issued. The set of issued tasks determines the live memory and what can come
        # next, so it identifies a state of the search.
        self.state = 0
        self.looks = max(_LOOKS_PER_TASK * len(order), _FEWEST_LOOKS)

    def run(self) -> list[int] | None:
        """The first order found; None if there is none or the budget is used up."""
        dead: set[int] = set()  # states from which no order fits
        # The stack of decisions: tasks issued before it, alternatives left in reverse order, the state before it.
        choices: list[tuple[int, list[int], int]] = []
        while len(self.issued) < len(self.order):
            fit = self.ready_within_limit()
            # Dominance: a task that does not increase live memory can come first in every order from here on.
            task = next((task for task in fit if self.allocated[task] <= self.freed(task)), None)
            if task is None:
                # A state is the set of issued tasks, however it was reached: without this table, equal states would be
                # searched once for each order of their tasks.
                nexts = [task for task in fit if self.state | 1 << task not in dead]
                choices.append((len(self.issued), nexts[::-1], self.state))
                while not choices[-1][1]:
                    dead.add(choices.pop()[2])
                    # The budget is tested where the search backs out of a dead end: a search that goes straight to an
                    # order is never stopped.
                    if not choices or self.looks < 0:
                        return None
                while len(self.issued) > choices[-1][0]:
                    self.take_back()
                task = choices[-1][1].pop()
            self.issue(task)
        return self.issued

    def ready_within_limit(self) -> list[int]:
        """The ready tasks that fit within the limit, in the order of the reference."""
        self.looks -= min(len(self.ready), _MAX_READY)
        # With more than `_MAX_READY` ready tasks, "no order" means that none was found.
        tasks = [self.order[place] for place in self.ready[:_MAX_READY]]
        return [task for task in tasks if self.now + self.allocated[task] <= self.limit]

    def freed(self, task: int) -> int:
        """Bytes of the storages whose only unissued user is ``task``."""
        return sum(self.sizes[at] for at in self.used[task] if self.left[at] == 1)

    def issue(self, task: int) -> None:
        """Issue a ready task. :meth:`take_back` undoes exactly this."""
        self.now += self.allocated[task] - self.freed(task)
        for at in self.used[task]:
            self.left[at] -= 1
        self.issued.append(task)
        self.state |= 1 << task
        self.ready.remove(self.place[task])
        for user in self.before.users[task]:
            self.lacks[user] -= 1
            if not self.lacks[user]:
                insort(self.ready, self.place[user])

    def take_back(self) -> None:
        """Undo the last :meth:`issue`."""
        task = self.issued.pop()
        for user in self.before.users[task]:
            if not self.lacks[user]:
                self.ready.remove(self.place[user])
            self.lacks[user] += 1
        insort(self.ready, self.place[task])
        self.state ^= 1 << task
        for at in self.used[task]:
            self.left[at] += 1
        self.now -= self.allocated[task] - self.freed(task)
