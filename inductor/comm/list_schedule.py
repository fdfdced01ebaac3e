"""One pass of list scheduling with look-ahead, beside a reference order and within a limit of memory.

Computation follows the reference. It departs from it where the next task would stand for a collective, or where another
would come too late: a *due* time says until when a task may begin without making the step longer. Collectives are
started in the order in which they are due, just before their lane runs dry: those that the reference has come to at
once, others when they are due. They are waited for by the first task that needs them, or a while after their end.

Sources: list scheduling by due times (R. L. Graham, Bell System Technical Journal 45, 1966; E. G. Coffman and R. L.
Graham, Acta Informatica 1, 1972); of two tasks first the one that leaves the smaller lateness (J. Carlier, European
Journal of Operational Research 11, 1982). To decide by the clock of a simulated step is what the latency-hiding
scheduler of XLA and the overlap scheduler of torch's inductor do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from weft.inductor.comm.issuing import Issuing, Key, Lane
from weft.inductor.comm.problem import Kind
from weft.inductor.comm.reference import Reference

# The most tasks looked at to choose one: bounds the time of a choice.
_WINDOW = 16
# The part of its time by which a collective may be late in fact, by which it is started before it has to be. Between
# the median and the 95th percentile of the error that the cost model is held to.
_DOUBT = 0.5
# The same for what computation does not need yet, but memory or another collective does: measured on H200s, where
# computation keeps the kernels of collectives from running, they take up to three times as long as alone.
_PATIENCE = 2.0
# Seconds that ranks come later than each other to a collective, for the same: measured on four H200, of which one was
# slower, up to 3.8 ms. Who waits sooner than need be waits for the slowest rank of that moment, again and again.
_APART = 4e-3


@dataclass(frozen=True)
class Pace:
    """How much earlier than they are due tasks are taken to be due (s), collectives and computation.

    With infinity they go first that are due first; with minus infinity all keep the order of the reference, where
    nothing stands.
    """

    collectives: float
    computation: float


@dataclass(eq=False)
class ListSchedule:
    """What a pass finds.

    Attributes:
        order: of all tasks.
        seconds: until everything has ended.
        peak: the most bytes held.
        ends: by task, when it ends (s): a COMPUTE, or the collective of a START.
    """

    order: list[int]
    seconds: float
    peak: int
    ends: list[float]


def list_schedule(reference: Reference, due: Sequence[float], pace: Pace) -> ListSchedule:
    """Schedule a problem within the limit of a reference order, in time near linear in its tasks.

    Args:
        due: by task, when it has to begin (s): read for COMPUTE and START.
    """
    return _Scheduler(reference, due, pace).run()


class _Scheduler:
    def __init__(self, reference: Reference, due: Sequence[float], pace: Pace) -> None:
        tasks = reference.problem.tasks
        self.reference, self.pace = reference, pace
        self.doubt = [_DOUBT * task.seconds if task.kind is Kind.START else 0.0 for task in tasks]
        self.step = Issuing(reference, [when - early for when, early in zip(due, self.doubt, strict=True)])
        self.waited = 0  # for how many of the collectives that ended
        # How long computation lasts beside the collective that interferes most, where it does not stop altogether.
        slowest = 1.0 - max((task.interference for task in tasks if task.interference < 1.0), default=0.0)
        self.work = [task.seconds / slowest if task.kind is Kind.COMPUTE else 0.0 for task in tasks]

    def run(self) -> ListSchedule:
        step = self.step
        for step.at, task in enumerate(self.reference.order):
            if step.issued[task]:
                continue
            if step.kinds[task] is Kind.COMPUTE:
                while not step.issued[task]:
                    self.issue_something(task)
            elif step.kinds[task] is Kind.FREE and step.lacks_nothing(task):
                step.make_room(task)
                step.issue_with(task)
            else:
                step.pass_by(task)
        while step.late:
            if not self.start_one(math.inf, math.inf, None):
                step.issue_with(min(islice(step.late, _WINDOW), key=step.stands_until))
        for start in self.reference.waits:
            step.machine.wait(start)
        ends = step.computed
        for span in step.ended:
            ends[span.task] = span.end
        return ListSchedule(step.order, step.machine.now, step.holding.peak, ends)

    def issue_something(self, following: int) -> None:
        """Issue ``following``, the next computation of the reference, or what it lacks, or what is better before it."""
        step = self.step
        self.wait_for_ended()
        task, lacking = following, step.lacking(following)
        for lacked in lacking:
            if step.kinds[lacked] is Kind.START:
                task, lacking = lacked, step.lacking(lacked)
                break
        now, ready = step.machine.now, step.ready(lacking)
        until = ready if ready > now else now + self.work[task]
        # Where the step is ahead of what is planned, all that is due is due so much sooner.
        due = until + max(step.keys[task][0] - now, 0.0)
        if self.start_one(until, due, following):
            return
        task = self.while_standing(task, ready) if ready > now else self.first(task, due)
        step.make_room(task)
        if step.issued[task]:
            return
        lacking = step.lacking(task)
        # Once the stream has stood, there is something else to decide first.
        step.issue_all(lacking[:-1] if step.ready(lacking) > now else lacking)

    # ---- collectives

    def wait_for_ended(self) -> None:
        """Wait for what has ended a while ago, so that what it reads is let go of."""
        step = self.step
        while self.waited < len(step.ended):
            start = step.ended[self.waited].task
            if not self.has_ended(start):
                break
            self.waited += 1
            step.wait_for(start)

    def has_ended(self, start: int) -> bool:
        """Whether a collective has ended even if it takes a good deal longer than predicted."""
        patience = _PATIENCE * self.reference.problem.tasks[start].seconds + _APART
        return self.step.ends.get(start, math.inf) + patience <= self.step.machine.now

    def start_one(self, until: float, due: float, following: int | None) -> bool:
        """Start a collective due before ``due`` on a lane that runs dry before ``until``; whether there was one."""
        step = self.step
        for lane in step.lanes:
            if (lane.late or lane.ahead) and lane.dry <= until:
                start = self.next_of(lane, due, following)
                if start is not None:
                    step.issue_with(start)
                    return True
        return False

    def next_of(self, lane: Lane, due: float, following: int | None) -> int | None:
        """What to start on a lane: what is due first of what can be started at once."""
        late = next((key for key in lane.late[:_WINDOW] if self.can_start(key[2], following)), None)
        for key in lane.ahead[:_WINDOW]:
            if key[0] - self.pace.collectives > due or (late is not None and late < key):
                break
            if self.can_start(key[2], following):
                return key[2]
        return None if late is None else late[2]

    def can_start(self, start: int, following: int | None) -> bool:
        """Whether a START can be issued at once, and ``following`` before it has to be waited for.

        One that goes on with what another collective gives waits until that has surely ended, unless it is due: until
        then the compute stream would stand, if prediction is wrong, for what nothing computed needs yet.
        """
        step = self.step
        lacking = step.lacking(start)
        if step.ready(lacking) > step.machine.now or not step.may_issue(lacking):
            return False
        if following is None:
            return True
        awaited = (self.reference.start_of[task] for task in lacking if step.kinds[task] is Kind.WAIT)
        hurries = step.keys[start][0] <= step.machine.now
        return (hurries or all(map(self.has_ended, awaited))) and step.fits_beside(start, following)

    # ---- computation, and collectives that lack a WAIT

    def others(self, task: int) -> Iterator[Key]:
        """What could be issued instead of ``task``, the first due first."""
        step = self.step
        starts = [key for lane in step.lanes for keys in (lane.late, lane.ahead) for key in keys[:_WINDOW]]
        found = heapq.merge(step.computable[:_WINDOW], sorted(starts)) if starts else step.computable[:_WINDOW]
        return (key for key in found if key[2] != task)

    def first(self, task: int, due: float) -> int:
        """What is issued first: ``task``, which can run, or what has to begin before ``due``, when that has ended."""
        step = self.step
        now, own, work = step.machine.now, step.keys[task], self.work[task]
        if step.kinds[task] is Kind.START:
            return task
        for key in self.others(task):
            if own < key or key[0] - self.pace.computation > due:
                break
            other, when = key[2], key[0]
            lacking = step.lacking(other)
            begins = step.ready(lacking)
            if begins <= now:
                better = step.kinds[other] is Kind.COMPUTE  # the lane of a START is busy, or there is no room for it
            else:
                late = max(begins - when, begins + self.work[other] - own[0])
                better = begins < now + work and late < max(now - own[0], now + work - when)
            if better and step.may_issue(lacking):
                return other
        return task

    def while_standing(self, task: int, ready: float) -> int:
        """What is issued first: ``task``, for which the stream would stand until ``ready``, or what can begin before.

        That is something that ends by then, or not so long after as it is that the stream would stand; or what leaves
        the smaller lateness.
        """
        step = self.step
        now, due, work = step.machine.now, step.keys[task][0], self.work[task]
        best: tuple[float, Key] | None = None
        for key in self.others(task):
            other, when = key[2], key[0]
            lacking = step.lacking(other)
            begins = step.ready(lacking)
            if begins >= ready or (best is not None and best < (begins, key)):
                continue
            if begins <= now and step.kinds[other] is Kind.START:
                continue  # its lane is busy, or there is no room for it
            ends = begins + self.work[other]
            late = max(begins - when, max(ready, ends) - due)
            better = ends - ready < ready - begins or late < max(ready - due, ready + work - when)
            if better and step.may_issue(lacking):
                best = begins, key
        return task if best is None else best[1][2]
