"""The graph that a program runs, before binding, and its schedule.

:mod:`weft.inductor.compiler` lists all stages.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Protocol, TypeVar

from weft.capture.graph import StepGraph
from weft.errors import MalformedGraph, MalformedSchedule, MemoryLimitUnreachable
from weft.inductor.cost import cluster_file
from weft.inductor.cost.cluster import Cluster
from weft.inductor.fusion.kernel_stages import begin_kernels, unscheduled_graph
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.schedule import agree_on_cached
from weft.inductor.schedule.agree_on_collectives import AgreedCollectives
from weft.inductor.schedule.agree_on_schedule import in_captured_order, scheduled
from weft.inductor.schedule.communicators import assign_communicators
from weft.inductor.schedule.decisions import Decisions
from weft.inductor.schedule.planner import repeat, schedule
from weft.inductor.schedule.schedule_result import Schedule

log = logging.getLogger(__name__)

T = TypeVar("T")

# Budgets of recomputation that are tried in turn, as fractions of the memory limit: communication needs the rest, and
# how much is known only after scheduling.
_BUDGETS = (1.0, 0.85, 0.7)


def scheduled_graph(
    step: StepGraph,
    cluster: Cluster | None,
    memory_limit: int | None,
    generates: bool,
    runner: PassRunner,
    agreed: AgreedCollectives | None = None,
    *,
    arrive: Callable[[], None] = lambda: None,
) -> tuple[StepGraph, Schedule | None]:
    """The graph that a program runs, before binding, and its schedule, which is None without a ``cluster``. ``step``
    stays as it is; ``agreed`` as for :func:`compile_graph`.

    Where a ``memory_limit`` is given and no schedule fits it, backward recomputes values of forward: first as many as
    the limit alone seems to need, then more.

    Args:
        arrive: called before what ranks do together.

    Raises:
        MemoryLimitUnreachable: nothing fits ``memory_limit``.
    """
    if cluster is None:
        return _with_agreed_collectives(step, generates, None, runner, agreed, arrive, ordered=True, caches=True), None
    how = f"{'' if agreed is None else 'with agreed collectives '}without {runner.left_out.variant()}"
    entry = agree_on_cached.entry_of(step, cluster, memory_limit, how) if generates else None
    arrive()
    known = runner.timed("schedule", lambda: agree_on_cached.read_by_all(entry, step, cluster, memory_limit))
    if known is not None:
        graph, found, issued = known
        if agreed is not None and issued:
            agreed.adopt(issued)
        return runner.run("schedule", graph, [assign_communicators]), found
    decide = functools.partial(
        scheduled, cluster=cluster, memory_limit=memory_limit, keep_bits=not generates, runner=runner
    )

    def attempt(budget: int | None) -> tuple[StepGraph, Schedule | None]:
        graph = _with_agreed_collectives(step, generates, budget, runner, agreed, arrive, ordered=False, caches=False)
        arrive()
        begin_kernels(graph)  # workers compile them while this process schedules
        return runner.timed("schedule", lambda: decide(graph))

    graph, found = _within_budgets(memory_limit if generates else None, attempt)
    agree_on_cached.keep(entry, step, graph, found, "" if agreed is None else agreed.issued)
    return runner.run("schedule", graph, [assign_communicators]), found


def predicted_schedule(
    step: StepGraph,
    cluster: Cluster,
    memory_limit: int | None = None,
    known: MutableMapping[int | None, StepGraph] | None = None,
    kept: KeptSchedules | None = None,
) -> Schedule:
    """The schedule that ``step``, a graph on GPUs, would have on ``cluster``: predicted, no GPU is needed and no kernel
    is compiled. The process groups of the step have to be there, those of a fake world too. ``step`` stays as it is.

    Args:
        memory_limit: as for :func:`compile_graph`.
        known: the graphs of kernels of this step, by their budget of recomputation. It gets those that are made, so
            that the next prediction with other limits or another cluster needs none. Without it, the cache on disk
            serves.
        kept: what was decided for this step. It gets what is decided, so that the same prediction needs no search.

    Raises:
        MemoryLimitUnreachable: nothing fits ``memory_limit``.
        GroupGone: a process group of the step is not there any more.
    """
    runner = PassRunner()

    def attempt(budget: int | None) -> Schedule:
        if known is None:
            graph = unscheduled_graph(step, True, budget, runner)
        elif budget in known:
            graph = known[budget]
        else:
            graph = known[budget] = unscheduled_graph(step, True, budget, runner, caches=False)
        found = schedule(graph, cluster, memory_limit)
        if kept is not None:
            kept.put(about, json.dumps([budget, found.decisions.text(), found.candidates, found.warnings]))
        return found

    about = f"{cluster_file.text(cluster)} within {memory_limit}"
    if kept is not None and known is not None and (text := kept.get(about)) is not None:
        found = _repeated(text, cluster, memory_limit, known)
        if found is not None:
            return found
    return _within_budgets(memory_limit, attempt)


class KeptSchedules(Protocol):
    """What was decided for a step on clusters and within limits, as text."""

    def get(self, about: str) -> str | None:
        """The text that was put there for a cluster and a limit."""

    def put(self, about: str, text: str) -> None:
        """Keep ``text`` for a cluster and a limit."""


def _repeated(
    text: str, cluster: Cluster, memory_limit: int | None, known: Mapping[int | None, StepGraph]
) -> Schedule | None:
    """The schedule that ``text`` tells of; None where it tells of none."""
    try:
        budget, decisions, candidates, warnings = json.loads(text)
        made, graph = Decisions.read(decisions), known.get(budget)
        if graph is None:
            return None
        return repeat(graph, cluster, made, memory_limit, candidates=candidates, warnings=warnings)
    except (ValueError, LookupError, TypeError, MalformedGraph, MalformedSchedule) as error:
        log.warning("a kept schedule cannot be used (%s: %s); it is searched again", type(error).__name__, error)
        return None


def _within_budgets(memory_limit: int | None, attempt: Callable[[int | None], T]) -> T:
    """The result of the first attempt that fits: without recomputation, then with more and more of it. ``attempt`` gets
    the bytes that forward may keep, None for everything.

    Raises:
        MemoryLimitUnreachable: none fits ``memory_limit``.
    """
    budgets = [None, *(int(memory_limit * part) for part in _BUDGETS if memory_limit is not None)]
    for budget in budgets:
        try:
            return attempt(budget)
        except MemoryLimitUnreachable as error:
            if budget == budgets[-1] or error.certain:
                raise
            log.info("recomputing more in backward: %s", error)
    raise AssertionError


def _with_agreed_collectives(
    step: StepGraph,
    generates: bool,
    budget: int | None,
    runner: PassRunner,
    agreed: AgreedCollectives | None,
    arrive: Callable[[], None],
    *,
    ordered: bool,
    caches: bool,
) -> StepGraph:
    """The step after the stages ``graph`` and ``kernels``, with the same collectives on all ranks."""
    graph = unscheduled_graph(step, generates, budget, runner, caches=caches)
    if agreed is None or not step.collectives():
        return graph
    arrive()
    if agreed.all_issue(graph, "" if budget is None else f"within {budget}", ordered=ordered):
        return graph
    graph = unscheduled_graph(step, generates, budget, runner, rewrites=False, caches=caches)
    return runner.run("schedule", graph, [in_captured_order])
