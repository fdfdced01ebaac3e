"""The order of issue that overlaps communication with computation, within a memory budget.

Several candidate orders are made by list scheduling (:mod:`weft.inductor.schedule.list_schedule`), with different due
times and lead times; the task graph's own order is one of the candidates if it is within the budget. The simulator
estimates the time of each. The estimate also counts, with a small weight, a step whose collectives take longer than
predicted, because an order that starts every collective as late as possible has no slack. A local search
(:mod:`weft.inductor.schedule.local_search`) then improves these orders by moving single collectives and computations.
Of the orders within ``TIME_TOLERANCE`` of the fastest, the one with the lowest peak memory is taken.

All of this is done on a contracted task graph (:mod:`weft.inductor.schedule.contraction`), which has a fifth of the
tasks.

Due times come from a schedule of the reversed step. There each collective begins as soon as its waits allow, one after
the other on its stream, so in the forward direction it begins as late as possible. Backward and forward scheduling
alternate, each using the times of the other: forward-backward improvement (K. Y. Li and R. J. Willis, European Journal
of Operational Research 56, 1992).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.errors import MemoryLimitUnreachable
from weft.inductor.cost.simulate import Simulation, simulate, users_of
from weft.inductor.cost.task_graph import Kind, Storage, TaskGraph
from weft.inductor.schedule.coarsening import coarsen
from weft.inductor.schedule.contraction import Contraction, contract
from weft.inductor.schedule.list_schedule import LeadTime, ListSchedule, list_schedule
from weft.inductor.schedule.local_search import ExpectedTime, LocalSearch
from weft.inductor.schedule.min_memory_order import min_memory_order, order_within, unavoidable_bytes
from weft.inductor.schedule.precedence import Precedence, precedence, reversed_graph, reversed_order
from weft.inductor.schedule.reference_order import Reference

TIME_TOLERANCE = 2e-3
"""Relative difference of predicted step times that is not significant."""

# The estimate of an order counts a run in which collectives take _SLOW_FACTOR times as long, with weight _SLOW_WEIGHT.
# The factor was measured on two H200 that were described as eight; the weight is a guess.
_SLOW_FACTOR = 3.0
_SLOW_WEIGHT = 0.1
# Task graphs of more tasks are searched in groups of alike computation, each of at most this part of the step's
# computation. Choices.
_MAX_TASKS, _SPAN = 1_000, 1 / 1_000
# Number of the largest storages that an error names.
_NAMED = 3


def search_order(task_graph: TaskGraph, memory_limit: int | None = None) -> list[int]:
    """An order of issue of ``task_graph`` with a short step time.

    Time and memory are those of :func:`weft.inductor.cost.simulate.simulate`. The result depends on the task graph
    alone; ties are broken by position, so that equal graphs get equal orders. Runs in time near linear in the tasks.

    Args:
        memory_limit: peak memory in bytes that is not exceeded; None: no limit.

    Raises:
        MemoryLimitUnreachable: no order within the limit was found. For a step of few tasks none exists then.
    """
    contraction = task_graph.derived(contract)
    return contraction.expanded(_search_in_groups(contraction.task_graph, memory_limit))


def _search_in_groups(task_graph: TaskGraph, memory_limit: int | None) -> list[int]:
    """As :func:`_search`; computation of a large task graph is placed in groups."""
    if len(task_graph.tasks) <= _MAX_TASKS:
        return _search(task_graph, memory_limit)
    coarse = task_graph.derived(_coarse)
    try:
        order = coarse.expanded(_search(coarse.task_graph, memory_limit))
    except MemoryLimitUnreachable:  # a group may hold more than its tasks do one by one
        return _search(task_graph, memory_limit)
    # The task graph's own order competes, see `_search`; the groups may have changed it.
    own_order = task_graph.derived(simulate)
    own_fits = memory_limit is None or own_order.peak <= memory_limit
    return list(own_order.order) if own_fits and own_order.seconds < simulate(task_graph, order).seconds else order


def _coarse(task_graph: TaskGraph) -> Contraction:
    return coarsen(task_graph, _SPAN * task_graph.derived(simulate).compute_seconds)


def _search(task_graph: TaskGraph, memory_limit: int | None) -> list[int]:
    before = precedence(task_graph)
    # The order of the graph, with the buckets and regathers of this candidate. Because it competes, no search makes the
    # candidate slower than the simple rules would, as predicted.
    own_order = task_graph.derived(simulate)
    reference = Reference(task_graph, before, _order_within(task_graph, before, own_order, memory_limit), memory_limit)
    schedules = _schedules(reference)
    own_fits = memory_limit is None or own_order.peak <= memory_limit
    if own_fits:
        schedules.append(ListSchedule(list(own_order.order), own_order.seconds, own_order.peak, []))
    # Without the slow run, the plain minimum chose orders without slack to gain 0.05 ms of 73 ms (docs/decisions.md).
    expected = ExpectedTime(task_graph, _SLOW_FACTOR, _SLOW_WEIGHT)
    # Several passes find the same order.
    distinct = {tuple(each.order): each for each in schedules}
    found = [(expected(order), each) for order, each in distinct.items()]
    # All orders share one budget of simulations, and the fastest come first.
    search = LocalSearch(task_graph, before, expected, memory_limit)
    for seconds, each in sorted(found, key=lambda pair: pair[0]):
        # Within a move's least gain of the lower bound: no order can be better by more than that.
        if min(faster for faster, _ in found) <= search.enough:
            break
        order, faster = search.improve(each.order, seconds)
        if faster < seconds:
            found.append((faster, _issued(task_graph, order)))
    seconds, best = min(found, key=lambda pair: pair[0])
    order, faster = search.improve_by_perturbations(best.order, seconds)
    if faster < seconds:
        found.append((faster, _issued(task_graph, order)))
    # With slack or without, no order that is slower as predicted than the task graph's own.
    slowest = own_order.seconds if own_fits else math.inf
    found = [pair for pair in found if pair[1].seconds <= slowest]
    # Predictions do not resolve smaller differences, while a lower peak is certain: memory decides. `found` is in a
    # fixed order, and `min` takes the first of equals.
    slowest = min(seconds for seconds, _ in found) * (1 + TIME_TOLERANCE)
    fast = [each for seconds, each in found if seconds <= slowest]
    return min(fast, key=lambda each: (each.peak, each.seconds)).order


def _issued(task_graph: TaskGraph, order: list[int]) -> ListSchedule:
    """An order with its time and its peak."""
    simulation = simulate(task_graph, order)
    return ListSchedule(order, simulation.seconds, simulation.peak, [])


def _schedules(reference: Reference) -> list[ListSchedule]:
    """Schedules for several due times and lead times.

    Due times come from a list schedule of the reversed graph, the priority of critical-path scheduling with resource
    limits. A second round starts from the ends of the best forward schedule (forward-backward improvement: K. Y. Li,
    R. J. Willis, European Journal of Operational Research 56, 1992).
    """
    longest = max((task.seconds for task in reference.task_graph.tasks if task.kind is Kind.START), default=0.0)
    # From just in time, over one collective's length early, to due times alone. Which is best depends on the step, and
    # a pass takes time linear in its tasks: all are tried.
    at_once, in_order = LeadTime(math.inf, math.inf), LeadTime(math.inf, -math.inf)
    lead_times = (LeadTime(0.0, 0.0), LeadTime(longest, longest), LeadTime(longest, -math.inf), at_once)
    backwards, earliest = _Backwards(reference), _earliest_ends(reference)
    schedules = [
        list_schedule(reference, due, lead_time)
        # Backwards once in the reversed order of the reference, and once by priorities alone: the second moves
        # computation too.
        for due in (backwards.due(earliest, in_order), backwards.due(earliest, at_once))
        for lead_time in lead_times
    ]
    # Its ends contain the stalls and the queues on streams, which the critical path of `_earliest_ends` does not know.
    fastest = min(schedules, key=lambda each: each.seconds)
    due = backwards.due(fastest.ends, at_once)
    return [*schedules, *(list_schedule(reference, due, lead_time) for lead_time in lead_times)]


class _Backwards:
    """The reversed task graph with the reversed reference order, to compute due times."""

    def __init__(self, reference: Reference) -> None:
        task_graph = reversed_graph(reference.task_graph)
        self.tasks, self.starts = len(reference.order), list(reference.waits)
        self.seconds = [reference.task_graph.tasks[start].seconds for start in self.starts]
        # No memory limit: due times are priorities only. Forward passes, which use them, keep the limit.
        self.reference = Reference(
            task_graph, precedence(task_graph), reversed_order(reference.task_graph, reference.order)
        )

    def due(self, ends: Sequence[float], lead_time: LeadTime) -> list[float]:
        """When each task has to begin (s), so that the step takes no longer than its backward schedule.

        Args:
            ends: when tasks end in a forward schedule (s). The backward schedule prefers tasks that end last, and
                collectives that begin last: a FIFO stream ends soonest in the order in which its collectives are ready.
        """
        last = max(ends, default=0.0)
        begins = [ends[start] - seconds for start, seconds in zip(self.starts, self.seconds, strict=True)]
        due = [last - end for end in (*ends, *begins)]
        backwards = list_schedule(self.reference, due, lead_time)
        begins = [backwards.seconds - end for end in backwards.ends]
        # In the reversed graph a START has become a WAIT. When its collective begins is what the added START task ends
        # with.
        for started, start in enumerate(self.starts, self.tasks):
            begins[start] = begins[started]
        return begins[: self.tasks]


def _earliest_ends(reference: Reference) -> list[float]:
    """When each task would end without resource limits (s): the length of its critical path."""
    ends = [0.0] * len(reference.order)
    for task in reference.order:
        ready = max((ends[need] for need in reference.needs[task]), default=0.0)
        ends[task] = ready + reference.task_graph.tasks[task].seconds
    return ends


def _order_within(task_graph: TaskGraph, before: Precedence, own_order: Simulation, limit: int | None) -> Sequence[int]:
    """An order within the limit: the low-memory order, else the task graph's own, else one from a search.

    Raises:
        MemoryLimitUnreachable: none was found.
    """
    # Also the reference where there is no limit: what comes late in it is issued ahead by its due time, where that
    # gains time.
    tight = simulate(task_graph, min_memory_order(task_graph, before))
    if limit is None:
        return tight.order
    for known in (tight, own_order):
        if known.peak <= limit:
            return known.order
    # A lower bound at the peak proves that no order fits, which saves an exhaustive search.
    infeasible = unavoidable_bytes(task_graph, before, tight.order[tight.peak_at]) > limit
    order = None if infeasible else order_within(task_graph, before, tight.order, limit)
    if order is None:
        raise limit_error(min(tight, own_order, key=lambda known: known.peak), limit)
    return order


def limit_error(
    least: Simulation, limit: int, names: Sequence[str] | None = None, *, certain: bool = False
) -> MemoryLimitUnreachable:
    """The error for ``limit`` bytes. It names the largest storages at the peak of ``least``, the run of lowest peak.

    Args:
        names: of the tasks, as the user knows them; the tasks' own names if None.
        certain: whether recomputation cannot help.
    """
    task_graph, at = least.task_graph, least.peak_at
    place = {task: place for place, task in enumerate(least.order)}
    waits = task_graph.waits_of()

    def is_held(storage: Storage) -> bool:
        users = users_of(storage, waits)
        return place[storage.maker] <= at and (not users or at <= max(place[user] for user in users))

    live = sorted((storage for storage in task_graph.storages if is_held(storage)), key=lambda storage: -storage.size)
    names = names or [task.name for task in task_graph.tasks]
    held = [(storage.size, names[storage.maker]) for storage in live[:_NAMED]]
    if task_graph.set_aside:
        held = sorted([(task_graph.set_aside, "collectives over peers"), *held], key=lambda name: -name[0])[:_NAMED]
    inputs = task_graph.base - task_graph.set_aside
    return MemoryLimitUnreachable(limit, least.peak, names[least.order[at]], inputs, held, certain)
