"""A step while it is issued task by task, beside a reference order and within its limit of memory.

Three rules let the issue depart from the reference without ever getting stuck:

- What the reference has come to may be *late*, if it is a START, a WAIT, or FREE after one that is late. All that late
  tasks make fits beside what is held, so that all of them can be issued at any time: the step is then where the
  reference is.
- A task may come ahead of its place if all that is left fits in the order of the reference.
- The WAITs of a START that came ahead become late: they can follow it at any time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.inductor.comm.problem import Kind
from weft.inductor.comm.reference import Reference
from weft.inductor.comm.simulate import Span

# When a task is due (s), its place in the reference, the task: what is due first comes first, ties by place.
Key = tuple[float, int, int]


@dataclass(eq=False)
class Lane:
    """The STARTs of a lane that lack no computation and no other START, by key.

    Attributes:
        late: those that the reference has come to.
        ahead: the others.
        started, ended: seconds of work that was, each collective alone on its link.
        begun: when the first of those that have not ended began.
    """

    late: list[Key] = field(default_factory=list)
    ahead: list[Key] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    begun: float = 0.0

    @property
    def dry(self) -> float:
        """When, at the earliest, the lane has done what was started."""
        return self.begun + (self.started - self.ended)


class Issuing:
    """A step of which some tasks are issued.

    Args:
        reference: the order beside which the step is issued.
        due: by task, a time in seconds that says what matters first.

    Attributes:
        at: where in the reference, for the caller to move on.
        order: what is issued.
        issued: by task, whether it is.
        machine, holding: the step so far.
        late: what the reference has come to and is not issued.
        keys: by task.
        computable: the COMPUTE tasks, not issued, that lack no computation and no START, by key.
        lanes: likewise the STARTs.
        computed: by task, when a COMPUTE ended.
        ended: the collectives that have ended.
        ends: when each of them did, by START.
    """

    def __init__(self, reference: Reference, due: Sequence[float]) -> None:
        self.reference = reference
        self.kinds, self.needs, self.users = reference.kinds, reference.needs, reference.users
        self.place, self.limit = reference.place, reference.limit
        self.keys = list(zip(due, self.place, range(len(due)), strict=True))
        self.machine, self.holding = reference.machine.copy(), reference.holding.copy()
        self.machine.ended = self.ended = list[Span]()
        self.ends: dict[int, float] = {}
        self.outlook = reference.outlook.copy() if reference.outlook is not None else None
        self.at = 0
        self.issued = bytearray(len(due))
        self.order: list[int] = []
        self.computed = [0.0] * len(due)
        self.late: dict[int, None] = {}
        self._owed = 0  # bytes that late tasks will make
        self._no_room: dict[int, int] = {}  # by task: up to which place in the reference there is none
        self._noticed = 0  # how many of `ended` the lanes know of
        self._expected: dict[int, float] = {}  # when collectives end, if no other is started

        self._lacks = [len(of) for of in self.needs]  # by task: needs that lack a computation or START themselves
        self.computable: list[Key] = []
        tasks = reference.problem.tasks
        lanes = {tasks[start].lane: Lane() for start in reference.waits}
        self.lanes = list(lanes.values())
        self._lane_of = {start: lanes[tasks[start].lane] for start in reference.waits}
        for task in [at for at, of in enumerate(self.needs) if not of]:
            if self.kinds[task] in (Kind.COMPUTE, Kind.START):
                self._offer(task)
            else:
                self._open(task)

    # ---- what a task lacks, and until when

    def lacking(self, task: int) -> list[int]:
        """What ``task`` needs and is not issued, in an order that runs, and then ``task``."""
        issued, needs = self.issued, self.needs
        found: dict[int, None] = {}
        todo = [(task, iter(needs[task]))]
        while todo:
            at, left = todo[-1]
            for need in left:
                if not issued[need] and need not in found:
                    todo.append((need, iter(needs[need])))
                    break
            else:
                found[at] = None
                todo.pop()
        return list(found)

    def ready(self, lacking: Sequence[int]) -> float:
        """From when on these can be issued while the compute stream does not stand."""
        ready = self.machine.now
        for task in lacking:
            if self.kinds[task] is Kind.WAIT:
                ready = max(ready, self.end_of(self.reference.start_of[task]))
        return ready

    def end_of(self, start: int) -> float:
        """When a collective that was started ends, if no other is started; a time that is over, if it has ended."""
        if start not in self._expected:
            self._expected[start] = self.machine.ready_at(start)
        return self._expected[start]

    def stands_until(self, late: int) -> float:
        """When a late task can be issued; infinity where it lacks a START."""
        return math.inf if self._lacks[late] else self.ready(self.lacking(late))

    # ---- memory

    def made(self, task: int) -> int:
        """Bytes that a task makes."""
        return self.holding.during(task) - self.holding.now

    def fits(self, lacking: Sequence[int]) -> bool:
        """Whether there is room for these, and then for all that is late."""
        task, before = lacking[-1], 0
        owed = self._owed - self.made(task) * (task in self.late)
        for other in lacking[:-1]:
            before += self.made(other)
            owed -= self.made(other) * (other in self.late)
        return before + max(self.holding.during(task), self.holding.after(task) + owed) <= self.limit

    def fits_beside(self, start: int, task: int) -> bool:
        """Whether there is room for ``task`` between ``start`` and its WAITs."""
        return self.holding.during(start) + self.made(task) <= self.limit

    def may_issue(self, lacking: Sequence[int]) -> bool:
        """Whether there is room for these, and then for all the others in the order of the reference."""
        if self.outlook is None:
            return True
        if not self.fits(lacking):
            return False
        task = lacking[-1]
        if self.place[task] <= self.at:
            return True
        if self._no_room.get(task, -1) >= self.at:
            return False
        if self.kinds[task] is Kind.START:
            lacking = [*lacking, *self._closing(task)]
        more = sum(map(self.made, lacking)) - self.outlook.freed(lacking, self.issued)
        if more <= 0:
            return True
        most, until = self.outlook.most(self.at, task)
        if most + more <= self.limit:
            return True
        # Asked again once the reference is past that place: until then memory is rarely let go of there.
        self._no_room[task] = until
        return False

    def make_room(self, task: int) -> None:
        """Issue what is late until ``task`` fits: first what does not make the compute stream stand."""
        while self.outlook and self.late and not self.issued[task] and not self.fits(self.lacking(task)):
            ended = (late for late in self.late if self.stands_until(late) <= self.machine.now)
            self.issue_with(next(ended, next(iter(self.late))))

    # ---- issue

    def pass_by(self, task: int) -> None:
        """Come to a task in the reference, and leave it for later."""
        if task in self.late:
            return
        while self.late and self.holding.now + self._owed + self.made(task) > self.limit:
            self.issue_with(next(iter(self.late)))
        self._become_late(task)
        if self.kinds[task] is Kind.START and not self._lacks[task]:
            lane = self._lane_of[task]
            _remove(lane.ahead, self.keys[task])
            insort(lane.late, self.keys[task])

    def wait_for(self, start: int) -> None:
        """Issue the WAITs of a START, as far as they lack nothing else."""
        for wait in self.reference.waits[start]:
            if not self._lacks[wait]:
                self.issue_with(wait)

    def issue_with(self, task: int) -> None:
        """Issue a task after what it lacks, unless it is issued."""
        if not self.issued[task]:
            self.issue_all(self.lacking(task))

    def issue_all(self, lacking: Sequence[int]) -> None:
        """Issue those of ``lacking`` that are not, and late tasks that are FREE once nothing keeps them back."""
        todo = deque(lacking)
        while todo:
            task = todo.popleft()
            if not self.issued[task]:
                self._issue(task)
                if self.late and self.kinds[task] in (Kind.WAIT, Kind.FREE):
                    todo.extendleft(user for user in self.users[task] if self._may_follow(user))

    def _may_follow(self, task: int) -> bool:
        return task in self.late and self.kinds[task] is Kind.FREE and self.lacks_nothing(task)

    def _issue(self, task: int) -> None:
        late, kind = task in self.late, self.kinds[task]
        if late:
            del self.late[task]
            self._owed -= self.made(task)
        elif self.outlook is not None and self.place[task] > self.at:
            self.outlook.issue_ahead(task, self.made(task), self.at)
            for follows in self._closing(task) if kind is Kind.START else ():
                if follows not in self.late:
                    self.outlook.issue_ahead(follows, self.made(follows), self.at)
                    self._become_late(follows)
        self.issued[task] = True
        self.order.append(task)
        self.holding.issue(task)
        self.machine.issue(task)
        while self._noticed < len(self.ended):
            span = self.ended[self._noticed]
            lane = self._lane_of[span.task]
            lane.ended += self.reference.problem.tasks[span.task].seconds
            lane.begun = self.ends[span.task] = span.end
            self._noticed += 1
        if kind is Kind.COMPUTE:
            self.computed[task] = self.machine.now
            _remove(self.computable, self.keys[task])
            self._open(task)
        elif kind is Kind.START:
            lane = self._lane_of[task]
            if lane.started == lane.ended:
                lane.begun = self.machine.now
            lane.started += self.reference.problem.tasks[task].seconds
            _remove(lane.late if late else lane.ahead, self.keys[task])
            self._expected.clear()
            self._open(task)

    def lacks_nothing(self, task: int) -> bool:
        """Whether all that a task needs is issued."""
        return all(self.issued[need] for need in self.needs[task])

    def _become_late(self, task: int) -> None:
        self.late[task] = None
        self._owed += self.made(task)

    def _closing(self, start: int) -> list[int]:
        """The WAITs of a START, and what is FREE before them, which can follow it at once."""
        found: dict[int, None] = {}
        for wait in self.reference.waits[start]:
            todo = [wait]
            for task in todo:
                todo += [need for need in self.needs[task] if need != start and not self.issued[need]]
            if all(self.kinds[task] in (Kind.WAIT, Kind.FREE) for task in todo):
                found |= dict.fromkeys(reversed(todo))
        return list(found)

    def _open(self, task: int) -> None:
        """``task``, issued or FREE, keeps nothing back any longer."""
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
        """No computation and no START keeps ``task`` back any longer."""
        if self.kinds[task] is Kind.COMPUTE:
            insort(self.computable, self.keys[task])
        else:
            lane = self._lane_of[task]
            insort(lane.late if task in self.late else lane.ahead, self.keys[task])


def _remove(keys: list[Key], key: Key) -> None:
    del keys[bisect_left(keys, key)]
