"""Local search on an order of issue: move a task, with what it needs or what needs it, and keep what is faster.

A list scheduler decides task by task and never leaves a stream idle for a collective that becomes ready soon. Such
orders can be far from the best one: a long collective that is started just before a short urgent one holds the stream,
and nothing that is due earlier can pass it. No rule for priorities avoids all such cases, because a decision and its
cost are far apart. The local search looks at the whole step instead.

A move takes one task over others. *Pulled* ahead, it takes the tasks that it needs along; *pushed* back, those that
need it. So every move gives a valid order. The moves of the tasks around the longest stalls come first: collectives
that delayed the one that was waited for, and computation behind the wait. In a graph of few tasks, all moves follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, permutations

from weft.inductor.cost.simulate import LiveMemory, Machine, TaskSpan
from weft.inductor.cost.task_graph import Kind, Task, TaskGraph
from weft.inductor.schedule.precedence import Precedence

# Budget of one search, in tasks that are simulated. Each order is simulated once with the predicted times, and only
# if it is fast enough a second time, with slow collectives and its memory. Bounds the time of large steps. A graph of
# ten tasks is searched until no move helps. A choice.
_MAX_ISSUES = 32_000
# Per stall: competing collectives, and computations behind it, whose moves are tried first. Choices.
_MAX_COMPETITORS, _MAX_FILLERS = 4, 4
# All moves are tried in graphs of at most so many tasks: their number grows with the square. A choice.
_MAX_EXHAUSTIVE = 48
# Relative gain below which a move is not taken: such differences do not outlast the rounding of times. A choice.
_LEAST_GAIN = 1e-4


def _least_seconds(tasks: Sequence[Task], before: Precedence) -> float:
    """Lower bound of a step's time: its critical path, and for each stream and link its work with the shortest
    paths before and after it."""
    seconds = [task.seconds for task in tasks]
    head, tail = [0.0] * len(tasks), [0.0] * len(tasks)
    for at in range(len(tasks)):  # tasks are in a valid order
        head[at] = max((head[need] + seconds[need] for need in before.needs[at]), default=0.0)
    for at in reversed(range(len(tasks))):
        tail[at] = max((tail[user] + seconds[user] for user in before.users[at]), default=0.0)
    # The bound of one machine with heads and tails (J. Carlier, 1982). It holds for a shared link as well: its
    # collectives slow each other down, but together they progress at full speed.
    resources: dict[tuple[str, str], list[int]] = {}
    for at, task in enumerate(tasks):
        if task.kind is Kind.COMPUTE:
            resources.setdefault(("compute", ""), []).append(at)
        elif task.kind is Kind.START:
            resources.setdefault(("stream", task.stream), []).append(at)
            resources.setdefault(("link", task.link), []).append(at)
    works = (
        min(head[at] for at in of) + sum(seconds[at] for at in of) + min(tail[at] for at in of)
        for of in resources.values()
    )
    return max(chain(works, map(sum, zip(head, seconds, tail, strict=True))), default=0.0)


def _compete(one: Task, other: Task) -> bool:
    return one.stream == other.stream or one.link == other.link


class ExpectedTime:
    """The time of an order that is minimised: that of the simulation, and with a small weight that of a step whose
    collectives take longer than predicted, because an order that starts every collective as late as possible has no
    slack.

    Args:
        slow_factor: how many times as long collectives take then.
        slow_weight: weight of that case.
    """

    def __init__(self, task_graph: TaskGraph, slow_factor: float, slow_weight: float) -> None:
        tasks = [
            replace(task, seconds=slow_factor * task.seconds) if task.kind is Kind.START else task
            for task in task_graph.tasks
        ]
        self.slow_weight = slow_weight
        self.starts = [at for at, task in enumerate(tasks) if task.kind is Kind.START]
        # Every simulation begins with a copy: reading the task graph takes as long as simulating it.
        self.machine, self.slow_machine = Machine(task_graph), Machine(replace(task_graph, tasks=tasks))
        self.tasks, self.slow_tasks = task_graph.tasks, tasks

    def __call__(self, order: Sequence[int], bound: float = math.inf) -> float:
        """Seconds; some number not below ``bound`` if they are not below it."""
        weight = self.slow_weight
        seconds = self._run(self.machine, order)
        if seconds >= bound:  # longer collectives do not make a step shorter
            return seconds
        return (1.0 - weight) * seconds + weight * self._run(self.slow_machine, order)

    def least(self, before: Precedence) -> float:
        """Lower bound for all orders, in seconds. Takes time linear in the tasks."""
        weight = self.slow_weight
        return (1.0 - weight) * _least_seconds(self.tasks, before) + weight * _least_seconds(self.slow_tasks, before)

    def _run(self, machine: Machine, order: Sequence[int]) -> float:
        machine = machine.copy()
        for task in order:
            machine.issue(task)
        for start in self.starts:
            machine.wait(start)
        return machine.now


class LocalSearch:
    """Moves within one task graph.

    Args:
        limit: memory limit in bytes; None: no limit.
    """

    def __init__(
        self, task_graph: TaskGraph, before: Precedence, expected: ExpectedTime, limit: int | None = None
    ) -> None:
        self.task_graph, self.expected, self.limit = task_graph, expected, limit
        self.needs, self.users = before.needs, before.users
        self.kinds = [task.kind for task in task_graph.tasks]
        self.waits = task_graph.waits_of()
        self.live_memory = LiveMemory(task_graph)  # before the first task
        self.left = _MAX_ISSUES
        # A fraction above the bound is within what a move has to gain.
        self.enough = expected.least(before) * (1.0 + _LEAST_GAIN)

    def improve(self, order: Sequence[int], seconds: float) -> tuple[list[int], float]:
        """A faster order than ``order``, whose expected time is ``seconds``, or the same; and its expected time.

        Takes the first move that helps, and begins again from there, until none helps or the budget is used up.
        """
        # `order` is within the limit, and `_descend` never takes more excess than there is.
        found, excess, seconds = self._descend(list(order), 0, seconds)
        assert not excess
        return found, seconds

    def improve_by_perturbations(self, order: Sequence[int], seconds: float) -> tuple[list[int], float]:
        """As :meth:`improve`, where it takes two moves to get faster: first a collective starts earlier, whatever time
        or memory that costs, and from there on moves have to help (iterated local search). For graphs of few tasks."""
        found = list(order)
        perturbations = self._perturbations(found) if len(order) <= _MAX_EXHAUSTIVE else iter(())
        while self.left > 0 and seconds > self.enough and (perturbed := next(perturbations, None)) is not None:
            self.left -= 2 * len(order)
            better, excess, faster = self._descend(perturbed, self._excess(perturbed), self.expected(perturbed))
            # A perturbed order counts only if moves have brought it back within the limit. The best order is then
            # perturbed anew.
            if not excess and faster < seconds * (1.0 - _LEAST_GAIN):
                found, seconds, perturbations = better, faster, self._perturbations(better)
        return found, seconds

    def _perturbations(self, order: list[int]) -> Iterator[list[int]]:
        """Orders in which a collective starts before one that started earlier: alone, and together with its WAITs, so
        that memory of the two is not live at the same time. Then before computation. At last, any task elsewhere."""
        place = {task: at for at, task in enumerate(order)}
        starts = [place[start] for start in self.waits]
        others = (to for to in range(len(order)) if to not in starts)
        for at, to in ((at, to) for to in (*starts, *others) for at in starts if to < at):
            for moved in ([order[at]], [order[at], *self.waits[order[at]]]):
                if (perturbed := self._ahead(order, to, moved)) is not None:
                    yield perturbed
        for at, to in permutations(range(len(order)), 2):
            perturbed = self._ahead(order, to, [order[at]]) if to < at else self._behind(order, at, to)
            if perturbed is not None:
                yield perturbed

    def _descend(self, order: list[int], excess: int, seconds: float) -> tuple[list[int], int, float]:
        """Move while that helps. Less excess over the memory limit counts more than any time, so an order within the
        limit is not left for one that is not.

        Returns the order, its excess (bytes) and its expected time (s).
        """
        while (better := self._first_better(order, excess, seconds)) is not None:
            order, excess, seconds = better
        return order, excess, seconds

    def _first_better(self, order: list[int], excess: int, seconds: float) -> tuple[list[int], int, float] | None:
        bound = seconds * (1.0 - _LEAST_GAIN)
        tried: set[tuple[int, ...]] = set()
        for moved in self._moves(order):
            # A move costs up to two simulations. Without the budget for both, its result could not be used.
            if self.left < 2 * len(order):
                return None
            # Moves at several stalls, and moves that drag their needs along, often lead to one order.
            if (key := tuple(moved)) in tried:
                continue
            tried.add(key)
            self.left -= len(order)
            # The simulation of a move that cannot be faster stops early, unless memory is short.
            faster = self.expected(moved, bound if not excess else math.inf)
            if faster < bound or excess:
                self.left -= len(order)
                more = self._excess(moved)
                # Memory first: see `_descend`. Without excess on either side, only a gain in time counts.
                if more < excess or (more == excess and faster < bound):
                    return moved, more, faster
        return None

    def _excess(self, order: Sequence[int]) -> int:
        """Bytes by which an order exceeds the memory limit."""
        if self.limit is None:
            return 0
        live_memory = self.live_memory.copy()
        for task in order:
            live_memory.issue(task)
        return max(live_memory.peak - self.limit, 0)

    def _moves(self, order: list[int]) -> Iterator[list[int]]:
        """Orders one move away, the most promising first."""
        # One simulation to find the stalls, two for a move.
        if self.left < 3 * len(order):
            return
        place = {task: at for at, task in enumerate(order)}
        places = (
            pair
            for start, wait_at, spans in self._stalls(order)
            for pair in self._moves_at(order, place, start, wait_at, spans)
        )
        # All pairs of places: their number grows with the square of the tasks.
        if len(order) <= _MAX_EXHAUSTIVE:
            places = chain(places, permutations(range(len(order)), 2))
        for at, to in places:
            moved = self._ahead(order, to, [order[at]]) if to < at else self._behind(order, at, to)
            if moved is not None:
                yield moved

    def _stalls(self, order: list[int]) -> list[tuple[int, int, dict[int, TaskSpan]]]:
        """The STARTs that the compute stream stalls for, longest stall first; each with the place of the WAIT and the
        spans of all collectives."""
        machine = self.expected.machine.copy()
        machine.ended = list[TaskSpan]()
        stalls: list[tuple[float, int, int]] = []
        self.left -= len(order)
        for at, task in enumerate(order):
            before = machine.now
            machine.issue(task)
            # Negative, so that sorting puts the longest stall first and breaks ties by place.
            if machine.now > before and self.kinds[task] is Kind.WAIT:
                stalls.append((before - machine.now, at, self.task_graph.start_of(task)))
        # What is still running when all tasks are issued lengthens the step as well.
        for start in self.expected.starts:
            before = machine.now
            machine.wait(start)
            if machine.now > before:
                stalls.append((before - machine.now, len(order), start))
        spans = {span.task: span for span in machine.ended}
        return [(start, at, spans) for _, at, start in sorted(stalls)]

    def _moves_at(
        self, order: list[int], place: dict[int, int], start: int, wait_at: int, spans: dict[int, TaskSpan]
    ) -> Iterator[tuple[int, int]]:
        """Moves that may shorten the stall for ``start`` at ``wait_at``: from which place to which."""
        tasks = self.task_graph.tasks
        at, own = place[start], spans[start]
        # Collectives of its stream or its link, of those that end at about the same time as it. Those that are issued
        # before it delay it.
        competitors = sorted(
            (other for other in spans if other != start and _compete(tasks[other], tasks[start])),
            key=lambda other: (abs(spans[other].end - own.end), other),
        )[:_MAX_COMPETITORS]
        for other in competitors:
            # This one ahead of the other, the other behind this one, or the other as late as the stall allows: the last
            # frees the link for everything before the wait.
            if place[other] < at:
                yield from ((at, place[other]), (place[other], at), (place[other], wait_at - 1))
        # As early as its operands allow.
        yield at, max((place[need] for need in self.needs[start]), default=-1) + 1
        # Computation that could fill the stall.
        behind = (later for later in range(wait_at + 1, len(order)) if self.kinds[order[later]] is Kind.COMPUTE)
        yield from ((later, wait_at) for later in islice(behind, _MAX_FILLERS))

    def _ahead(self, order: list[int], to: int, tasks: Sequence[int]) -> list[int] | None:
        """``order`` with ``tasks`` moved ahead to ``to``, and with them what they need from there on. None if they need
        the task at ``to``."""
        # From the back: all users of a task stand behind it, so when a task is reached it is known whether one of
        # `tasks` needs it. Both parts keep their order, so the result is a valid order.
        needed, first, rest = set(tasks), list[int](), list[int]()
        last = max(order.index(task, to) for task in tasks)
        for task in reversed(order[to : last + 1]):
            if task in needed:
                needed.update(self.needs[task])
                first.append(task)
            else:
                rest.append(task)
        return None if order[to] in needed else [*order[:to], *reversed(first), *reversed(rest), *order[last + 1 :]]

    def _behind(self, order: list[int], at: int, to: int) -> list[int] | None:
        """``order`` with the task at ``at`` moved behind that at ``to``, and with it what needs it. None if the task at
        ``to`` does."""
        # As in `_ahead`, from the front: the needs of a task stand before it.
        users, last, rest = {order[at]}, list[int](), list[int]()
        for task in order[at : to + 1]:
            if task in users:
                users.update(self.users[task])
                last.append(task)
            else:
                rest.append(task)
        return None if to <= at or order[to] in users else [*order[:at], *rest, *last, *order[to + 1 :]]
