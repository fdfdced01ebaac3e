"""One pass of list scheduling with look-ahead, around a reference order and within a memory limit.

Computation follows the reference order. It departs from it where the next task would wait for a collective, or where
another task would begin after it is due. A *due* time says how late a task can begin without making the step longer.
Collectives start in the order of their due times, just before their stream runs empty: then at once where the reference
has reached them, and otherwise only when they are due. The wait for a collective is issued before the first task that
needs it, or some time after the collective has ended, to free its operands.

Sources: list scheduling by due times (R. L. Graham, Bell System Technical Journal 45, 1966; E. G. Coffman and R. L.
Graham, Acta Informatica 1, 1972); of two tasks, first the one that leaves the smaller lateness (J. Carlier, European
Journal of Operational Research 11, 1982). Deciding by the clock of a simulated step is what the latency-hiding
scheduler of XLA and the overlap scheduler of torch's inductor do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from weft.inductor.cost.task_graph import Kind, Task
from weft.inductor.schedule.partial_schedule import Key, PartialSchedule, ReadyStarts
from weft.inductor.schedule.reference_order import Reference

# Candidates per decision. Bounds the time of a decision. A choice.
_MAX_CANDIDATES = 16
# A collective starts earlier than it is due by this fraction of its time, against errors of the cost model. Alone,
# collectives are predicted to 20% (tests/inductor/cost/test_collective_cost.py); in a step they took up to three times
# as long. A choice between the two.
_EARLY_FRACTION = 0.5
# If only memory or another collective needs a result, its wait is issued when the collective has been over for this
# multiple of its time. On H200, collectives took up to three times their time alone, because computation kept their
# kernels from running.
_WAIT_AFTER_END = 2.0
# Seconds between the first and the last rank's arrival at a collective, added to the above: up to 3.8 ms on four H200
# of which one was slower. A wait that comes too early waits for the slowest rank of that moment, at each collective.
_RANK_SKEW = 4e-3


@dataclass(frozen=True)
class LeadTime:
    """Seconds by which collectives and computation are treated as due earlier than they are.

    Infinity: tasks run in the order of their due times. Minus infinity: tasks keep the reference order, unless the
    compute stream would wait.
    """

    collectives: float
    computation: float


@dataclass(eq=False)
class ListSchedule:
    """The result of a pass.

    Attributes:
        order: all tasks in order of issue.
        seconds: until everything has ended.
        peak: peak memory in bytes.
        ends: by task, when a COMPUTE or the collective of a START ends (s).
    """

    order: list[int]
    seconds: float
    peak: int
    ends: list[float]


def list_schedule(reference: Reference, due: Sequence[float], lead_time: LeadTime) -> ListSchedule:
    """Schedule a task graph within the memory limit of a reference order, in time near linear in its tasks.

    Args:
        reference: a valid order that fits its limit.
        due: by task, when a COMPUTE or START has to begin (s). Other tasks have no due time.
        lead_time: how much earlier tasks are treated as due.
    """
    return _ListScheduler(reference, due, lead_time).run()


def _early_enough(tasks: Sequence[Task], due: Sequence[float]) -> list[float]:
    """``due`` (s), with collectives due earlier by a margin for errors of the cost model.

    The margin grows with a collective's time, so without care a long collective would overtake a short one of its
    stream that computation needs sooner. So the order of ``due`` is kept on each stream: a collective is moved at least
    as far as those behind it.
    """
    early = list(due)
    streams: dict[str, list[int]] = {}
    for at, task in enumerate(tasks):
        if task.kind is Kind.START:
            early[at] -= _EARLY_FRACTION * task.seconds
            streams.setdefault(task.stream, []).append(at)
    for starts in streams.values():
        starts.sort(key=lambda at: due[at])
        for later, earlier in pairwise(reversed(starts)):
            if due[earlier] < due[later]:
                # Strictly less: equal keys would be ordered by place in the reference, not by due time.
                early[earlier] = min(early[earlier], math.nextafter(early[later], -math.inf))
    return early


class _ListScheduler:
    """State of one pass: the partial schedule, and the collectives that were waited for."""

    def __init__(self, reference: Reference, due: Sequence[float], lead_time: LeadTime) -> None:
        tasks = reference.task_graph.tasks
        self.reference, self.lead_time = reference, lead_time
        self.partial = PartialSchedule(reference, _early_enough(tasks, due))
        self.waited = 0  # how many of the ended collectives have their WAITs issued
        # Estimated seconds of computation, as if it ran beside the collective with the largest interference. A stream
        # is then refilled too early rather than too late. Full interference (1.0) is left out: it would give infinity.
        slowest = 1.0 - max((task.interference for task in tasks if task.interference < 1.0), default=0.0)
        self.work = [task.seconds / slowest if task.kind is Kind.COMPUTE else 0.0 for task in tasks]

    def run(self) -> ListSchedule:
        """Walk the reference once. COMPUTE tasks are issued in its order, with other tasks before them. STARTs and
        WAITs are postponed: passed, and issued when due or when a task needs them."""
        partial = self.partial
        # `partial.at` is the loop's own variable: the partial schedule has to know the place while a task is decided.
        for partial.at, task in enumerate(self.reference.order):
            if partial.issued[task]:
                continue
            if partial.kinds[task] is Kind.COMPUTE:
                while not partial.issued[task]:
                    self.issue_something(task)
            elif partial.kinds[task] is Kind.NO_TIME and partial.lacks_nothing(task):
                partial.make_room(task)
                partial.issue_with(task)
            else:
                partial.postpone(task)
        # Only communication is left: nothing is gained by delaying it.
        while partial.postponed:
            if not self.start_one(math.inf, math.inf, None):
                partial.issue_with(min(islice(partial.postponed, _MAX_CANDIDATES), key=partial.issuable_at))
        for start in self.reference.waits:  # the step is over when all collectives are
            partial.machine.wait(start)
        ends = partial.computed
        for span in partial.ended:
            ends[span.task] = span.end
        return ListSchedule(partial.order, partial.machine.now, partial.live_memory.peak, ends)

    def issue_something(self, following: int) -> None:
        """Issue ``following``, the next computation of the reference, or one of its needs, or a better task before it.

        Issues at least one task per call, so the caller's loop ends.
        """
        partial = self.partial
        self.wait_for_ended()
        task, lacking = following, partial.lacking(following)
        # A computation behind an unissued START cannot be issued yet: decide about that START instead.
        for lacked in lacking:
            if partial.kinds[lacked] is Kind.START:
                task, lacking = lacked, partial.lacking(lacked)
                break
        now, ready = partial.machine.now, partial.ready(lacking)
        # The time up to which a stream must have work: until the next decision, which comes when the stall ends or
        # `task` does.
        until = ready if ready > now else now + self.work[task]
        # If the step is ahead of its due times, all due times count as that much earlier: only differences matter.
        due = until + max(partial.keys[task][0] - now, 0.0)
        if self.start_one(until, due, following):
            return
        task = self.fill_exposed_wait(task, ready) if ready > now else self.first(task, due)
        partial.make_room(task)
        if partial.issued[task]:
            return
        lacking = partial.lacking(task)
        # If the WAIT stalls, issue only up to it: after the stall other tasks can be better than this one.
        partial.issue_all(lacking[:-1] if partial.ready(lacking) > now else lacking)

    # ---- collectives

    def wait_for_ended(self) -> None:
        """Issue WAITs of collectives that ended some time ago. This frees their operands."""
        partial = self.partial
        while self.waited < len(partial.ended):
            start = partial.ended[self.waited].task
            # `ended` is in order of the ends. Behind a long collective, a short one that has surely ended waits a
            # little longer: that costs memory for a moment, no time.
            if not self.has_ended(start):
                break
            self.waited += 1
            partial.wait_for(start)

    def has_ended(self, start: int) -> bool:
        """Whether a collective has ended even if it takes ``1 + _WAIT_AFTER_END`` times the predicted time and ranks
        arrive ``_RANK_SKEW`` seconds apart."""
        patience = _WAIT_AFTER_END * self.reference.task_graph.tasks[start].seconds + _RANK_SKEW
        return self.partial.ends.get(start, math.inf) + patience <= self.partial.machine.now

    def start_one(self, until: float, due: float, following: int | None) -> bool:
        """Start a collective due before ``due`` (s) on a stream that is empty before ``until`` (s). Returns whether
        there was one."""
        partial = self.partial
        # A stream with work until then gains nothing from another START, and its operands would be live for longer.
        for stream in partial.streams:
            if (stream.postponed or stream.ahead) and stream.dry <= until:
                start = self.next_of(stream, due, following)
                if start is not None:
                    partial.issue_with(start)
                    return True
        return False

    def next_of(self, stream: ReadyStarts, due: float, following: int | None) -> int | None:
        """The START to issue on a stream: the one due first among those that can be issued at once, or None."""
        postponed = next((key for key in stream.postponed[:_MAX_CANDIDATES] if self.can_start(key[2], following)), None)
        for key in stream.ahead[:_MAX_CANDIDATES]:
            # Keys are sorted: no later one is due either.
            if key[0] - self.lead_time.collectives > due or (postponed is not None and postponed < key):
                break
            if self.can_start(key[2], following):
                return key[2]
        return None if postponed is None else postponed[2]

    def can_start(self, start: int, following: int | None) -> bool:
        """Whether a START can be issued without a stall, with room for ``following`` while its collective runs.

        A START that reads the result of another collective is issued only after that has ended with a margin, unless it
        is due. Otherwise, if the prediction is too short, its WAIT stalls the compute stream for a result that no
        computation needs yet.
        """
        partial = self.partial
        if not partial.has_room(start):  # nearly all that are refused under a tight limit
            return False
        lacking = partial.lacking(start)
        if partial.ready(lacking) > partial.machine.now or not partial.can_issue(lacking):
            return False
        if following is None:
            return True
        awaited = (self.reference.start_of[task] for task in lacking if partial.kinds[task] is Kind.WAIT)
        hurries = partial.keys[start][0] <= partial.machine.now
        return (hurries or all(map(self.has_ended, awaited))) and partial.fits_beside(start, following)

    # ---- computation, and collectives behind a WAIT

    def others(self, task: int) -> list[Key]:
        """The candidates to issue instead of ``task``, by due time."""
        partial = self.partial
        candidates = partial.computable[:_MAX_CANDIDATES]
        computations = len(candidates)
        for stream in partial.streams:
            candidates += stream.postponed[:_MAX_CANDIDATES]
            candidates += stream.ahead[:_MAX_CANDIDATES]
        if len(candidates) > computations:
            candidates.sort()
        return [key for key in candidates if key[2] != task]

    def first(self, task: int, due: float) -> int:
        """The task to issue first: ``task``, which can run at once, or one that is due before ``due`` (s)."""
        partial = self.partial
        now, key_of_task, work = partial.machine.now, partial.keys[task], self.work[task]
        if partial.kinds[task] is Kind.START:
            return task
        for key in self.others(task):
            if key_of_task < key or key[0] - self.lead_time.computation > due:
                break
            other, when = key[2], key[0]
            lacking = partial.lacking(other)
            begins = partial.ready(lacking)
            if begins <= now:
                better = (
                    partial.kinds[other] is Kind.COMPUTE
                )  # the stream of a START is busy, or there is no room for it
            else:
                # `task` first: it starts now, the other after it. The other first: it starts when its collective has
                # ended, `task` after it. Lateness is how long after its due time a task starts.
                # Carlier's rule: the order of the two tasks with the smaller maximum lateness.
                lateness = max(begins - when, begins + self.work[other] - key_of_task[0])
                better = begins < now + work and lateness < max(now - key_of_task[0], now + work - when)
            if better and partial.can_issue(lacking):
                return other
        return task

    def fill_exposed_wait(self, task: int, ready: float) -> int:
        """The task to issue first: ``task``, for which the compute stream would stall until ``ready`` (s), or one that
        can begin before.

        Another task is better if it ends by then, or exceeds ``ready`` by less than the stall that it fills, or if the
        order of the two has the smaller maximum lateness.
        """
        partial = self.partial
        now, due, work = partial.machine.now, partial.keys[task][0], self.work[task]
        best: tuple[float, Key] | None = None
        for key in self.others(task):
            # Candidates are sorted by key, and none begins before now.
            if best is not None and best[0] <= now:
                break
            other, when = key[2], key[0]
            lacking = partial.lacking(other)
            begins = partial.ready(lacking)
            # Of several, the one that can begin first: the rest of the stall is filled by the next decision.
            if begins >= ready or (best is not None and best < (begins, key)):
                continue
            if begins <= now and partial.kinds[other] is Kind.START:
                continue  # its stream is busy, or there is no room for it
            ends = begins + self.work[other]
            # As in :meth:`first`, but `task` cannot start before `ready` in either order: until then the other task is
            # free.
            lateness = max(begins - when, max(ready, ends) - due)
            better = ends - ready < ready - begins or lateness < max(ready - due, ready + work - when)
            if better and partial.can_issue(lacking):
                best = begins, key
        return task if best is None else best[1][2]
