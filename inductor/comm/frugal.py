"""Orders that need little memory, whatever time they take."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from weft.inductor.comm.precedence import Precedence
from weft.inductor.comm.problem import Kind, Problem
from weft.inductor.comm.simulate import users_of

# What makes less than this part of all that is made adds nothing to speak of. Ids that are gathered for an embedding's
# gradient go at once: ranks have then met before the first gradient, which peers can read where it is made.
_LITTLE = 4096
# A search looks at so many of the tasks that could come next,
_WIDTH = 64
# and at so many of them altogether, for each task of the problem and as the least.
_LOOKS, _FEWEST_LOOKS = 200, 2_000_000


def tightened(problem: Problem, before: Precedence) -> list[int]:
    """The problem's own order, but that what only adds to the memory comes as late as it may.

    So an all-gather, and the cast of a parameter before it, come just before the first task that needs them. WAITs and
    views follow at once what they need. All else keeps its order.
    """
    tasks = problem.tasks
    made, read = [0] * len(tasks), [0] * len(tasks)
    waits = problem.waits_of()
    for storage in problem.storages:
        made[storage.maker] += storage.size
        for user in users_of(storage, waits):
            if user != storage.maker:
                read[user] += storage.size
    follows = [task.kind in (Kind.FREE, Kind.WAIT) and not made[at] for at, task in enumerate(tasks)]
    # A START may hold what it reads until then, if that is less than it makes; computation has to read inputs only.
    little = sum(made) // _LITTLE
    sinks = [
        made[at] > little
        and (made[at] > read[at] if task.kind is Kind.START else task.kind is Kind.COMPUTE and not read[at])
        for at, task in enumerate(tasks)
    ]
    lacks = [len(of) for of in before.needs]
    found: dict[int, None] = {}

    def issue(task: int) -> None:
        """Issue a task after what it needs, and what follows each at once."""
        todo = [task]
        while todo:
            at = todo[-1]
            need = None if at in found else next((need for need in before.needs[at] if need not in found), None)
            if need is not None:
                todo.append(need)
                continue
            todo.pop()
            if at not in found:
                found[at] = None
                for user in reversed(before.users[at]):
                    lacks[user] -= 1
                    if not lacks[user] and follows[user]:
                        todo.append(user)

    for task in range(len(tasks)):
        if not sinks[task] and not (follows[task] and lacks[task]):
            issue(task)
    for task in range(len(tasks)):
        issue(task)
    return list(found)


def unavoidable(problem: Problem, before: Precedence, task: int) -> int:
    """Bytes that every order holds while ``task`` runs: what has to be made by then and is needed then, or later."""
    earlier, later = _reached(before.needs, task), _reached(before.users, task)
    waits = problem.waits_of()
    held = problem.base
    for storage in problem.storages:
        users = users_of(storage, waits)
        if storage.maker in earlier and not (users and later.isdisjoint(users)):
            held += storage.size
    return held


def _reached(ways: Sequence[Sequence[int]], start: int) -> set[int]:
    found, todo = {start}, [start]
    while todo:
        new = [task for task in ways[todo.pop()] if task not in found]
        found.update(new)
        todo += new
    return found


def fitting(problem: Problem, before: Precedence, order: Sequence[int], limit: int) -> list[int] | None:
    """An order of a peak within ``limit``, close to ``order``; None where there is none, or none was found in time.

    The search is depth first. What fits and leaves no more held than before comes at once: every order from there on
    can as well begin with it. Of all else that fits one after the other is tried, as ``order`` has them; states that
    led nowhere are remembered. A step of few tasks is searched to the end.
    """
    return _Search(problem, before, order, limit).run()


class _Search:
    """Tasks issued one after the other, that can be taken back."""

    def __init__(self, problem: Problem, before: Precedence, order: Sequence[int], limit: int) -> None:
        self.before, self.limit, self.order = before, limit, order
        self.place = [0] * len(order)
        for place, task in enumerate(order):
            self.place[task] = place
        waits = problem.waits_of()
        self.sizes = [storage.size for storage in problem.storages]
        self.made = [0] * len(order)
        self.used: list[list[int]] = [[] for _ in order]
        self.left: list[int] = []  # by storage: tasks not issued that it is held for
        for at, storage in enumerate(problem.storages):
            users = users_of(storage, waits)
            self.made[storage.maker] += storage.size
            for user in users:
                self.used[user].append(at)
            self.left.append(len(users))
        self.now = problem.base
        self.lacks = [len(of) for of in before.needs]
        self.ready = [place for place, task in enumerate(order) if not self.lacks[task]]
        self.issued: list[int] = []
        self.state = 0  # a bit a task, whether it is issued
        self.looks = max(_LOOKS * len(order), _FEWEST_LOOKS)

    def run(self) -> list[int] | None:
        dead: set[int] = set()
        choices: list[tuple[int, list[int], int]] = []  # how many were issued, what else may come, the state
        while len(self.issued) < len(self.order):
            fit = self.fitting()
            task = next((task for task in fit if self.made[task] <= self.freed(task)), None)
            if task is None:
                nexts = [task for task in fit if self.state | 1 << task not in dead]
                choices.append((len(self.issued), nexts[::-1], self.state))
                while not choices[-1][1]:
                    dead.add(choices.pop()[2])
                    if not choices or self.looks < 0:
                        return None
                while len(self.issued) > choices[-1][0]:
                    self.take_back()
                task = choices[-1][1].pop()
            self.issue(task)
        return self.issued

    def fitting(self) -> list[int]:
        """What there is room for of what can come next."""
        self.looks -= min(len(self.ready), _WIDTH)
        tasks = [self.order[place] for place in self.ready[:_WIDTH]]
        return [task for task in tasks if self.now + self.made[task] <= self.limit]

    def freed(self, task: int) -> int:
        """Bytes that are held for none but ``task`` and what is issued."""
        return sum(self.sizes[at] for at in self.used[task] if self.left[at] == 1)

    def issue(self, task: int) -> None:
        self.now += self.made[task] - self.freed(task)
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
        task = self.issued.pop()
        for user in self.before.users[task]:
            if not self.lacks[user]:
                self.ready.remove(self.place[user])
            self.lacks[user] += 1
        insort(self.ready, self.place[task])
        self.state ^= 1 << task
        for at in self.used[task]:
            self.left[at] += 1
        self.now -= self.made[task] - self.freed(task)
