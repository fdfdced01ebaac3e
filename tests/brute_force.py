"""The best orders of small task graphs, by trying all of them."""

from __future__ import annotations

import heapq
import math
import random
from itertools import pairwise

from weft.inductor.cost.simulate import LiveMemory, Machine
from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph
from weft.inductor.schedule.precedence import precedence


def least_seconds(task_graph: TaskGraph, memory_limit: int | None = None, at_most: float = math.inf) -> float:
    """The time of the fastest order whose peak is within the limit: infinite where there is none.

    Branch and bound, depth first over all orders. An order is left where its lower bound is no less than ``at_most`` or
    the time of an order found before: the compute stream still has to do the computation that is left, and each stream
    the collectives that are left, and then the computation that needs the last of them. A task that takes no time and
    allocates nothing is issued as soon as possible: no order gets slower or needs more memory by that.
    """
    tasks, follows = task_graph.tasks, _follows(task_graph)
    after = _seconds_after(task_graph, follows)
    allocates = {storage.maker for storage in task_graph.storages if storage.size}
    instant = [at for at, task in enumerate(tasks) if task.kind is Kind.NO_TIME and at not in allocates]
    streams: dict[str, list[int]] = {}
    for at, task in enumerate(tasks):
        if task.kind is Kind.START:
            streams.setdefault(task.stream, []).append(at)
    everything = (1 << len(tasks)) - 1
    best = at_most

    def bound(issued: int, now: float, left: float) -> float:
        most = now + left
        for starts in streams.values():
            open_ = [at for at in starts if not issued >> at & 1]
            if open_:
                most = max(most, now + sum(tasks[at].seconds for at in open_) + min(after[at] for at in open_))
        return most

    def go_on(issued: int, machine: Machine, live_memory: LiveMemory, left: float) -> None:
        nonlocal best
        if issued == everything:
            for at, task in enumerate(tasks):
                if task.kind is Kind.START:
                    machine.wait(at)
            best = min(best, machine.now)
            return
        ready = [at for at in range(len(tasks)) if not issued >> at & 1 and not follows[at] & ~issued]
        for at in [at for at in ready if at in instant][:1] or ready:
            if memory_limit is not None and live_memory.during(at) > memory_limit:
                continue
            then, held = machine.copy(), live_memory.copy()
            then.issue(at)
            held.issue(at)
            rest = left - tasks[at].seconds if tasks[at].kind is Kind.COMPUTE else left
            if bound(issued | 1 << at, then.now, rest) < best - 1e-12:
                go_on(issued | 1 << at, then, held, rest)

    go_on(0, Machine(task_graph), LiveMemory(task_graph), sum(t.seconds for t in tasks if t.kind is Kind.COMPUTE))
    return best


def least_peak(task_graph: TaskGraph) -> int:
    """The smallest peak of any order: a path over the sets of tasks issued whose largest step is least (Dijkstra)."""
    follows = _follows(task_graph)
    everything = (1 << len(task_graph.tasks)) - 1
    todo: list[tuple[int, int]] = [(task_graph.base, 0)]
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
                heapq.heappush(todo, (max(peak, _held(task_graph, issued) + _made(task_graph, at)), issued | 1 << at))


def random_task_graph(rng: random.Random, most_tasks: int = 9) -> TaskGraph:
    """A task graph with one to three collectives on one or two streams, of at most so many tasks (at least eight)."""
    tasks: list[Task] = []
    storages: list[Storage] = []
    values: list[tuple[int, Storage | None]] = []  # what can be read: the task that it is there after, its memory
    open_: list[tuple[int, Storage]] = []  # collectives not waited for
    streams, links = rng.choice([(1, 1), (2, 1), (2, 2)])
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
                values.append((make(Kind.NO_TIME, 1, 0)[0], values[-1][1]))
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
                stream=f"stream{rng.randrange(streams)}",
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
    return TaskGraph(tasks, storages, base=rng.randint(0, 3))


def random_order(rng: random.Random, task_graph: TaskGraph) -> list[int]:
    """A valid order, each task drawn from those that lack nothing."""
    needs = precedence(task_graph).needs
    order: list[int] = []
    while len(order) < len(needs):
        order.append(rng.choice([at for at, of in enumerate(needs) if at not in order and set(of) <= set(order)]))
    return order


def _follows(task_graph: TaskGraph) -> list[int]:
    """By task, those that come before it, a bit each."""
    follows = [sum(1 << need for need in dict.fromkeys(task.needs)) for task in task_graph.tasks]
    pinned = [at for at, task in enumerate(task_graph.tasks) if task.pinned]
    for before, after in pairwise(pinned):
        follows[after] |= 1 << before
    return follows


def _seconds_after(task_graph: TaskGraph, follows: list[int]) -> list[float]:
    """By task, the longest chain of tasks behind it, in seconds; needs come before their users in ``tasks``."""
    after = [0.0] * len(follows)
    for user in reversed(range(len(follows))):
        for need in range(user):
            if follows[user] >> need & 1:
                after[need] = max(after[need], task_graph.tasks[user].seconds + after[user])
    return after


def _made(task_graph: TaskGraph, at: int) -> int:
    return sum(storage.size for storage in task_graph.storages if storage.maker == at)


def _held(task_graph: TaskGraph, issued: int) -> int:
    """Bytes held between two tasks, by the definition of a storage."""
    waits = task_graph.waits_of()

    def needed(storage: Storage) -> bool:
        users = [storage.maker, *storage.readers]
        starts = [user for user in users if user in waits]
        if storage.kept or any(not waits[start] for start in starts):
            return True
        return any(not issued >> user & 1 for user in [*users, *(wait for start in starts for wait in waits[start])])

    return task_graph.base + sum(s.size for s in task_graph.storages if issued >> s.maker & 1 and needed(s))
