"""The schedule of a step: what stays gathered, what is merged, and the order in which everything is issued.

A small family of plans is tried. A plan says which gathered values are let go of and gathered again
(:mod:`weft.inductor.comm.reshard`) and how large buckets may get (:mod:`weft.inductor.comm.buckets`). The graph is
rewritten by the plan, priced (:mod:`weft.inductor.comm.build`), put into an order within the memory there is
(:mod:`weft.inductor.comm.overlap`) and run by the simulator, carried as it will be; the fastest that fits is taken.

To gather again costs communication, so as much is kept as fits. What is let go of first is what is held longest for a
second of communication: the parameters of the first layers, which backward needs last. How much has to go is read off
the memory of the step in the order of its graph, and tried: where no order of it fits, more goes.

Orders are found for collectives that a library carries: what ranks share has a size only when an order is known, and
what lies in it is held there all the time. So what an order really holds is found by laying it out, and if that is too
much it is ordered again, for so much less. Where nothing over peers fits, the library carries.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.costs import tensor_bytes
from weft.capture.graph import StepGraph, is_collective
from weft.errors import MemoryLimitUnreachable
from weft.inductor.comm import tables
from weft.inductor.comm.buckets import Member, Price, join, partition, sequences, usual_size
from weft.inductor.comm.build import build
from weft.inductor.comm.carry import carry, hand_over
from weft.inductor.comm.choose import LIBRARY, allowed_transports, carriers, cheapest, choose_transports
from weft.inductor.comm.cluster import Cluster, Gpu
from weft.inductor.comm.collective_cost import Collective, collective_of, transfer
from weft.inductor.comm.compute_cost import ComputeCosts
from weft.inductor.comm.decisions import Decisions, apply, regather
from weft.inductor.comm.frugal import tightened
from weft.inductor.comm.overlap import AS_FAST, overlap, unreachable
from weft.inductor.comm.precedence import precedence
from weft.inductor.comm.problem import Problem
from weft.inductor.comm.reshard import gaps, gather_once, let_go
from weft.inductor.comm.simulate import Simulation, simulate
from weft.inductor.comm.tables import BucketReport, bucket_report
from weft.inductor.comm.transports import lies_in_arena
from weft.inductor.comm.updates import split_updates
from weft.inductor.passes.order import reorder, together

log = logging.getLogger(__name__)

Node = torch.fx.Node

# How much larger than usual (see `usual_size`) buckets may get, the most promising first.
_SCALES = (1.0, 0.7, 1.4, 0.5)
# Nodes that the plans tried with other buckets may have together: bounds the time of a schedule.
_NODES = 8_000
# The part of the limit below which the least that a step needs leaves room for anything a schedule may do.
_ROOMY = 0.75
# The part of a GPU's memory that a step may use where nobody says how much: libraries, communicators and what an
# allocator cannot use of the holes between blocks need the rest.
_USABLE = 0.9
# Seconds that a call stands in a step, for multiprocessors and for ranks that come late; alone, calls do not. A choice,
# with which there are about as many calls as in the plans that were measured: in traces of four H200 barriers and what
# sums waited for came to 49, 8 and 11 us in the median of a step (8B of 2,048 and 8,192 tokens, 1B), to 171, 315 and 22
# in the mean.
_STANDS = 8e-5
# How often a step is ordered for less, because of what its collectives over peers set aside.
_ROUNDS = 3


@dataclass(frozen=True)
class Plan:
    """What is tried.

    Attributes:
        again: as in :class:`weft.inductor.comm.decisions.Decisions`.
        scale: how much larger than usual (:func:`weft.inductor.comm.buckets.usual_size`) buckets may get.
    """

    again: tuple[tuple[int, tuple[int, ...]], ...]
    scale: float


@dataclass(frozen=True)
class Trial:
    """A plan, and the seconds and bytes that were predicted for it; None where it did not fit."""

    plan: Plan
    seconds: float | None
    peak: int | None


@dataclass(eq=False)
class Schedule:
    """A step, scheduled.

    Attributes:
        step: the step, its nodes in order of issue.
        decisions: what made it from the step as it was.
        simulation: its prediction, its collectives carried by their transports as where all ranks reach each other.
        buckets: its collectives, with the numbers that decided about them.
        limit: bytes that it had to stay within, where that is known.
        trials: the plans that were tried.
        warnings: what users have to know of it.
    """

    step: StepGraph
    decisions: Decisions
    simulation: Simulation
    buckets: list[BucketReport]
    limit: int | None
    trials: list[Trial] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def schedule(
    step: StepGraph,
    cluster: Cluster,
    memory_limit: int | None = None,
    *,
    keep_bits: bool = False,
    apart: Collection[str] = (),
) -> Schedule:
    """Schedule a step whose kernels are made; ``step`` stays as it is.

    Args:
        apart: groups whose ranks share no memory; those of others are taken to.
        keep_bits: merge no collectives whose results could depend on what they are merged with.
        memory_limit: bytes that a rank may hold at once, the step's inputs included. By default nine tenths of the
            memory of the cluster's GPU; a step that does not fit into them is scheduled as it stands, with a warning.

    Raises:
        MemoryLimitUnreachable: no plan fits ``memory_limit``.
        GroupGone, CannotCarry, LinkMissing: see :func:`weft.inductor.comm.build.build`.
    """
    started = time.perf_counter()
    with torch_adapter.only_mode():  # in a fake world too, numbers are numbers
        planner = _Planner(step, cluster, memory_limit, keep_bits, apart)
        found = planner.best()
    tell(found.warnings)
    log.debug("scheduled %d nodes in %.2f s, by %d plans", len(step), time.perf_counter() - started, len(found.trials))
    tables.log_schedule(found)
    return found


def tell(warnings: Sequence[str]) -> None:
    """Warn of what users have to know of a schedule."""
    for line in warnings:
        log.warning("%s", line)


def follow(step: StepGraph, cluster: Cluster, decisions: Decisions, memory_limit: int | None = None) -> Schedule:
    """The schedule of ``step``, which stays as it is, by decisions that were made for an equal graph.

    Raises:
        MalformedGraph: they were made for another graph.
    """
    with torch_adapter.only_mode():
        step = apply(step, decisions)
        simulation, nodes = _issued(step.copy(), cluster, ComputeCosts(cluster.gpu))
        return Schedule(step, decisions, simulation, _reports(step, cluster, simulation, nodes), memory_limit)


@dataclass(eq=False)
class _Draft:
    """A plan carried out, but for the order.

    Attributes:
        step: what the plan makes of the step.
        buckets: as in :class:`weft.inductor.comm.decisions.Decisions`.
        problem, nodes: of ``step``, as if a library carried all of its collectives.
    """

    plan: Plan
    step: StepGraph
    buckets: tuple[tuple[int, ...], ...]
    problem: Problem
    nodes: list[Node]


@dataclass(eq=False)
class _Attempt:
    """A draft in order, and what happens then, see :func:`_issued`."""

    draft: _Draft
    order: list[int]
    simulation: Simulation
    nodes: list[Node]


class _Planner:
    def __init__(
        self, step: StepGraph, cluster: Cluster, limit: int | None, keep_bits: bool, apart: Collection[str] = ()
    ) -> None:
        self.step = step
        self.cluster = cluster
        self.may = {"keep_bits": keep_bits, "apart": apart}
        self.keep_bits = keep_bits
        self.asked = limit
        self.limit = int(cluster.gpu.memory * _USABLE) if limit is None else limit
        self.costs = _Remembered(cluster.gpu)
        self.trials: list[Trial] = []
        self.warnings: list[str] = []
        self.excess = 0  # bytes that the last plan needed more than there are
        self.uncounted = 0  # bytes that the last order held more than were counted when it was found
        self.least: _Attempt | None = None  # that of the lowest peak, whatever time it takes
        self.by_peers: list[str] = []  # what carried over peers last
        self.refused: list[str] = []  # what may not
        whole = step.copy()
        values = gather_once(whole)
        ahead = [usual for of, _, _, usual in self.priced(whole) if of[0].early]
        self.reserve = int(max((size for size in ahead if size < math.inf), default=0))  # gathered for later
        problem, nodes = build(whole, cluster, self.costs)
        order = tightened(problem, precedence(problem))
        self.gaps = gaps(values, problem, nodes, order)
        self.memory = torch.tensor(simulate(problem, order).memory)

    def best(self) -> Schedule:
        """The fastest schedule of those tried; of those that are as fast the first, since no prediction is finer."""
        attempts = [self.fitting()]
        for scale in _SCALES[1 : 1 + _NODES // len(self.step)]:
            attempt = self.attempt(replace(attempts[0].draft.plan, scale=scale))
            attempts += [attempt] if attempt is not None else []
        slowest = min(attempt.simulation.seconds for attempt in attempts) * (1 + AS_FAST)
        found = next(attempt for attempt in attempts if attempt.simulation.seconds <= slowest)
        draft = found.draft
        carriers = tuple((at, node.meta["transport"]) for at, node in enumerate(draft.nodes) if is_collective(node))
        decisions = Decisions(draft.plan.again, draft.buckets, tuple(found.order), carriers)
        reorder(draft.step, [draft.nodes[at] for at in found.order])
        reports = _reports(draft.step, self.cluster, found.simulation, found.nodes)
        return Schedule(draft.step, decisions, found.simulation, reports, self.limit, self.trials, self.warnings)

    def fitting(self) -> _Attempt:
        """The plan that keeps most of those that fit; where none fits that nobody asked for, the one that needs least.

        Raises:
            MemoryLimitUnreachable: none fits.
        """
        while (found := self.keeping_most()) is None and self.by_peers:
            # What lies in the memory of peers is there all the time: results above all, which are held for long.
            longest = any(map(lies_in_arena, self.by_peers))
            self.refused = [name for name in allowed_transports(self.cluster) if lies_in_arena(name) or not longest]
            names = ", ".join(name for name in self.by_peers if name in self.refused)
            self.warnings.append(f"no schedule with {names} fits {self.limit:,} bytes: others carry collectives")
        found = found or self.least
        assert found is not None
        if found.simulation.peak <= self.limit:
            return found
        error = unreachable(found.simulation, self.limit)
        if self.asked is not None:
            raise error
        self.warnings.append(f"the step may need more memory than the GPU has: {error}")
        self.limit = error.peak
        return self.attempt(found.draft.plan) or found

    def keeping_most(self) -> _Attempt | None:
        """The plan that keeps most of those that fit, None where none does."""
        target, tried = self.limit, None
        if (plan := self.plan(target)) is not None and plan.again:
            plan = self.plan(target := target - self.reserve)
        while plan is not None:
            if plan != tried and (found := self.attempt(plan)) is not None:
                return found
            tried, target = plan, target - max(self.excess, 0) - self.limit // 128
            plan = self.plan(target)
        everything = Plan(self.again(0)[0], _SCALES[0])
        found = self.attempt(everything) if everything != tried else None
        return found or self.attempt(replace(everything, scale=0.0), last=True)

    def plan(self, target: int) -> Plan | None:
        """The plan that keeps most of what lets the step fit into ``target`` bytes, as far as the little that its order
        needs tells; None where no plan does."""
        again, fits = self.again(target)
        return Plan(again, _SCALES[0]) if fits else None

    def again(self, target: int) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], bool]:
        """What to gather again for ``target`` bytes, and whether these are reached."""
        memory = self.memory.clone()
        uses: dict[int, list[int]] = {}
        for gap in let_go(self.gaps, memory, target):
            uses.setdefault(gap.value, []).append(gap.use)
        return tuple((value, tuple(sorted(uses[value]))) for value in sorted(uses)), int(memory.max()) <= target

    def attempt(self, plan: Plan, *, last: bool = False) -> _Attempt | None:
        """Carry out a plan; None where no order of it fits that is easily found; for the ``last`` plan, that is sought
        longer, and the order that needs least is kept."""
        found = self.ordered(self.draft(plan), last)
        self.trials.append(
            Trial(plan, None, None) if found is None else Trial(plan, found.simulation.seconds, found.simulation.peak)
        )
        return found

    def draft(self, plan: Plan) -> _Draft:
        """Carry out a plan, but for the order."""
        step = regather(self.step.copy(), plan.again)
        buckets = [bucket for bucket in self.buckets(step, plan.scale) if len(bucket) > 1]
        place = {node: at for at, node in enumerate(step.graph.nodes)}
        places = tuple(tuple(place[member.start] for member in bucket) for bucket in buckets)
        choose_transports(split_updates(join(step, buckets)), self.cluster, without=self.refused, **self.may)
        names = dict.fromkeys(node.meta["transport"] for node in step.collectives())
        self.by_peers = [name for name in names if name != LIBRARY]
        return _Draft(plan, step, places, *build(step, self.cluster, _HandedOver(self.costs, step)))

    def ordered(self, draft: _Draft, last: bool) -> _Attempt | None:
        """A draft in an order within the limit, None where none is found."""
        problem = draft.problem
        frugal = tightened(problem, precedence(problem))
        counted = simulate(problem, frugal).peak
        if counted < _ROOMY * self.limit:  # an order that looks at no limit is found sooner, and most often within it
            found = self.issued(draft, overlap(problem))
            if found.simulation.peak <= self.limit:
                return found
        if last:
            least = self.issued(draft, frugal)
            self.least = min(self.least or least, least, key=lambda attempt: attempt.simulation.peak)
        self.excess = counted - self.limit
        if self.excess > 0 and not last:
            return None
        bound = self.limit if self.excess > 0 else max(counted, self.limit - self.uncounted)
        for _ in range(_ROUNDS):
            try:
                order = overlap(problem, bound)
            except MemoryLimitUnreachable:
                break
            found, own = self.issued(draft, order), simulate(problem, order).peak
            self.uncounted = found.simulation.peak - own
            self.excess = found.simulation.peak - self.limit
            if self.excess <= 0:
                return found
            if own <= counted:
                break
            bound = max(counted, own - self.excess)
        return None

    def issued(self, draft: _Draft, order: Sequence[int]) -> _Attempt:
        """What happens when the nodes of a draft are issued in an order, elements and waits together."""
        place = {node: at for at, node in enumerate(draft.nodes)}
        found = [place[node] for node in together(draft.nodes[task] for task in order)]
        step = draft.step.copy()
        nodes = list(step.graph.nodes)
        reorder(step, [nodes[at] for at in found])
        return _Attempt(draft, found, *_issued(step, self.cluster, self.costs))

    def buckets(self, step: StepGraph, scale: float) -> list[list[Member]]:
        """The collectives of a step, parted into buckets."""
        clock = [0.0, *accumulate(map(self.costs.seconds, step.graph.nodes))]
        buckets = []
        for sequence, sizes, price, usual in self.priced(step):
            buckets += partition(sequence, clock, sizes, price, scale * usual if scale else 0)
        return buckets

    def priced(self, step: StepGraph) -> Iterator[tuple[list[Member], list[int], Price, float]]:
        """The sequences that buckets are made of, with the bytes of their members, what calls of them take in a step,
        and how large calls usually are, by the transport that would carry all as one."""
        for sequence in sequences(step, keep_bits=self.keep_bits):
            sent = [collective_of(step, member.start) for member in sequence]
            sizes = [each.bytes for each in sent]
            names = carriers(step, self.cluster, sequence[0].start, without=self.refused, **self.may)
            most = cheapest(self.cluster, replace(sent[0], bytes=sum(sizes)), names)
            usual = usual_size(sizes, partial(_seconds, self.cluster, [most], sent[0]))
            yield sequence, sizes, cache(partial(_seconds, self.cluster, names, sent[0])), usual


class _Remembered(ComputeCosts):
    """Prices nodes once, whichever copy of the graph they are in: copies have the name and the fake of the node."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self._known: dict[tuple[str, int], tuple[Any, float]] = {}

    def seconds(self, node: Node) -> float:
        val = node.meta.get("val")
        key = node.name, id(val)
        if key not in self._known:
            self._known[key] = val, super().seconds(node)  # its id is its own as long as it is held
        return self._known[key][1]


class _HandedOver(ComputeCosts):
    """What computation takes in a step whose collectives are still as a library would carry them: what is left of it
    where their transports do some on their way. Casts that are gone then would hide collectives that nothing hides."""

    def __init__(self, costs: ComputeCosts, step: StepGraph) -> None:
        super().__init__(costs.gpu)
        self._costs = costs
        handed = step.copy()
        hand_over(handed, _chosen(handed), LIBRARY, unreachable=_nobody_asks)
        self._left = {node.name: node for node in handed.graph.nodes}

    def seconds(self, node: Node) -> float:
        left = self._left.get(node.name)
        return 0.0 if left is None else self._costs.seconds(left)


def _chosen(step: StepGraph) -> dict[Node, str]:
    return {node: node.meta.get("transport", LIBRARY) for node in step.collectives()}


def _nobody_asks(step: StepGraph, node: Node) -> None:
    """What is predicted takes ranks to share memory."""


def _seconds(cluster: Cluster, names: Sequence[str], like: Collective, size: int, members: int) -> float:
    sent = replace(like, bytes=size, members=members)
    return _STANDS + transfer(cluster, sent, cheapest(cluster, sent, names)).seconds


def _issued(step: StepGraph, cluster: Cluster, costs: ComputeCosts) -> tuple[Simulation, list[Node]]:
    """What happens when a step is issued as its nodes stand, its collectives carried by their transports; and the nodes
    that the tasks of the simulation stand for, calls of transports among them. Changes ``step``."""
    for node, how in carry(step, _chosen(step), LIBRARY, unreachable=_nobody_asks).items():
        node.meta["transport"] = how.transport
    problem, nodes = build(step, cluster, costs)
    return simulate(problem), nodes


def _reports(step: StepGraph, cluster: Cluster, simulation: Simulation, nodes: Sequence[Node]) -> list[BucketReport]:
    """What a simulation says about each collective of ``step``; its tasks are ``nodes``."""
    reports = []
    for at, node in enumerate(nodes):
        if is_collective(node):
            sent = collective_of(step, node)
            reports.append(
                bucket_report(
                    simulation,
                    at,
                    kind=sent.kind,
                    group=sent.group,
                    members=node.meta["members"],
                    bytes=sent.bytes,
                    transport=node.meta.get("transport", LIBRARY),
                    why=_why(cluster, sent, node),
                )
            )
    return reports


def _why(cluster: Cluster, sent: Collective, node: Node) -> str:
    """What was gained by a bucket, and what in it is gathered again."""
    words = []
    if sent.members > 1:
        sizes = [tensor_bytes(val) or 0 for val in node.meta["val"]]
        alone = [replace(sent, bytes=sent.bytes * size // max(sum(sizes), 1), members=1) for size in sizes]
        saved = sum(transfer(cluster, each).seconds for each in alone) - transfer(cluster, sent).seconds
        words.append(f"one call saves {saved * 1e6:.0f} us")
    if again := node.meta.get("again", 0):
        words.append("gathered again" if again == sent.members else f"{again} gathered again")
    return ", ".join(words)
