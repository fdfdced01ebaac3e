"""How long a step takes in a given order, and what memory it holds, by the model of :mod:`weft.inductor.comm.problem`.

Computation and collectives are fluids. A collective that shares its link with n - 1 others moves at 1/n of its speed;
computation beside collectives moves at what the worst of them leaves it. Speeds change only where a collective begins
or ends, so between two such events the end of a task is one division and one addition.

:class:`Machine` (time) and :class:`Holding` (memory) take tasks one by one and are cheap to copy: a scheduler looks
ahead on a copy. :func:`simulate` is a loop over both.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.inductor.comm.problem import Kind, Problem, Storage

# The lane of the compute stream in spans.
COMPUTE = "compute"


class Span(NamedTuple):
    """When a task ran: seconds from the beginning of the step, ``lane`` that of a START or :data:`COMPUTE`."""

    task: int
    lane: str
    start: float
    end: float


class Machine:
    """The streams of a GPU while a step is issued to it, one task after the other.

    Tasks are positions in ``problem.tasks``, issued in an order that runs: that is not checked.

    Attributes:
        now: when the compute stream has done all that was issued to it, in seconds. Collectives may go on beyond.
        slowed: by lane, the seconds that its collectives have cost computation: of several at once, the one that
            interferes most.
        ended: where it is a list, gets the span of every collective that ends. A copy has none.
    """

    __slots__ = (
        "_active",
        "_begun",
        "_ends",
        "_left",
        "_next_end",
        "_pending",
        "_queues",
        "_since",
        "_slowest",
        "_speed",
        "_tables",
        "ended",
        "now",
        "slowed",
    )

    def __init__(self, problem: Problem) -> None:
        self._tables = tables = _Tables(problem)
        lanes, links = len(tables.lanes), len(tables.links)
        self.now = 0.0
        self.slowed = dict.fromkeys(tables.lanes, 0.0)
        self.ended: list[Span] | None = None
        self._pending: set[int] = set()  # STARTs issued whose collectives have not ended
        # By lane: those of them in order of issue, of which the first runs; when it began, its seconds of work left at
        # the time `_since` of its link, and when it ends if no other begins or ends before.
        self._queues: list[deque[int]] = [deque() for _ in range(lanes)]
        self._begun = [0.0] * lanes
        self._left = [0.0] * lanes
        self._ends = [math.inf] * lanes
        # By link: the lanes whose collectives run on it, and when these last changed.
        self._active: list[tuple[int, ...]] = [()] * links
        self._since = [0.0] * links
        # What follows from it: the first of `_ends` (never before `now`), the speed of computation, the lane behind it.
        self._next_end = math.inf
        self._speed = 1.0
        self._slowest = ""

    def issue(self, task: int) -> None:
        """Hand a task to the streams. Of a WAIT or COMPUTE, ``now`` is then its end."""
        kind = self._tables.kinds[task]
        if kind is Kind.COMPUTE:
            self._compute(self._tables.seconds[task])
        elif kind is Kind.START:
            self._start(task)
        elif kind is Kind.WAIT:
            self.wait(self._tables.starts[task])

    def wait(self, start: int) -> None:
        """Hold the compute stream until the collective of a START that was issued has ended."""
        while start in self._pending:
            self.now = self._next_end
            self._end_first()

    def ready_at(self, start: int) -> float:
        """From when on a WAIT for a START that was issued does not hold the compute stream, if nothing else is issued;
        ``now`` where its collective has ended."""
        if start not in self._pending:
            return self.now
        if self._queues[lane := self._tables.lane[start]][0] == start and self._ends[lane] == self._next_end:
            return self._next_end
        ahead = self.copy()
        ahead.wait(start)
        return ahead.now

    def copy(self) -> Machine:
        """One that goes on from here by itself: O(lanes + collectives that have not ended)."""
        other = object.__new__(Machine)
        other._tables, other.now, other.slowed, other.ended = self._tables, self.now, self.slowed.copy(), None
        other._pending, other._queues = self._pending.copy(), [queue.copy() for queue in self._queues]
        other._begun, other._left, other._ends = self._begun[:], self._left[:], self._ends[:]
        other._active, other._since = self._active[:], self._since[:]
        other._next_end, other._speed, other._slowest = self._next_end, self._speed, self._slowest
        return other

    def _compute(self, work: float) -> None:
        while work > (done := (self._next_end - self.now) * self._speed):
            self._compute_until(self._next_end, done)
            work -= done
            self._end_first()
        if work:
            self._compute_until(min(self.now + work / self._speed, self._next_end), work)

    def _compute_until(self, time: float, done: float) -> None:
        if self._speed < 1:
            self.slowed[self._slowest] += time - self.now - done
        self.now = time

    def _start(self, start: int) -> None:
        lane = self._tables.lane[start]
        self._pending.add(start)
        self._queues[lane].append(start)
        if len(self._queues[lane]) == 1:
            self._begin(lane)
            self._look_ahead()

    def _end_first(self) -> None:
        """End the collective that ends ``now``, the first of all, and begin the next of its lane."""
        lane = self._ends.index(self.now)
        queue = self._queues[lane]
        start = queue.popleft()
        self._pending.remove(start)
        if self.ended is not None:
            self.ended.append(Span(start, self._tables.lanes[lane], self._begun[lane], self.now))
        self._ends[lane] = math.inf
        link = self._tables.link[start]
        self._share(link, tuple(other for other in self._active[link] if other != lane))
        if queue:
            self._begin(lane)
        self._look_ahead()

    def _begin(self, lane: int) -> None:
        """Begin the first collective of a lane's queue."""
        start = self._queues[lane][0]
        link = self._tables.link[start]
        self._begun[lane] = self.now
        self._left[lane] = self._tables.seconds[start]
        self._share(link, (*self._active[link], lane))

    def _share(self, link: int, lanes: tuple[int, ...]) -> None:
        """From ``now`` on, the collectives of ``lanes`` run on a link."""
        before = self._active[link]
        for lane in before:
            self._left[lane] = max(self._left[lane] - (self.now - self._since[link]) / len(before), 0.0)
        self._active[link], self._since[link] = lanes, self.now
        for lane in lanes:
            self._ends[lane] = self.now + self._left[lane] * len(lanes)

    def _look_ahead(self) -> None:
        """Bring up to date what follows from the collectives under way."""
        worst = 0.0
        for lane, queue in enumerate(self._queues):
            if queue and (interference := self._tables.interference[queue[0]]) > worst:
                worst, self._slowest = interference, self._tables.lanes[lane]
        self._speed = max(1.0 - worst, 0.0)
        self._next_end = min(self._ends, default=math.inf)


class _Tables:
    """A problem as the machine reads it: one list an attribute, lanes and links by number."""

    def __init__(self, problem: Problem) -> None:
        tasks = problem.tasks
        lanes: dict[str, int] = {}
        links: dict[str, int] = {}
        self.kinds = [task.kind for task in tasks]
        self.seconds = [task.seconds for task in tasks]
        self.interference = [task.interference for task in tasks]
        self.lane = [lanes.setdefault(t.lane, len(lanes)) if t.kind is Kind.START else -1 for t in tasks]
        self.link = [links.setdefault(t.link, len(links)) if t.kind is Kind.START else -1 for t in tasks]
        self.starts = [problem.start_of(at) if task.kind is Kind.WAIT else -1 for at, task in enumerate(tasks)]
        self.lanes, self.links = list(lanes), list(links)


class Holding:
    """The memory of a step while it is issued, one task after the other, in an order that runs (not checked).

    Attributes:
        now: bytes held once the tasks issued so far have let go of what no other reads.
        peak: the most bytes held while one of them was issued.
    """

    __slots__ = ("_left", "_tables", "now", "peak")

    def __init__(self, problem: Problem) -> None:
        self._tables = tables = _Storages(problem)
        self.now = self.peak = problem.base
        self._left = array("i", tables.uses)  # by storage: tasks not issued that need it

    def during(self, task: int) -> int:
        """Bytes held while ``task`` is issued, if it is the next."""
        return self.now + self._tables.made[task]

    def after(self, task: int) -> int:
        """Bytes held once ``task`` is issued, if it is the next: O(storages it makes and reads)."""
        sizes, left = self._tables.sizes, self._left
        return self.during(task) - sum(sizes[used] for used in self._tables.used[task] if left[used] == 1)

    def issue(self, task: int) -> int:
        """Issue ``task``; the bytes held while it runs."""
        during = self.now = self.during(task)
        self.peak = max(self.peak, during)
        sizes, left = self._tables.sizes, self._left
        for used in self._tables.used[task]:
            left[used] -= 1
            if not left[used]:
                self.now -= sizes[used]
        return during

    def copy(self) -> Holding:
        """One that goes on from here by itself: four bytes copied a storage of the problem."""
        other = object.__new__(Holding)
        other._tables, other.now, other.peak, other._left = self._tables, self.now, self.peak, self._left[:]
        return other


class _Storages:
    """The storages of a problem by task: bytes that it makes, storages that are held for it."""

    def __init__(self, problem: Problem) -> None:
        waits = problem.waits_of()
        self.sizes = [storage.size for storage in problem.storages]
        self.made = [0] * len(problem.tasks)
        self.used: list[list[int]] = [[] for _ in problem.tasks]
        self.uses: list[int] = []
        for at, storage in enumerate(problem.storages):
            users = users_of(storage, waits)
            self.made[storage.maker] += storage.size
            for user in users:
                self.used[user].append(at)
            self.uses.append(len(users))


def users_of(storage: Storage, waits: dict[int, list[int]]) -> list[int]:
    """The tasks that a storage is held for, its maker among them; none where it is held to the end.

    Args:
        waits: :meth:`Problem.waits_of`.
    """
    users = dict.fromkeys((storage.maker, *storage.readers))
    starts = [user for user in users if user in waits]
    if storage.kept or not all(waits[start] for start in starts):
        return []
    return list(users | dict.fromkeys(wait for start in starts for wait in waits[start]))


@dataclass(eq=False)
class Simulation:
    """A step in one order.

    Attributes:
        problem, order: what was simulated.
        seconds: until the compute stream and every collective have ended.
        spans: of computation and collectives, in order of their starts.
        waits: the times that the compute stream stood, ``task`` being the START it stood for, ``lane`` ``COMPUTE``.
        slowed_seconds: what interference cost computation, by lane; of several lanes at once, to the worst.
        compute_seconds: computation alone on the GPU.
        issued: when the compute stream came to each position of ``order``.
        memory: bytes held at each position of ``order``.
    """

    problem: Problem
    order: Sequence[int]
    seconds: float
    spans: list[Span]
    waits: list[Span]
    slowed_seconds: dict[str, float]
    compute_seconds: float
    issued: list[float]
    memory: list[int]

    @property
    def peak(self) -> int:
        """The most bytes held."""
        return max(self.memory, default=self.problem.base)

    @property
    def peak_at(self) -> int:
        """The first position of ``order`` at which they are."""
        return self.memory.index(self.peak)

    @cached_property
    def exposed(self) -> dict[int, float]:
        """Seconds that the compute stream stood for each START that it stood for."""
        found: dict[int, float] = {}
        for wait in self.waits:
            found[wait.task] = found.get(wait.task, 0.0) + wait.end - wait.start
        return found

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the compute stream stood."""
        return sum(self.exposed.values())

    @cached_property
    def collectives(self) -> dict[int, Span]:
        """The span of each START, in order of their starts."""
        return {span.task: span for span in self.spans if span.lane != COMPUTE}

    @cached_property
    def computation(self) -> list[Span]:
        """The spans of the compute stream."""
        return [span for span in self.spans if span.lane == COMPUTE]

    def beside(self, start: int) -> list[tuple[int, float]]:
        """What hides a collective: the computations that ran while it did, with the seconds of that, longest first."""
        span = self.collectives[start]
        first = bisect_right(self.computation, span.start, key=lambda computed: computed.end)
        after = bisect_left(self.computation, span.end, key=lambda computed: computed.start)
        found = [(c.task, min(c.end, span.end) - max(c.start, span.start)) for c in self.computation[first:after]]
        return sorted(((task, seconds) for task, seconds in found if seconds > 0), key=lambda pair: (-pair[1], pair[0]))


def simulate(problem: Problem, order: Sequence[int] | None = None) -> Simulation:
    """Run a step in an order that runs (``problem.is_order``; the order of its tasks where none is given).

    Collectives that nothing waits for are waited for at the end, in order of issue.
    """
    order = range(len(problem.tasks)) if order is None else order
    assert problem.is_order(order), "tasks before what they need"
    machine, holding = Machine(problem), Holding(problem)
    machine.ended = collectives = []
    computed: list[Span] = []
    waits: list[Span] = []
    issued: list[float] = []
    memory: list[int] = []
    tasks = problem.tasks
    for at in order:
        issued.append(before := machine.now)
        machine.issue(at)
        memory.append(holding.issue(at))
        kind = tasks[at].kind
        if kind is Kind.COMPUTE:
            computed.append(Span(at, COMPUTE, before, machine.now))
        elif machine.now > before:
            waits.append(Span(problem.start_of(at), COMPUTE, before, machine.now))
    for at in order:
        before = machine.now
        if tasks[at].kind is Kind.START:
            machine.wait(at)
            if machine.now > before:
                waits.append(Span(at, COMPUTE, before, machine.now))
    return Simulation(
        problem,
        order,
        seconds=machine.now,
        spans=sorted(computed + collectives, key=lambda span: (span.start, span.end, span.task)),
        waits=waits,
        slowed_seconds=machine.slowed,
        compute_seconds=sum(task.seconds for task in tasks if task.kind is Kind.COMPUTE),
        issued=issued,
        memory=memory,
    )
