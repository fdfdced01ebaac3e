"""The planner: which all-gathers are repeated, which collectives share a bucket, and the order of issue.

The planner compares a few candidates. A candidate says which gathered parameters are freed and gathered again
(:mod:`weft.inductor.schedule.reshard`) and how large buckets can get (:mod:`weft.inductor.schedule.bucketing`). For
each candidate the graph is rewritten, priced (:mod:`weft.inductor.cost.build_task_graph`), ordered within the memory
limit (:mod:`weft.inductor.schedule.search_order`) and simulated with the transports that it will run with. The schedule
has few regathers, found greedily, and of the bucket sizes that are tried for these, the first that is within 0.2% of
the fastest.

Gathering again costs communication, so as few parameters as possible are resharded. Of the gathered values that are
held at the peak without being used, those go first that hold most byte-seconds per second of communication: the first
layers' parameters, which backward needs last. How many must go is estimated from the memory over time in an order that
needs little memory. If no order of the candidate fits, more parameters go; if none fits with any, buckets get smaller.
*Regathers* are the all-gathers of a value after its first.

Orders are searched with the times of the chosen transports, and as if no result lay in the symmetric arena, since the
size of the arena follows from the order. The arena is then laid out for the order that was found. If the sum exceeds
the limit, the search runs again, and leaves as much room as that arena took. A candidate that would exceed the limit by
far with the arena of the last order is rejected without a search. If no order with transports over peer access fits,
NCCL carries the collectives. (The symmetric arena is memory of every rank that its peers can read and write; it is
allocated for the whole step.)
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective
from weft.capture.user_code import format_frame
from weft.errors import MalformedSchedule, MemoryLimitUnreachable
from weft.inductor.cost.build_task_graph import build, gpu_in
from weft.inductor.cost.cluster import Cluster
from weft.inductor.cost.collective_cost import Collective, collective_of, transfer
from weft.inductor.cost.compute_cost import ComputeCosts
from weft.inductor.cost.simulate import Simulation, live_bytes, peak_memory
from weft.inductor.cost.task_graph import TaskGraph
from weft.inductor.graph.host_scalars import on_host
from weft.inductor.graph.node_order import reorder, together
from weft.inductor.graph.pass_runner import is_enabled
from weft.inductor.lowering.lower import device_kind
from weft.inductor.passes.wire_dtype import library_casts
from weft.inductor.schedule import schedule_tables
from weft.inductor.schedule.bucket_reports import bucket_reports
from weft.inductor.schedule.bucketing import (
    BucketEntry,
    Price,
    balanced_bucket_bytes,
    bucketable_sequences,
    cut_into_buckets,
    merge_buckets,
)
from weft.inductor.schedule.candidate_costs import CachedCosts, TransportedCosts
from weft.inductor.schedule.decisions import Decisions, MergeBuckets, apply, before_order, regather, structure
from weft.inductor.schedule.min_memory_order import min_memory_order, operands_bytes
from weft.inductor.schedule.precedence import precedence
from weft.inductor.schedule.reshard import GapSequence, gaps, gather_once
from weft.inductor.schedule.schedule_result import Schedule, SchedulePrediction
from weft.inductor.schedule.search_order import TIME_TOLERANCE, limit_error, search_order
from weft.inductor.schedule.select_transport import LIBRARY, allowed_transports, carriers, cheapest, choose_transports
from weft.inductor.schedule.simulated_step import (
    assume_reachable,
    simulated,
    simulated_as_is,
    simulated_in_order,
)
from weft.inductor.schedule.split_optimizer import split_updates
from weft.inductor.schedule.verify import verifier
from weft.inductor.transports.apply_transports import use_transports
from weft.inductor.transports.peer_calls import results_in_arena

log = logging.getLogger(__name__)

Node = torch.fx.Node

# Candidates for the largest bucket, as multiples of `balanced_bucket_bytes`, the most promising first. A choice.
_BUCKET_SCALES = (1.0, 0.7, 1.4, 0.5)
# Candidates where no order with the balanced size is within the limit, from the largest. A choice.
_SMALLER_SCALES = (0.5, 0.25, 0.125, 1 / 16, 1 / 32, 1 / 64)
# Buckets of gathered parameters that are live at a time: one in use, one prefetched. It decides which of the smaller
# sizes are tried.
_LIVE_BUCKETS = 2
# Nodes of all candidates with other bucket sizes together: bounds the time of scheduling. A choice.
_MAX_TRIAL_NODES = 8_000
# If the low-memory order peaks below this fraction of the limit, an order is first searched without a limit. A choice.
_UNCONSTRAINED_FRACTION = 0.75
# Default memory limit as a fraction of the GPU's memory. Libraries, communicators and fragmentation need the rest.
_USABLE_FRACTION = 0.9
# Fixed overhead per collective inside a step, in seconds: waiting for free multiprocessors and for late ranks. It only
# decides how large buckets get, and was fitted to that: with it, the planner makes about as many calls as the schedules
# that were measured had. The waits themselves are no single number. In traces of four H200, barriers and waiting
# reductions took 49, 8 and 11 us in the median of a step (Llama 8B with 2,048 and 8,192 tokens, 1B), 171, 315 and 22 us
# in the mean.
_CALL_OVERHEAD = 8e-5
# The target for the estimated peak is lowered in steps of at least this fraction of the limit, so that the search for
# regathers ends. Also by how much a candidate may exceed the limit with the arena of the last order and still have its
# orders searched, because arenas differ between orders by about as much. A choice.
_TARGET_STEP = 1 / 128
# Times that a candidate is ordered with a lower limit because its symmetric arena is larger than assumed.
_MAX_REORDERS = 3
# Regathers are bisected only where that may gain more than this fraction of the step. Each candidate takes one to two
# seconds for an 8B step, so a smaller gain takes thousands of steps to pay for its search. A choice.
_WORTH_A_BISECTION = 5e-3


@dataclass(frozen=True)
class ScheduleCandidate:
    """A candidate that the planner evaluates.

    Attributes:
        regathers: as in :class:`weft.inductor.schedule.decisions.Decisions`.
        scale: the largest bucket, as a multiple of :func:`weft.inductor.schedule.bucketing.balanced_bucket_bytes`; 0
            for no buckets.
    """

    regathers: tuple[tuple[int, tuple[int, ...]], ...]
    scale: float


def schedule(
    step: StepGraph,
    cluster: Cluster,
    memory_limit: int | None = None,
    *,
    keep_bits: bool = False,
    unreachable_groups: Collection[str] = (),
) -> Schedule:
    """Schedule a step of generated kernels, or of ATen's with ``keep_bits``. ``step`` is not changed.

    Args:
        memory_limit: peak memory of a rank in bytes, including the step's inputs. Default: 90% of the memory of the
            cluster's GPU. With the default, a step that does not fit gets the schedule of the lowest peak, and a
            warning.
        keep_bits: do not merge collectives if the merged results could have other bits.
        unreachable_groups: groups whose ranks have no peer access. All other groups are assumed to have it.

    Raises:
        MemoryLimitUnreachable: no candidate fits ``memory_limit``.
        GroupGone, CannotCarry, LinkMissing: see :func:`weft.inductor.cost.build_task_graph.build`.
        MalformedSchedule: the schedule is not valid; checked if ``knobs.verify_graphs`` is set.
    """
    started = time.perf_counter()
    with torch_adapter.only_mode():  # in a fake world too, numbers are numbers
        planner = _Planner(step, cluster, memory_limit, keep_bits, unreachable_groups)
        result = planner.best()
        _verify(step, result, planner.limit)
    log_warnings(result.warnings)
    seconds = time.perf_counter() - started
    log.debug("scheduled %d nodes in %.2f s, %d candidates", len(step), seconds, result.candidates)
    schedule_tables.log_schedule(result)
    return result


def usable_memory(cluster: Cluster) -> int:
    """The memory limit of a rank in bytes where the user gives none."""
    return int(cluster.gpu.memory * _USABLE_FRACTION)


def log_warnings(warnings: Sequence[str]) -> None:
    """Log the warnings of a schedule."""
    for line in warnings:
        log.warning("%s", line)


def follow(step: StepGraph, cluster: Cluster, decisions: Decisions, memory_limit: int | None = None) -> Schedule:
    """The schedule of ``step`` by decisions that were made for an equal graph. ``step`` is not changed.

    Raises:
        MalformedGraph: the decisions were made for another graph.
        MalformedSchedule: as :func:`schedule`.
    """
    original = step
    with torch_adapter.only_mode():
        step = apply(original, decisions)
        limit = usable_memory(cluster) if memory_limit is None else memory_limit
        result = Schedule(step, decisions, partial(_predicted, step, cluster), limit, replayed=True)
        _verify(original, result, None)  # batches of this rank may be larger than those that the limit was held with
    return result


def _predicted(step: StepGraph, cluster: Cluster) -> SchedulePrediction:
    """What is predicted of a scheduled step, which stays as it is."""
    with torch_adapter.only_mode():
        simulation, nodes = simulated(step.copy(), cluster, ComputeCosts(gpu_in(step, cluster)))
        return SchedulePrediction(simulation, nodes, bucket_reports(step, cluster, simulation, nodes))


def made_before(
    transported: StepGraph,
    cluster: Cluster,
    decisions: Decisions,
    memory_limit: int | None,
    *,
    candidates: int,
    warnings: Sequence[str],
) -> Schedule:
    """The schedule of a step that an earlier process scheduled and gave its transports, by what was decided there.
    ``transported`` is not changed."""

    def predict() -> SchedulePrediction:
        with torch_adapter.only_mode():
            costs = ComputeCosts(gpu_in(transported, cluster))
            simulation, nodes = simulated_as_is(transported, cluster, costs)
            return SchedulePrediction(simulation, nodes, bucket_reports(transported, cluster, simulation, nodes))

    limit = usable_memory(cluster) if memory_limit is None else memory_limit
    return Schedule(transported, decisions, predict, limit, candidates, list(warnings), replayed=True)


def repeat(
    step: StepGraph,
    cluster: Cluster,
    decisions: Decisions,
    memory_limit: int | None = None,
    *,
    candidates: int = 0,
    warnings: Sequence[str] = (),
) -> Schedule:
    """The schedule that :func:`schedule` gave for an equal step, the same cluster and limit, by what it decided.

    Nothing is searched. ``step`` is not changed.

    Raises:
        MalformedGraph: the decisions were made for another graph.
        MalformedSchedule: as :func:`schedule`.
    """
    with torch_adapter.only_mode():
        applied = before_order(step, decisions)
        limit = usable_memory(cluster) if memory_limit is None else memory_limit
        simulation, nodes = simulated_in_order(
            applied, decisions.order, cluster, ComputeCosts(gpu_in(applied, cluster))
        )
        unordered = list(applied.graph.nodes)
        reorder(applied, [unordered[at] for at in decisions.order])
        known = SchedulePrediction(simulation, nodes, bucket_reports(applied.check(), cluster, simulation, nodes))
        result = Schedule(applied, decisions, lambda: known, limit, candidates, list(warnings))
        _verify(step, result, None)  # a default limit may be exceeded, with a warning
    log_warnings(result.warnings)
    return result


def _verify(step: StepGraph, result: Schedule, limit: int | None) -> None:
    """Check a schedule of ``step``, and that its decisions give other ranks the same schedule.

    Raises:
        MalformedSchedule: it is not valid.
    """
    checks = verifier(step)
    if checks is None:
        return
    checks.check(result.step, "scheduling")
    # Other ranks never see the graph that rank 0 has searched on: they replay its decisions. If the replay gave another
    # graph, ranks would issue different collectives.
    if structure(apply(step, result.decisions)) != structure(result.step):
        raise MalformedSchedule("scheduling", "its decisions give other ranks another schedule", "")
    # The arena exists only once transports are applied, so memory is checked on a copy that has them. `result.step`
    # stays without: the compiler applies transports to it, with the real answer on peer access.
    transported = result.step.copy()
    use_transports(transported, unreachable=assume_reachable)
    checks.check(transported, "applying transports", limit=limit, predicted_peak=result.simulation.peak)


@dataclass(eq=False)
class _AppliedCandidate:
    """A candidate applied to the step, before it is ordered.

    Attributes:
        step: the rewritten step.
        bucket_positions: see ``Decisions.bucket_positions`` (:class:`weft.inductor.schedule.decisions.Decisions`).
        transports: see ``Decisions.transports``.
        low_memory_order, low_memory_peak: the result of
            :func:`weft.inductor.schedule.min_memory_order.min_memory_order`, and its peak in bytes.
        task_graph, nodes: of ``step``, with the times of the chosen transports and without the symmetric arena.
    """

    candidate: ScheduleCandidate
    step: StepGraph
    bucket_positions: tuple[tuple[int, ...], ...]
    transports: tuple[tuple[int, str], ...]
    low_memory_order: list[int]
    low_memory_peak: int
    task_graph: TaskGraph
    nodes: list[Node]


@dataclass(eq=False)
class _OrderedCandidate:
    """An applied candidate in an order of issue, with its simulation and its tasks' nodes."""

    applied: _AppliedCandidate
    order: list[int]
    simulation: Simulation
    nodes: list[Node]


class _Planner:
    """Evaluates the candidates for one step and keeps what it learns from each."""

    def __init__(
        self,
        step: StepGraph,
        cluster: Cluster,
        limit: int | None,
        keep_bits: bool,
        unreachable_groups: Collection[str] = (),
    ) -> None:
        self.step = step
        self.cluster = cluster
        self.transport_rules = {"keep_bits": keep_bits, "unreachable_groups": unreachable_groups}
        self.keep_bits = keep_bits
        self.on_gpu = device_kind(step.graph.nodes) == "cuda"
        self.requested_limit = limit
        self.limit = usable_memory(cluster) if limit is None else limit
        self.reported_limit = self.limit
        self.costs = CachedCosts(gpu_in(step, cluster))
        self.evaluated = 0
        self.warnings: list[str] = []
        self.excess = 0  # bytes by which the last candidate exceeded the limit; negative where it fits
        self.estimated = False  # whether that is an estimate: its orders were not searched
        self.too_large_seconds = 0.0  # of the last order within a limit whose arena exceeded it; 0 where there was none
        self.unpredicted = 0  # bytes of the last order's peak that its search did not count: the arena
        self.least: _OrderedCandidate | None = None  # the candidate with the lowest peak
        self.by_peers: list[str] = []  # transports over peers of the last candidate
        self.refused: list[str] = []  # transports that are not allowed
        # Memory over time with every parameter gathered once: the starting point from which regathers are chosen.
        self.whole = whole = step.copy()
        values = gather_once(whole)
        # The estimate of what has to be gathered again assumes the low-memory order, and the transports that single
        # collectives get. What prefetching holds on top of it is `reserve`.
        library_casts(choose_transports(whole, cluster, **self.transport_rules))
        task_graph, nodes = build(whole, cluster, self.costs)
        order = min_memory_order(task_graph, precedence(task_graph))
        self.gaps = GapSequence(gaps(values, task_graph, nodes, order), live_bytes(task_graph, order))
        # Calls of libraries are the same in every candidate, whatever is gathered, merged, split or recomputed.
        calls = [at for at, node in enumerate(nodes) if getattr(node.target, "namespace", "") == "aten"]
        # So what one of them reads and writes, with the inputs, bounds the peak of every candidate from below. Above
        # the limit, no search can help, and recomputation cannot either (`certain` of the error).
        self.infeasible = operands_bytes(task_graph, calls) > self.limit

    @cached_property
    def reserve(self) -> int:
        """Room for prefetched parameters in bytes: the largest balanced size of their buckets, though a bucket may be
        larger. Prefetching holds the gathered bucket before its first use, which the low-memory order never does."""
        # The casts that the constructor has inserted for libraries belong to reductions; these are gathers.
        prefetched = [balanced for of, _, _, balanced in self.priced(self.whole) if of[0].depends_on_model_only]
        return int(max((size for size in prefetched if size < math.inf), default=0))

    def best(self) -> Schedule:
        """The schedule of the fastest candidate; of those within ``TIME_TOLERANCE``, of the first."""
        # Other bucket sizes are tried only with the regathers of the first candidate that fits: both choices together
        # would take a product of candidates, and predicted times differ little between bucket sizes.
        candidates = [self.within_limit_or_least()]
        for scale in _BUCKET_SCALES[1 : 1 + _MAX_TRIAL_NODES // len(self.step)]:
            first = candidates[0].applied.candidate
            other = self.evaluate(replace(first, scale=scale * first.scale)) if first.scale else None
            candidates += [other] if other is not None else []
        # Candidates are in the order of preference, so differences that are not significant do not change the schedule.
        slowest = min(candidate.simulation.seconds for candidate in candidates) * (1 + TIME_TOLERANCE)
        found = next(candidate for candidate in candidates if candidate.simulation.seconds <= slowest)
        applied = found.applied
        regathers = applied.candidate.regathers
        decisions = Decisions(regathers, applied.bucket_positions, applied.transports, tuple(found.order))
        # Only now: the order lists positions in the graph before this reordering, as `schedule_passes` reads it.
        reorder(applied.step, [applied.nodes[at] for at in found.order])
        reports = bucket_reports(applied.step, self.cluster, found.simulation, found.nodes)
        known = SchedulePrediction(found.simulation, found.nodes, reports)
        return Schedule(applied.step, decisions, lambda: known, self.reported_limit, self.evaluated, self.warnings)

    def within_limit_or_least(self) -> _OrderedCandidate:
        """A candidate within the limit with few regathers. If none is within the default limit, the one of the lowest
        peak.

        Raises:
            MemoryLimitUnreachable: none fits.
        """
        if self.infeasible:
            self.refused = allowed_transports(self.cluster)  # their memory would only add to the peak
            self.evaluate(self.candidate(len(self.gaps), 0.0), last=True)
        while (found := None if self.infeasible else self.within_limit()) is None and self.by_peers:
            # `by_peers` lists transports in use, and each round refuses some of them. So the loop ends, at the latest
            # when the library carries everything.
            # The arena stays allocated for the whole step. Results in it live longest, so their transports go first.
            longest = any(map(results_in_arena, self.by_peers))
            self.refused = [name for name in allowed_transports(self.cluster) if results_in_arena(name) or not longest]
            names = ", ".join(name for name in self.by_peers if name in self.refused)
            self.warnings.append(f"no schedule with {names} fits {self.limit:,} bytes: other transports are used")
            self.unpredicted = 0  # it was the arena of these transports
        found = found or self.least
        assert found is not None
        if found.simulation.peak <= self.limit:
            return found
        names = [_described(node) for node in found.nodes]
        error = limit_error(found.simulation, self.limit, names, certain=self.infeasible)
        if self.requested_limit is not None:
            raise error
        # The default limit is an estimate of what the GPU has left: the step may still run. The lowest peak becomes the
        # limit, so that the time is minimised within it.
        self.warnings.append(f"the step may need more memory than the GPU has: {error}")
        self.limit = error.peak
        # The search can end without an order: that of lowest peak has the arena counted in, and the arena of any other
        # order may be larger.
        return self.evaluate(found.applied.candidate) or found

    def within_limit(self) -> _OrderedCandidate | None:
        """A candidate that fits, with buckets as large as the limit allows; None where none fits."""
        if (found := self.few_regathers(_BUCKET_SCALES[0])) is not None:
            return found
        # The lowest peak: every regather that lowers it, and no buckets, whose results are live together. Its many
        # small calls are slow, so it is the last resort.
        smallest = self.candidate(len(self.gaps), 0.0)
        room = self.limit - self.applied(smallest).low_memory_peak
        for scale in _SMALLER_SCALES:
            if _LIVE_BUCKETS * scale * self.reserve <= room and (found := self.few_regathers(scale)) is not None:
                return found
        return self.evaluate(smallest, last=True)

    def few_regathers(self, scale: float) -> _OrderedCandidate | None:
        """A candidate of this bucket scale that fits, with few regathers; None where none fits. Estimates that are too
        low are answered with a lower target, and what that skips is bisected."""
        target, decrement, tried = self.limit, int(self.limit * _TARGET_STEP), -1
        count = self.gaps.fewest(target)
        # Regathers are prefetched, which needs room for a bucket that the low-memory order does not count.
        if count:
            tight, target = count, target - int(scale * self.reserve)
            count = self.gaps.fewest(target)
            # No regathers leave that much room. Those that do without it are few, so they are tried before all others.
            if count is None:
                tried = tight
                if (found := self.evaluate(self.candidate(tight, scale))) is not None:
                    return found
        # The most regathers that were refused. Fewer than the first that are tried leave no room for prefetching.
        refused = None
        while count is not None:
            candidate = self.candidate(count, scale)
            if count != tried and (found := self.evaluate(candidate, far_bytes=decrement)) is not None:
                return found if refused is None else self.fewer(found, refused, count, decrement)
            # Lower the target by the excess of the candidate, and by a step so that the loop ends.
            tried, refused, target = count, count, target - max(self.excess, 0) - decrement
            count = self.gaps.fewest(target)
        # At last, every regather that lowers the peak. The loop has searched `tried` for an order, unless it was
        # dismissed by its estimate. Then it still deserves a search.
        most = len(self.gaps)
        return self.evaluate(self.candidate(most, scale)) if most != tried or self.estimated else None

    def fewer(self, found: _OrderedCandidate, refused: int, fits: int, far_bytes: float) -> _OrderedCandidate:
        """The candidate that fits with the fewest regathers between ``refused``, which do not, and ``fits``, which are
        those of ``found``. A bisection: more regathers need less memory. It ends where fewer cannot gain enough."""
        # The orders that exceeded the limit have fewer regathers, so they show how fast the step can get.
        while fits - refused > 1 and found.simulation.seconds > self.too_large_seconds * (1 + _WORTH_A_BISECTION):
            middle = (refused + fits) // 2
            other = self.evaluate(self.candidate(middle, found.applied.candidate.scale), far_bytes=far_bytes)
            refused, fits, found = (middle, fits, found) if other is None else (refused, middle, other)
        return found

    def candidate(self, count: int, scale: float) -> ScheduleCandidate:
        """The candidate with the first ``count`` regathers."""
        return ScheduleCandidate(self.gaps.regathers(count), scale)

    def evaluate(
        self, candidate: ScheduleCandidate, *, last: bool = False, far_bytes: float = math.inf
    ) -> _OrderedCandidate | None:
        """Apply and order a candidate. None where no order that fits is found easily. For the ``last`` candidate the
        search takes longer, and ``least`` is updated.

        Args:
            far_bytes: if the candidate exceeds the limit by more than so many bytes with the arena of the last order,
                no order is searched, and ``estimated`` is set.
        """
        self.evaluated += 1
        applied = self.applied(candidate)
        # Arenas of neighbouring candidates have similar sizes. A candidate that exceeds the limit by far with the last
        # arena would cost up to `_MAX_REORDERS` searches to be rejected. Where even the low-memory order exceeds the
        # limit, `ordered` rejects without a search, and knows the excess exactly.
        estimate = applied.low_memory_peak + self.unpredicted - self.limit
        self.estimated = applied.low_memory_peak <= self.limit and estimate > far_bytes
        if self.estimated:
            self.excess = estimate
            return None
        return self.ordered(applied, last)

    def applied(self, candidate: ScheduleCandidate) -> _AppliedCandidate:
        """Apply a candidate: regathers, buckets, split updates and transports, but no order."""
        # Other ranks repeat these rewrites in this order from the decisions (`schedule_passes`). Places of buckets are
        # taken after the regathers and before the merge: they are positions in that graph.
        step = regather(self.step.copy(), candidate.regathers)
        buckets = [bucket for bucket in self.bucket_entries(step, candidate.scale) if len(bucket) > 1]
        place = {node: at for at, node in enumerate(step.graph.nodes)}
        positions = tuple(tuple(place[member.start] for member in bucket) for bucket in buckets)
        if is_enabled(MergeBuckets()):
            merge_buckets(step, buckets)
        if is_enabled(split_updates):
            split_updates(step)
        # After the merge: which transport is cheapest depends on the bytes of the whole call.
        choose_transports(step, self.cluster, without=self.refused, **self.transport_rules)
        chosen = [(at, node.meta["transport"]) for at, node in enumerate(step.graph.nodes) if is_collective(node)]
        self.by_peers = [name for name in dict.fromkeys(name for _, name in chosen) if name != LIBRARY]
        library_casts(step)
        # Libraries do no casts on the way. Then no copy of the graph has to show which casts are left.
        costs = TransportedCosts(self.costs, step) if self.by_peers else self.costs
        task_graph, nodes = build(step, self.cluster, costs)
        order = min_memory_order(task_graph, precedence(task_graph))
        peak = peak_memory(task_graph, order)
        return _AppliedCandidate(candidate, step, positions, tuple(chosen), order, peak, task_graph, nodes)

    def ordered(self, applied: _AppliedCandidate, last: bool) -> _OrderedCandidate | None:
        """An applied candidate in an order within the limit, None where none is found."""
        task_graph, counted = applied.task_graph, applied.low_memory_peak
        # Without a limit an order is found sooner, and with this much room it is usually within the limit.
        if counted < _UNCONSTRAINED_FRACTION * self.limit:
            found = self.issued(applied, search_order(task_graph))
            if found.simulation.peak <= self.limit:
                return found
        if last:
            least = self.issued(applied, applied.low_memory_order)
            # Kept as a fallback only: the order of lowest peak known for this candidate, whether it fits or not.
            self.least = min(self.least or least, least, key=lambda candidate: candidate.simulation.peak)
        self.excess = counted - self.limit
        if self.excess > 0 and not last:
            return None
        # Assume the same arena as in the last order: the order decides its size, so it is not known before.
        bound = self.limit if self.excess > 0 else max(counted, self.limit - self.unpredicted)
        for _ in range(_MAX_REORDERS):
            try:
                order = search_order(task_graph, bound)
            except MemoryLimitUnreachable:
                break
            found, searched = self.issued(applied, order), peak_memory(task_graph, order)
            # `searched` has no arena; the simulation of `issued` has. The difference is all that the search could not
            # see.
            self.unpredicted = found.simulation.peak - searched
            self.excess = found.simulation.peak - self.limit
            if self.excess <= 0:
                return found
            self.too_large_seconds = found.simulation.seconds
            if searched <= counted:  # no lower peak than that of the low-memory order will be found
                break
            # The arena may grow with the new order, so one correction is not always enough.
            bound = max(counted, searched - self.excess)
        return None

    def issued(self, applied: _AppliedCandidate, order: Sequence[int]) -> _OrderedCandidate:
        """The simulation of an applied candidate in an order of issue, where list elements and waits of one collective
        are issued together."""
        place = {node: at for at, node in enumerate(applied.nodes)}
        # The search may leave elements and waits of one call apart. The order is changed first and simulated
        # afterwards, so that the prediction is of the order that runs.
        issue_order = [place[node] for node in together(applied.nodes[task] for task in order)]
        return _OrderedCandidate(
            applied, issue_order, *simulated_in_order(applied.step, issue_order, self.cluster, self.costs)
        )

    def bucket_entries(self, step: StepGraph, scale: float) -> list[list[BucketEntry]]:
        """The buckets of a step's collectives."""
        # A compute stream that never stalls: buckets are cut before there is an order whose stalls could be counted.
        priced = ((node, self.costs.seconds(node)) for node in step.graph.nodes)
        seconds = (0.0 if taken and self.on_gpu and on_host(node) else taken for node, taken in priced)
        clock = [0.0, *accumulate(seconds)]
        buckets = []
        for sequence, sizes, price, balanced in self.priced(step):
            buckets += cut_into_buckets(sequence, clock, sizes, price, scale * balanced if scale else 0)
        return buckets

    def priced(self, step: StepGraph) -> Iterator[tuple[list[BucketEntry], list[int], Price, float]]:
        """The sequences that buckets are cut from; each with the bytes of its members, the seconds of a call of so many
        bytes, and the balanced bucket size for the transport that is cheapest for all members as one call."""
        for sequence in bucketable_sequences(step, keep_bits=self.keep_bits):
            sent = [collective_of(step, member.start) for member in sequence]
            sizes = [each.bytes for each in sent]
            names = carriers(step, self.cluster, sequence[0].start, without=self.refused, **self.transport_rules)
            # The largest size is derived for one transport, with one latency and one bandwidth: the formula has no
            # minimum over several. The price of a given bucket is that of its own cheapest transport.
            for_all = cheapest(self.cluster, replace(sent[0], bytes=sum(sizes)), names)
            balanced = balanced_bucket_bytes(sizes, partial(_seconds, self.cluster, [for_all], sent[0]))
            yield sequence, sizes, cache(partial(_seconds, self.cluster, names, sent[0])), balanced


def _seconds(cluster: Cluster, names: Sequence[str], like: Collective, size: int, members: int) -> float:
    sent = replace(like, bytes=size, members=members)
    return _CALL_OVERHEAD + transfer(cluster, sent, cheapest(cluster, sent, names)).seconds


def _described(node: Node) -> str:
    """An operation as the user knows it: its name, its module, and its line."""
    module, frames = node.meta.get("module"), node.meta.get("frames", ())
    line = f" at {format_frame(frames[0])}" if frames else ""
    return f"{node.name}{f' of {module}' if module else ''}{line}"
