"""The simulator: time and memory of a step in one order of issue, by the model of
:mod:`weft.inductor.cost.task_graph`.

It is a fluid model. A collective that shares its link with n - 1 others progresses at 1/n of its speed. Computation
beside collectives is slowed by the one with the largest interference. Speeds change only when a collective begins or
ends, so between two such events the end of a task is one division and one addition.

:class:`Machine` (time) and :class:`LiveMemory` (memory) accept tasks one by one and are cheap to copy: a scheduler
looks ahead on a copy. :func:`simulate` is a loop over both.
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

from weft.inductor.cost.task_graph import Kind, Storage, TaskGraph

# The name of the compute stream in spans.
COMPUTE = "compute"


class TaskSpan(NamedTuple):
    """When a task ran, in seconds from the beginning of the step; ``stream`` is that of a START or :data:`COMPUTE`."""

    task: int
    stream: str
    start: float
    end: float


class Machine:
    """The compute stream and the communication streams of a GPU while tasks are issued to them one by one.

    Tasks are positions in ``task_graph.tasks``. The order of issue must respect their needs; this is not checked.

    Attributes:
        now: when the compute stream has finished everything issued so far, in seconds. Collectives may still run.
        slowed: by stream, the seconds that its collectives have cost computation. Of several collectives at once, only
            the one with the largest interference counts.
        ended: if it is a list, the span of every collective that ends is appended to it. A copy has None.
    """

    __slots__ = (
        "_active",
        "_begun",
        "_ends",
        "_fifos",
        "_left",
        "_next_end",
        "_pending",
        "_since",
        "_slowest",
        "_speed",
        "_tables",
        "ended",
        "now",
        "slowed",
    )

    def __init__(self, task_graph: TaskGraph) -> None:
        self._tables = tables = task_graph.derived(_Tables)
        streams, links = len(tables.streams), len(tables.links)
        self.now = 0.0
        self.slowed = dict.fromkeys(tables.streams, 0.0)
        self.ended: list[TaskSpan] | None = None
        self._pending: set[int] = set()  # STARTs issued whose collectives have not ended
        # By stream: the pending STARTs in order of issue, of which the first runs; when that one began; its seconds of
        # work left at the time `_since` of its link; and when it ends, if no other collective begins or ends before.
        # NCCL runs one collective per communicator at a time, so a stream is a FIFO.
        self._fifos: list[deque[int]] = [deque() for _ in range(streams)]
        self._begun = [0.0] * streams
        self._left = [0.0] * streams
        self._ends = [math.inf] * streams
        # By link: the streams whose collectives run on it, and when this set last changed.
        self._active: list[tuple[int, ...]] = [()] * links
        self._since = [0.0] * links
        # Derived from the above: the minimum of `_ends` (never before `now`), the speed of computation (1: alone on the
        # GPU), and the stream that limits it. They are cached because `issue` is the inner loop of the scheduler.
        self._next_end = math.inf
        self._speed = 1.0
        self._slowest = ""

    def issue(self, task: int) -> None:
        """Issue a task. After a WAIT or COMPUTE, ``now`` is its end."""
        kind = self._tables.kinds[task]
        if kind is Kind.COMPUTE:
            self._compute(self._tables.seconds[task])
        elif kind is Kind.START:
            self._start(task)
        elif kind is Kind.WAIT:
            self.wait(self._tables.starts[task])

    def wait(self, start: int) -> None:
        """Stall the compute stream until the collective of a START that was issued has ended."""
        # Ends come in the order of time, whatever their streams: each may change the shares of a link and the speed of
        # computation.
        while start in self._pending:
            self.now = self._next_end
            self._end_first()

    def ready_at(self, start: int) -> float:
        """When, in seconds, a WAIT for an issued START stops stalling the compute stream, if nothing else is issued.

        Returns ``now`` if its collective has ended.
        """
        if start not in self._pending:
            return self.now
        # The next collective to end needs no copy: no event comes before it.
        if self._fifos[stream := self._tables.stream[start]][0] == start and self._ends[stream] == self._next_end:
            return self._next_end
        ahead = self.copy()
        ahead.wait(start)
        return ahead.now

    def copy(self) -> Machine:
        """An independent copy. Takes O(streams + pending collectives)."""
        other = object.__new__(Machine)  # without __init__, which would read the whole task graph
        other._tables, other.now, other.slowed, other.ended = self._tables, self.now, self.slowed.copy(), None
        other._pending, other._fifos = self._pending.copy(), [fifo.copy() for fifo in self._fifos]
        other._begun, other._left, other._ends = self._begun[:], self._left[:], self._ends[:]
        other._active, other._since = self._active[:], self._since[:]
        other._next_end, other._speed, other._slowest = self._next_end, self._speed, self._slowest
        return other

    def _compute(self, work: float) -> None:
        if self._next_end == math.inf:  # nothing runs beside it
            self.now += work
            return
        # The speed is constant until the next end of a collective: advance event by event.
        while work > (done := (self._next_end - self.now) * self._speed):
            self._compute_until(self._next_end, done)
            work -= done
            self._end_first()
        # If no work remains, the speed can be 0 too: do not divide. Rounding must not carry `now` beyond `_next_end`,
        # because `_end_first` finds the stream that ends by comparing its end with `now`.
        if work:
            self._compute_until(min(self.now + work / self._speed, self._next_end), work)

    def _compute_until(self, time: float, done: float) -> None:
        if self._speed < 1:
            self.slowed[self._slowest] += time - self.now - done
        self.now = time

    def _start(self, start: int) -> None:
        stream = self._tables.stream[start]
        self._pending.add(start)
        self._fifos[stream].append(start)
        # Otherwise its stream is busy, and it begins when the ones before it have ended.
        if len(self._fifos[stream]) == 1:
            self._begin(stream)
            self._look_ahead()

    def _end_first(self) -> None:
        """End the collective whose end is ``now``, the earliest one, and begin the next of its stream."""
        stream = self._ends.index(self.now)  # exact: `now` was assigned from `_next_end`, the minimum of `_ends`
        fifo = self._fifos[stream]
        start = fifo.popleft()
        self._pending.remove(start)
        if self.ended is not None:
            self.ended.append(TaskSpan(start, self._tables.streams[stream], self._begun[stream], self.now))
        self._ends[stream] = math.inf
        link = self._tables.link[start]
        # The others get its share at once, before the next of its stream takes one.
        self._share(link, tuple(other for other in self._active[link] if other != stream))
        if fifo:
            self._begin(stream)
        self._look_ahead()

    def _begin(self, stream: int) -> None:
        """Begin the first collective in a stream."""
        start = self._fifos[stream][0]
        link = self._tables.link[start]
        self._begun[stream] = self.now
        self._left[stream] = self._tables.seconds[start]
        self._share(link, (*self._active[link], stream))

    def _share(self, link: int, streams: tuple[int, ...]) -> None:
        """From ``now`` on, the collectives of ``streams`` share a link equally."""
        before = self._active[link]
        # Progress since the last change was made at the old share. Rounding must not leave negative work, which would
        # put an end before `now`.
        for stream in before:
            self._left[stream] = max(self._left[stream] - (self.now - self._since[link]) / len(before), 0.0)
        self._active[link], self._since[link] = streams, self.now
        for stream in streams:
            self._ends[stream] = self.now + self._left[stream] * len(streams)

    def _look_ahead(self) -> None:
        """Update the derived values: the speed of computation and the next end of a collective."""
        worst = 0.0
        for stream, fifo in enumerate(self._fifos):
            if fifo and (interference := self._tables.interference[fifo[0]]) > worst:
                worst, self._slowest = interference, self._tables.streams[stream]
        self._speed = max(1.0 - worst, 0.0)
        self._next_end = min(self._ends, default=math.inf)


class _Tables:
    """A task graph as one list per attribute, with streams and links as numbers: faster to read in the inner loop."""

    def __init__(self, task_graph: TaskGraph) -> None:
        tasks = task_graph.tasks
        streams: dict[str, int] = {}
        links: dict[str, int] = {}
        self.kinds = [task.kind for task in tasks]
        self.seconds = [task.seconds for task in tasks]
        self.interference = [task.interference for task in tasks]
        self.stream = [streams.setdefault(t.stream, len(streams)) if t.kind is Kind.START else -1 for t in tasks]
        self.link = [links.setdefault(t.link, len(links)) if t.kind is Kind.START else -1 for t in tasks]
        self.starts = [task_graph.start_of(at) if task.kind is Kind.WAIT else -1 for at, task in enumerate(tasks)]
        self.streams, self.links = list(streams), list(links)


class LiveMemory:
    """The live memory of a step while tasks are issued one by one. The order must be valid; this is not checked.

    Memory is freed at issue, not at completion: PyTorch's allocator and the memory plan both reuse memory in the order
    of the compute stream.

    Attributes:
        now: live bytes after the tasks issued so far, without what nothing reads any more.
        peak: the most live bytes while one of them was issued.
    """

    __slots__ = ("_left", "_tables", "now", "peak")

    def __init__(self, task_graph: TaskGraph) -> None:
        self._tables = tables = task_graph.derived(StorageUses)
        self.now = self.peak = task_graph.base
        self._left = array("i", tables.uses)  # by storage: its users that are not issued; an array copies fast

    @property
    def allocated(self) -> Sequence[int]:
        """By task, the bytes that it allocates."""
        return self._tables.allocated

    def during(self, task: int) -> int:
        """Live bytes while ``task`` runs, if it is issued next."""
        return self.now + self._tables.allocated[task]

    def after(self, task: int) -> int:
        """Live bytes after ``task``, if it is issued next. Takes O(storages that it allocates and reads)."""
        tables, left = self._tables, self._left
        live_bytes = self.now + tables.allocated[task]
        for used in tables.used[task]:
            if left[used] == 1:
                live_bytes -= tables.sizes[used]
        return live_bytes

    def freed(self, tasks: Sequence[int]) -> int:
        """Bytes of the storages that are live for unissued ``tasks`` only."""
        uses: dict[int, int] = {}
        for task in tasks:
            for used in self._tables.used[task]:
                uses[used] = uses.get(used, 0) + 1
        return sum(self._tables.sizes[used] for used, count in uses.items() if count == self._left[used])

    def issue(self, task: int) -> int:
        """Issue ``task``. Returns the live bytes while it runs."""
        tables, left = self._tables, self._left
        during = self.now = self.now + tables.allocated[task]
        if during > self.peak:
            self.peak = during
        for used in tables.used[task]:
            left[used] = remaining = left[used] - 1
            if not remaining:
                self.now -= tables.sizes[used]
        return during

    def copy(self) -> LiveMemory:
        """An independent copy. Copies 4 bytes per storage of the task graph."""
        other = object.__new__(LiveMemory)
        other._tables, other.now, other.peak, other._left = self._tables, self.now, self.peak, self._left[:]
        return other


def live_bytes(task_graph: TaskGraph, order: Sequence[int]) -> list[int]:
    """``Simulation.memory`` of a valid order, found without the times."""
    return list(map(LiveMemory(task_graph).issue, order))


def peak_memory(task_graph: TaskGraph, order: Sequence[int]) -> int:
    """The peak of a valid order in bytes: that of :func:`simulate`, found without the times."""
    return max(live_bytes(task_graph, order), default=task_graph.base)


class StorageUses:
    """The storages of a task graph by task.

    Attributes:
        sizes: bytes of each storage.
        users: by storage, the tasks that it is held for, see :func:`users_of`.
        allocated: by task, the bytes that it allocates.
        used: by task, the storages that are held for it.
        uses: by storage, how many tasks it is held for; 0 if it is live until the end of the step.
    """

    def __init__(self, task_graph: TaskGraph) -> None:
        waits = task_graph.waits_of()
        self.sizes = [storage.size for storage in task_graph.storages]
        self.users = [users_of(storage, waits) for storage in task_graph.storages]
        self.allocated = [0] * len(task_graph.tasks)
        self.used: list[list[int]] = [[] for _ in task_graph.tasks]
        self.uses: list[int] = []
        for at, (storage, users) in enumerate(zip(task_graph.storages, self.users, strict=True)):
            self.allocated[storage.maker] += storage.size
            for user in users:
                self.used[user].append(at)
            self.uses.append(len(users))


def users_of(storage: Storage, waits: dict[int, list[int]]) -> list[int]:
    """The tasks that a storage must be live for, including its maker; empty if it is live until the end of the step.

    Args:
        waits: the result of :meth:`TaskGraph.waits_of`.
    """
    if storage.kept:
        return []
    users = dict.fromkeys((storage.maker, *storage.readers))
    starts = [user for user in users if user in waits]
    if not all(waits[start] for start in starts):
        return []
    return [*users] if not starts else [*(users | dict.fromkeys(wait for start in starts for wait in waits[start]))]


@dataclass(eq=False)
class Simulation:
    """The result of a simulation. All times are in seconds, all memory is in bytes.

    Attributes:
        task_graph, order: the input of the simulation.
        seconds: until the compute stream and every collective have ended.
        spans: of computation and collectives, in order of their starts.
        waits: when the compute stream stalled; ``task`` is the START that it waited for, ``stream`` is ``COMPUTE``.
        slowed_seconds: by stream, what interference cost computation; of several streams at once, the worst one counts.
        compute_seconds: computation alone on the GPU.
        issued: when the compute stream came to each position of ``order``.
        memory: live bytes at each position of ``order``.
    """

    task_graph: TaskGraph
    order: Sequence[int]
    seconds: float
    spans: list[TaskSpan]
    waits: list[TaskSpan]
    slowed_seconds: dict[str, float]
    compute_seconds: float
    issued: list[float]
    memory: list[int]

    @property
    def peak(self) -> int:
        """The peak memory in bytes."""
        return max(self.memory, default=self.task_graph.base)

    @property
    def peak_at(self) -> int:
        """The first position of ``order`` at which memory is at its peak."""
        return self.memory.index(self.peak)

    @cached_property
    def exposed(self) -> dict[int, float]:
        """Exposed seconds of each START that the compute stream waited for."""
        seconds: dict[int, float] = {}
        for wait in self.waits:
            seconds[wait.task] = seconds.get(wait.task, 0.0) + wait.end - wait.start
        return seconds

    @property
    def exposed_seconds(self) -> float:
        """Exposed communication: seconds that the compute stream waited for collectives."""
        return sum(self.exposed.values())

    @cached_property
    def collectives(self) -> dict[int, TaskSpan]:
        """The span of each START, in order of their starts."""
        return {span.task: span for span in self.spans if span.stream != COMPUTE}

    @cached_property
    def computation(self) -> list[TaskSpan]:
        """The spans of the compute stream."""
        return [span for span in self.spans if span.stream == COMPUTE]

    def beside(self, start: int) -> list[tuple[int, float]]:
        """The computations that overlap with a collective, each with the seconds of overlap, longest first."""
        span = self.collectives[start]
        first = bisect_right(self.computation, span.start, key=lambda computed: computed.end)
        after = bisect_left(self.computation, span.end, key=lambda computed: computed.start)
        overlaps = [(c.task, min(c.end, span.end) - max(c.start, span.start)) for c in self.computation[first:after]]
        return sorted(
            ((task, seconds) for task, seconds in overlaps if seconds > 0), key=lambda pair: (-pair[1], pair[0])
        )


def simulate(task_graph: TaskGraph, order: Sequence[int] | None = None) -> Simulation:
    """Simulate a step in an order of issue, by default the order of ``task_graph.tasks``.

    ``order`` must be valid (``task_graph.is_order``). Collectives without a WAIT are waited for at the end, in order of
    issue: the step is not over before they are.
    """
    order = range(len(task_graph.tasks)) if order is None else order
    assert task_graph.is_order(order), "tasks before what they need"
    machine, live_memory = Machine(task_graph), LiveMemory(task_graph)
    machine.ended = collectives = []
    computed: list[TaskSpan] = []
    waits: list[TaskSpan] = []
    issued: list[float] = []
    memory: list[int] = []
    tasks = task_graph.tasks
    for at in order:
        issued.append(before := machine.now)
        machine.issue(at)
        memory.append(live_memory.issue(at))
        kind = tasks[at].kind
        if kind is Kind.COMPUTE:
            computed.append(TaskSpan(at, COMPUTE, before, machine.now))
        elif machine.now > before:  # only a WAIT stalls the compute stream
            waits.append(TaskSpan(task_graph.start_of(at), COMPUTE, before, machine.now))
    for at in order:
        before = machine.now
        if tasks[at].kind is Kind.START:
            machine.wait(at)
            if machine.now > before:
                waits.append(TaskSpan(at, COMPUTE, before, machine.now))
    return Simulation(
        task_graph,
        order,
        seconds=machine.now,
        spans=sorted(computed + collectives, key=lambda span: (span.start, span.end, span.task)),
        waits=waits,
        slowed_seconds=machine.slowed,
        compute_seconds=sum(task.seconds for task in tasks if task.kind is Kind.COMPUTE),
        issued=issued,
        memory=memory,
    )
