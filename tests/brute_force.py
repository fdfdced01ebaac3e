"""The best orders of small problems, by trying all of them."""

from __future__ import annotations

import heapq
import math
import random
from itertools import pairwise

from weft.inductor.comm.problem import Kind, Problem, Storage, Task
from weft.inductor.comm.simulate import Holding, Machine


def least_seconds(problem: Problem, memory_limit: int | None = None, at_most: float = math.inf) -> float:
    """The time of the fastest order whose peak is within the limit: infinite where there is none.

    Depth first over all orders. An order is left where the compute stream is already late: what it has done, and the
    computation left, are no less than ``at_most`` or the time of an order found before.
    """
    tasks, follows = problem.tasks, _follows(problem)
    best = at_most

    def go_on(issued: int, machine: Machine, holding: Holding, left: float) -> None:
        nonlocal best
        if issued == (1 << len(tasks)) - 1:
            for at, task in enumerate(tasks):
                if task.kind is Kind.START:
                    machine.wait(at)
            best = min(best, machine.now)
            return
        for at, task in enumerate(tasks):
            if issued >> at & 1 or follows[at] & ~issued:
                continue
            if memory_limit is not None and holding.during(at) > memory_limit:
                continue
            then, held = machine.copy(), holding.copy()
            then.issue(at)
            held.issue(at)
            rest = left - task.seconds if task.kind is Kind.COMPUTE else left
            if then.now + rest < best - 1e-12:
                go_on(issued | 1 << at, then, held, rest)

    go_on(0, Machine(problem), Holding(problem), sum(t.seconds for t in tasks if t.kind is Kind.COMPUTE))
    return best


def least_peak(problem: Problem) -> int:
    """The smallest peak of any order: a path over the sets of tasks issued whose largest step is least (Dijkstra)."""
    follows = _follows(problem)
    everything = (1 << len(problem.tasks)) - 1
    todo: list[tuple[int, int]] = [(problem.base, 0)]
    seen: set[int] = set()
    while True:
        peak, issued = heapq.heappop(todo)
        if issued == everything:
            return peak
        if issued in seen:
            continue
        seen.add(issued)
        for at, before in enumerate(follows):
            if not issued >> at & 1 and not before & ~issued:
                heapq.heappush(todo, (max(peak, _held(problem, issued) + _made(problem, at)), issued | 1 << at))


def random_problem(rng: random.Random, most_tasks: int = 9) -> Problem:
    """A problem with one to three collectives on one or two lanes, of at most so many tasks (at least eight)."""
    tasks: list[Task] = []
    storages: list[Storage] = []
    values: list[tuple[int, Storage | None]] = []  # what can be read: the task that it is there after, its memory
    open_: list[tuple[int, Storage]] = []  # collectives not waited for
    lanes, links = rng.choice([(1, 1), (2, 1), (2, 2)])
    coming = rng.randint(1, 3)
    length = rng.randint(2 * coming + 1, most_tasks)

    def make(kind: Kind, reads: int, size: int, **more: float | str | bool) -> tuple[int, Storage | None]:
        at = len(tasks)
        read = rng.sample(values, min(reads, len(values)))
        tasks.append(Task(f"{kind.value}{at}", kind, tuple(sorted(of for of, _ in read)), **more))  # type: ignore[arg-type]
        for storage in dict.fromkeys(storage for _, storage in read if storage is not None):
            storage.readers += (at,)
        made = Storage(size, at, kept=rng.random() < 0.1) if size else None
        storages.extend([made] if made else [])
        return at, made

    while len(tasks) < length:
        room = length - len(tasks) - len(open_) - 2 * coming
        what = rng.choice([*["compute"] * (3 if room > 0 else 0), *["start"] * coming, *["wait"] * len(open_)])
        if what == "compute":
            if rng.random() < 0.1 and values:
                values.append((make(Kind.FREE, 1, 0)[0], values[-1][1]))
                continue
            values.append(
                make(
                    Kind.COMPUTE,
                    rng.randint(0, 2),
                    rng.randint(0, 8),
                    seconds=float(rng.randint(1, 8)),
                    pinned=rng.random() < 0.1,
                )
            )
        elif what == "start":
            coming -= 1
            at, made = make(
                Kind.START,
                rng.randint(0, 2),
                rng.randint(1, 12),
                seconds=float(rng.randint(1, 12)),
                lane=f"lane{rng.randrange(lanes)}",
                link=f"link{rng.randrange(links)}",
                interference=rng.choice([0.0, 0.25, 0.5]),
            )
            assert made is not None
            open_.append((at, made))
        else:
            start, made = open_.pop(rng.randrange(len(open_)))
            at = len(tasks)
            tasks.append(Task(f"wait{at}", Kind.WAIT, (start,)))
            made.readers += (at,)
            values.append((at, made))
    return Problem(tasks, storages, base=rng.randint(0, 3))


def _follows(problem: Problem) -> list[int]:
    """By task, those that come before it, a bit each."""
    follows = [sum(1 << need for need in dict.fromkeys(task.needs)) for task in problem.tasks]
    pinned = [at for at, task in enumerate(problem.tasks) if task.pinned]
    for before, after in pairwise(pinned):
        follows[after] |= 1 << before
    return follows


def _made(problem: Problem, at: int) -> int:
    return sum(storage.size for storage in problem.storages if storage.maker == at)


def _held(problem: Problem, issued: int) -> int:
    """Bytes held between two tasks, by the definition of a storage."""
    waits = problem.waits_of()

    def needed(storage: Storage) -> bool:
        users = [storage.maker, *storage.readers]
        starts = [user for user in users if user in waits]
        if storage.kept or any(not waits[start] for start in starts):
            return True
        return any(not issued >> user & 1 for user in [*users, *(wait for start in starts for wait in waits[start])])

    return problem.base + sum(s.size for s in problem.storages if issued >> s.maker & 1 and needed(s))
