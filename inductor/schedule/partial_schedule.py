"""The state of a step while a list scheduler issues it, around a reference order and within a memory limit.

Three rules allow departures from the reference order and keep the step completable within the limit:

- A task that the reference has reached can be *postponed* if it is a START, a WAIT, or a NO_TIME task that depends on a
  postponed one. All allocations of postponed tasks together fit beside the live memory, so all of them can be issued at
  any time. The state is then that of the reference.
- A task can be issued ahead of its place if the rest of the step still fits in the order of the reference.
- The WAITs of a START that was issued ahead are postponed too: they can follow it at any time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.inductor.cost.simulate import TaskSpan
from weft.inductor.cost.task_graph import Kind
from weft.inductor.schedule.reference_order import Reference

# (due time in seconds, place in the reference, task). The place makes the order total, so all runs decide alike.
Key = tuple[float, int, int]


@dataclass(eq=False)
class ReadyStarts:
    """The STARTs of a stream that need no unissued computation or START, sorted by key.

    Attributes:
        postponed: those that the reference has reached.
        ahead: the others.
        started, ended: sums of the seconds of the collectives that were started and that have ended, each alone on its
            link.
        begun: when the running collective began, in seconds.
    """

    postponed: list[Key] = field(default_factory=list)
    ahead: list[Key] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    begun: float = 0.0

    @property
    def dry(self) -> float:
        """The earliest time, in seconds, at which the stream has finished what was started."""
        # A lower bound: sharing of the link is ignored. A stream that is refilled too early costs nothing but slack.
        return self.begun + (self.started - self.ended)


class PartialSchedule:
    """A step of which some tasks are issued.

    Args:
        reference: the reference order, with the task graph and the memory limit.
        due: by task, when it is due in seconds; the smallest comes first.

    Attributes:
        at: the current place in the reference; the caller advances it.
        order: the issued tasks, in order.
        issued: by task, whether it is issued.
        machine, live_memory: time and memory of the step so far.
        allocated: by task, the bytes that it allocates.
        forecast: memory of the rest of the step; None without a memory limit.
        postponed: tasks that the reference has passed and that are not issued, in its order.
        keys: by task.
        computable: unissued COMPUTE tasks that need no unissued computation or START, sorted by key.
        streams: the same for STARTs.
        computed: by task, when a COMPUTE ended (s).
        ended: spans of the collectives that have ended.
        ends: by START, when its collective ended (s).
    """

    def __init__(self, reference: Reference, due: Sequence[float]) -> None:
        self.reference = reference
        self.kinds, self.needs, self.users = reference.kinds, reference.needs, reference.users
        self.place, self.limit = reference.place, reference.limit
        self.keys = list(zip(due, self.place, range(len(due)), strict=True))
        self.machine, self.live_memory = reference.machine.copy(), reference.live_memory.copy()
        self.allocated = self.live_memory.allocated
        self.machine.ended = self.ended = list[TaskSpan]()
        self.ends: dict[int, float] = {}
        self.forecast = reference.forecast.copy() if reference.forecast is not None else None
        self.at = 0
        self.issued = bytearray(len(due))
        self.order: list[int] = []
        self.computed = [0.0] * len(due)
        self.postponed: dict[int, None] = {}
        self._owed = 0  # bytes that postponed tasks will allocate
        # By task, the place in the reference until which `can_issue` has found no room. Saves repeated range maxima.
        self._no_room: dict[int, int] = {}
        self._noticed = 0  # how many of `ended` are counted in `streams`
        # By task, what `lacking` found: decisions look at the same candidates, and few tasks are issued between two.
        # By unissued task, the tasks whose list it is in: these lists are dropped when it is issued.
        self._lacking: dict[int, list[int]] = {}
        self._lacked_by: dict[int, list[int]] = {}
        self._expected: dict[int, float] = {}  # by START, its predicted end; cleared when a collective is started

        # By task, its needs that are, or need, an unissued COMPUTE or START. NO_TIME and WAIT tasks do not count: they
        # can be issued together with the task.
        self._lacks = [len(of) for of in self.needs]
        self.computable: list[Key] = []
        tasks = reference.task_graph.tasks
        streams = {tasks[start].stream: ReadyStarts() for start in reference.waits}
        self.streams = list(streams.values())
        self._stream_of = {start: streams[tasks[start].stream] for start in reference.waits}
        for task in [at for at, of in enumerate(self.needs) if not of]:
            if self.kinds[task] in (Kind.COMPUTE, Kind.START):
                self._offer(task)
            else:
                self._open(task)

    # ---- unissued needs, and when they are ready

    def lacking(self, task: int) -> list[int]:
        """The unissued tasks that ``task`` needs, directly or not, in a valid order, and then ``task`` itself. The
        caller must not change the list."""
        known = self._lacking.get(task)
        if known is None:
            known = self._lacking[task] = self._find_lacking(task)
            for other in known[:-1]:
                self._lacked_by.setdefault(other, []).append(task)
        return known

    def _find_lacking(self, task: int) -> list[int]:
        issued, needs = self.issued, self.needs
        for need in needs[task]:
            if not issued[need]:
                break
        else:  # most tasks
            return [task]
        # Depth-first with an explicit stack: chains of views and waits can exceed the recursion limit.
        ordered: dict[int, None] = {}
        todo = [(task, iter(needs[task]))]
        while todo:
            at, left = todo[-1]
            for need in left:
                if not issued[need] and need not in ordered:
                    todo.append((need, iter(needs[need])))
                    break
            else:
                ordered[at] = None
                todo.pop()
        return list(ordered)

    def ready(self, lacking: Sequence[int]) -> float:
        """When these tasks can be issued without a stall of the compute stream, in seconds."""
        ready = self.machine.now
        if len(lacking) == 1 and self.kinds[lacking[0]] is not Kind.WAIT:
            return ready
        for task in lacking:
            if self.kinds[task] is Kind.WAIT:
                ready = max(ready, self.end_of(self.reference.start_of[task]))
        return ready

    def end_of(self, start: int) -> float:
        """When a started collective ends (s), if no other is started. If it has ended, a time that is not later than
        now."""
        # Computation does not change when a collective ends, only other collectives on its link do. So an end stays
        # valid until the next START.
        if start not in self._expected:
            self._expected[start] = self.machine.ready_at(start)
        return self._expected[start]

    def issuable_at(self, postponed: int) -> float:
        """When a postponed task can be issued without a stall (s); infinity if it needs an unissued START."""
        return math.inf if self._lacks[postponed] else self.ready(self.lacking(postponed))

    # ---- memory

    def has_room(self, task: int) -> bool:
        """Whether what ``task`` allocates fits beside the live memory. If not, :meth:`fits` is false as well."""
        return self.live_memory.now + self.allocated[task] <= self.limit

    def fits(self, lacking: Sequence[int]) -> bool:
        """Whether these tasks fit within the limit, and all postponed tasks after them.

        The second part keeps the invariant that postponed tasks can be issued at any time.
        """
        # What the other tasks of `lacking` free is not counted, so the answer errs towards "does not fit": an order
        # within the limit may be missed, one that exceeds it is never taken.
        task, before = lacking[-1], 0
        owed = self._owed - (self.allocated[task] if task in self.postponed else 0)
        for other in lacking[:-1]:
            before += self.allocated[other]
            owed -= self.allocated[other] if other in self.postponed else 0
        during = before + self.live_memory.during(task)
        # No more is live after a task than during it, and what it frees takes longest to find.
        if during > self.limit or during + owed <= self.limit:
            return during <= self.limit
        return before + self.live_memory.after(task) + owed <= self.limit

    def fits_beside(self, start: int, task: int) -> bool:
        """Whether ``task`` fits while the collective of ``start`` runs."""
        # Otherwise the next computation of the reference would have to wait for this collective to free its operands.
        return self.live_memory.during(start) + self.allocated[task] <= self.limit

    def can_issue(self, lacking: Sequence[int]) -> bool:
        """Whether these tasks fit within the limit, and then the rest of the step in the order of the reference.

        Without the second part the list scheduler could reach a state from which no order fits.
        """
        if self.forecast is None:
            return True
        if not self.fits(lacking):
            return False
        task = lacking[-1]
        if self.place[task] <= self.at:  # the reference counts it already
            return True
        if self._no_room.get(task, -1) >= self.at:
            return False
        # The results of a START and what its WAITs allocate are live until their place in the reference.
        if self.kinds[task] is Kind.START:
            lacking = [*lacking, *self._closing(task)]
        # From now to its place in the reference, `task` adds what it allocates and removes what nothing else reads. A
        # balance of zero or less cannot raise any later peak.
        more = sum(self.allocated[task] for task in lacking) - self.live_memory.freed(lacking)
        if more <= 0:
            return True
        most = self.forecast.most(self.at, task)
        if most + more <= self.limit:
            return True
        # Retry only after the reference has passed that place: until then memory is rarely freed there.
        self._no_room[task] = self.forecast.last_place_of(most, self.at, task)
        return False

    def make_room(self, task: int) -> None:
        """Issue postponed tasks until ``task`` fits: first those that do not stall the compute stream."""
        # Ends with room for `task`: with nothing postponed the state is that of the reference, plus tasks ahead of it
        # for which `can_issue` has found room up to their places.
        while self.forecast and self.postponed and not self.issued[task] and not self.fits(self.lacking(task)):
            ended = (postponed for postponed in self.postponed if self.issuable_at(postponed) <= self.machine.now)
            self.issue_with(next(ended, next(iter(self.postponed))))

    # ---- issue

    def postpone(self, task: int) -> None:
        """Pass a task in the reference without issuing it: it is postponed."""
        if task in self.postponed:
            return
        # Keep the invariant: the allocations of all postponed tasks fit together.
        while self.postponed and self.live_memory.now + self._owed + self.allocated[task] > self.limit:
            self.issue_with(next(iter(self.postponed)))
        self._add_postponed(task)
        # Postponed STARTs come before those ahead of their place in `next_of`, so the key changes lists.
        if self.kinds[task] is Kind.START and not self._lacks[task]:
            stream = self._stream_of[task]
            _remove(stream.ahead, self.keys[task])
            insort(stream.postponed, self.keys[task])

    def wait_for(self, start: int) -> None:
        """Issue the WAITs of a START that need no other unissued computation or START."""
        for wait in self.reference.waits[start]:
            if not self._lacks[wait]:
                self.issue_with(wait)

    def issue_with(self, task: int) -> None:
        """Issue a task after its unissued needs, unless it is issued."""
        if not self.issued[task]:
            self.issue_all(self.lacking(task))

    def issue_all(self, lacking: Sequence[int]) -> None:
        """Issue the tasks of ``lacking`` that are not issued, and postponed NO_TIME tasks as soon as their needs are
        issued."""
        # A view that is put off keeps its base live. It takes no time, so it follows at once.
        todo = deque(lacking)
        while todo:
            task = todo.popleft()
            if not self.issued[task]:
                self._issue(task)
                if self.postponed and self.kinds[task] in (Kind.WAIT, Kind.NO_TIME):
                    todo.extendleft(user for user in self.users[task] if self._may_follow(user))

    def _may_follow(self, task: int) -> bool:
        return task in self.postponed and self.kinds[task] is Kind.NO_TIME and self.lacks_nothing(task)

    def _issue(self, task: int) -> None:
        postponed, kind = task in self.postponed, self.kinds[task]
        if postponed:
            del self.postponed[task]
            self._owed -= self.allocated[task]
        elif self.forecast is not None and self.place[task] > self.at:
            # Issued ahead: it is live from here on instead of from its place. Its WAITs may follow at any time, so they
            # count as issued ahead too, and are postponed.
            self.forecast.issue_ahead(task, self.allocated[task], self.at)
            for follows in self._closing(task) if kind is Kind.START else ():
                if follows not in self.postponed:
                    self.forecast.issue_ahead(follows, self.allocated[follows], self.at)
                    self._add_postponed(follows)
        self.issued[task] = True
        for other in self._lacked_by.pop(task, ()):
            self._lacking.pop(other, None)
        self.order.append(task)
        self.live_memory.issue(task)
        self.machine.issue(task)
        # The machine has found these ends while it advanced; the streams have to know them before the next decision.
        while self._noticed < len(self.ended):
            span = self.ended[self._noticed]
            stream = self._stream_of[span.task]
            stream.ended += self.reference.task_graph.tasks[span.task].seconds
            stream.begun = self.ends[span.task] = span.end  # a stream is a FIFO: the next one begins at once
            self._noticed += 1
        if kind is Kind.COMPUTE:
            self.computed[task] = self.machine.now
            _remove(self.computable, self.keys[task])
            self._open(task)
        elif kind is Kind.START:
            stream = self._stream_of[task]
            if stream.started == stream.ended:
                stream.begun = self.machine.now
            stream.started += self.reference.task_graph.tasks[task].seconds
            _remove(stream.postponed if postponed else stream.ahead, self.keys[task])
            self._expected.clear()  # it shares its link, so the others may end later
            self._open(task)

    def lacks_nothing(self, task: int) -> bool:
        """Whether all needs of a task are issued."""
        return all(self.issued[need] for need in self.needs[task])

    def _add_postponed(self, task: int) -> None:
        self.postponed[task] = None
        self._owed += self.allocated[task]

    def _closing(self, start: int) -> list[int]:
        """The WAITs of a START that can follow it at once, and the NO_TIME tasks between; in a valid order."""
        tasks: dict[int, None] = {}
        # A WAIT that also needs an unissued computation cannot follow the START at once, so it is not counted as issued
        # ahead.
        for wait in self.reference.waits[start]:
            todo = [wait]
            for task in todo:
                todo += [need for need in self.needs[task] if need != start and not self.issued[need]]
            if all(self.kinds[task] in (Kind.WAIT, Kind.NO_TIME) for task in todo):
                tasks |= dict.fromkeys(reversed(todo))
        return list(tasks)

    def _open(self, task: int) -> None:
        """Count ``task`` as no longer missing for its users; offer those that miss nothing. WAIT and NO_TIME users pass
        it on to their users."""
        todo = [task]
        for each in todo:
            for user in self.users[each]:
                self._lacks[user] -= 1
                if not self._lacks[user]:
                    if self.kinds[user] in (Kind.COMPUTE, Kind.START):
                        self._offer(user)
                    else:
                        todo.append(user)

    def _offer(self, task: int) -> None:
        """Insert ``task`` among the candidates: it needs no unissued computation or START any more."""
        if self.kinds[task] is Kind.COMPUTE:
            insort(self.computable, self.keys[task])
        else:
            stream = self._stream_of[task]
            insort(stream.postponed if task in self.postponed else stream.ahead, self.keys[task])


def _remove(keys: list[Key], key: Key) -> None:
    del keys[bisect_left(keys, key)]
