"""The schedule of a step: what stays gathered, what is merged, and the order in which everything is issued.

A small family of plans is tried. A plan says which gathered values are let go of and gathered again
(:mod:`weft.inductor.comm.reshard`) and how large buckets may get (:mod:`weft.inductor.comm.buckets`). The graph is
rewritten by the plan, priced (:mod:`weft.inductor.comm.build`), put into an order within the memory there is
(:mod:`weft.inductor.comm.overlap`) and run by the simulator; the fastest that fits is taken.

To gather again costs communication, so as much is kept as fits. What is let go of first is what is held longest for a
second of communication: the parameters of the first layers, which backward needs last. How much has to go is read off
the memory of the step in the order of its graph, and tried: where no order of it fits, more goes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
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
from weft.inductor.comm.choose import choose_transports
from weft.inductor.comm.cluster import Cluster, Gpu
from weft.inductor.comm.collective_cost import Collective, collective_of, transfer
from weft.inductor.comm.compute_cost import ComputeCosts
from weft.inductor.comm.decisions import Decisions, apply, regather
from weft.inductor.comm.frugal import tightened
from weft.inductor.comm.overlap import overlap
from weft.inductor.comm.precedence import precedence
from weft.inductor.comm.problem import Problem
from weft.inductor.comm.reshard import gaps, gather_once, let_go
from weft.inductor.comm.simulate import Simulation, simulate
from weft.inductor.comm.tables import BucketReport, bucket_report
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
        simulation: its prediction.
        buckets: its collectives, with the numbers that decided about them.
        limit: bytes that it had to stay within, where that is known.
        trials: the plans that were tried.
    """

    step: StepGraph
    decisions: Decisions
    simulation: Simulation
    buckets: list[BucketReport]
    limit: int | None
    trials: list[Trial] = field(default_factory=list)


def schedule(
    step: StepGraph, cluster: Cluster, memory_limit: int | None = None, *, keep_bits: bool = False
) -> Schedule:
    """Schedule a step whose kernels are made; ``step`` stays as it is.

    Args:
        keep_bits: merge no collectives whose results could depend on what they are merged with.
        memory_limit: bytes that a rank may hold at once, the step's inputs included. By default nine tenths of the
            memory of the cluster's GPU; a step that does not fit into them is scheduled as it stands, with a warning.

    Raises:
        MemoryLimitUnreachable: no plan fits ``memory_limit``.
        GroupGone, CannotCarry, LinkMissing: see :func:`weft.inductor.comm.build.build`.
    """
    started = time.perf_counter()
    with torch_adapter.only_mode():  # in a fake world too, numbers are numbers
        found = _Planner(step, cluster, memory_limit, keep_bits).best()
    log.debug("scheduled %d nodes in %.2f s, by %d plans", len(step), time.perf_counter() - started, len(found.trials))
    tables.log_schedule(found)
    return found


def follow(step: StepGraph, cluster: Cluster, decisions: Decisions, memory_limit: int | None = None) -> Schedule:
    """The schedule of ``step``, which stays as it is, by decisions that were made for an equal graph.

    Raises:
        MalformedGraph: they were made for another graph.
    """
    with torch_adapter.only_mode():
        return _predicted(apply(step, decisions), decisions, cluster, ComputeCosts(cluster.gpu), memory_limit)


@dataclass(eq=False)
class _Attempt:
    """A plan carried out."""

    plan: Plan
    step: StepGraph
    buckets: tuple[tuple[int, ...], ...]
    order: list[int]
    simulation: Simulation


class _Planner:
    def __init__(self, step: StepGraph, cluster: Cluster, limit: int | None, keep_bits: bool) -> None:
        self.step = step
        self.cluster = cluster
        self.keep_bits = keep_bits
        self.asked = limit
        self.limit = int(cluster.gpu.memory * _USABLE) if limit is None else limit
        self.costs = _Remembered(cluster.gpu)
        self.trials: list[Trial] = []
        self.excess = 0  # bytes that the last plan needed more than there are
        whole = step.copy()
        values = gather_once(whole)
        ahead = [usual_size(sizes, price) for of, sizes, price in self.priced(whole) if of[0].early]
        self.reserve = int(max((size for size in ahead if size < math.inf), default=0))  # gathered for later
        problem, nodes = build(whole, cluster, self.costs)
        order = tightened(problem, precedence(problem))
        self.gaps = gaps(values, problem, nodes, order)
        self.memory = torch.tensor(simulate(problem, order).memory)

    def best(self) -> Schedule:
        """The fastest schedule of those tried; of equally fast ones that of the lower peak."""
        attempts = [self.fitting()]
        for scale in _SCALES[1 : 1 + _NODES // len(self.step)]:
            attempt = self.attempt(replace(attempts[0].plan, scale=scale))
            attempts += [attempt] if attempt is not None else []
        found = min(attempts, key=lambda attempt: (attempt.simulation.seconds, attempt.simulation.peak))
        nodes = list(found.step.graph.nodes)
        carriers = tuple((at, node.meta["transport"]) for at, node in enumerate(nodes) if is_collective(node))
        decisions = Decisions(found.plan.again, found.buckets, tuple(found.order), carriers)
        reorder(found.step, [nodes[at] for at in found.order])
        return _predicted(found.step, decisions, self.cluster, self.costs, self.limit, self.trials)

    def fitting(self) -> _Attempt:
        """The plan that keeps most of those that fit; where none fits that nobody asked for, the one that needs least.

        Raises:
            MemoryLimitUnreachable: none fits.
        """
        target = self.limit
        if (plan := self.plan(target)) is not None and plan.again:
            plan = self.plan(target := target - self.reserve)
        while plan is not None:
            if (found := self.attempt(plan)) is not None:
                return found
            plan = self.plan(target := target - self.excess - self.limit // 128)
        everything = Plan(self.again(0)[0], _SCALES[0])
        found = self.attempt(everything) or self.attempt(replace(everything, scale=0.0), last=True)
        assert found is not None
        return found

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
        """Carry out a plan; None where no order of it fits that is easily found, and it is not the last."""
        step = regather(self.step.copy(), plan.again)
        buckets = [bucket for bucket in self.buckets(step, plan.scale) if len(bucket) > 1]
        place = {node: at for at, node in enumerate(step.graph.nodes)}
        places = tuple(tuple(place[member.start] for member in bucket) for bucket in buckets)
        problem, nodes = build(self.carried(join(step, buckets)), self.cluster, self.costs)
        self.excess = simulate(problem, tightened(problem, precedence(problem))).peak - self.limit
        if self.excess > 0 and not last:
            self.trials.append(Trial(plan, None, None))
            return None
        roomy = self.limit + self.excess < _ROOMY * self.limit
        chosen = self.order(problem, roomy)
        place = {node: at for at, node in enumerate(nodes)}
        order = [place[node] for node in together(nodes[task] for task in chosen)]
        simulation = simulate(problem, order)
        self.trials.append(Trial(plan, simulation.seconds, simulation.peak))
        return _Attempt(plan, step, places, order, simulation)

    def carried(self, step: StepGraph) -> StepGraph:
        """``step`` with a transport for every collective."""
        return choose_transports(step, self.cluster, keep_bits=self.keep_bits)

    def order(self, problem: Problem, roomy: bool) -> list[int]:
        """The order of a problem within the limit, or if nobody asked for that, as near to it as there is."""
        if roomy:  # an order that looks at no limit is found sooner, and most often within it
            order = overlap(problem)
            if simulate(problem, order).peak <= self.limit:
                return order
        try:
            return overlap(problem, self.limit)
        except MemoryLimitUnreachable as error:
            if self.asked is not None:
                raise
            log.warning("the step may need more memory than the GPU has: %s", error)
            self.limit = error.peak
            return overlap(problem, self.limit)

    def buckets(self, step: StepGraph, scale: float) -> list[list[Member]]:
        """The collectives of a step, parted into buckets."""
        clock = [0.0, *accumulate(map(self.costs.seconds, step.graph.nodes))]
        buckets = []
        for sequence, sizes, price in self.priced(step):
            buckets += partition(sequence, clock, sizes, price, int(scale * usual_size(sizes, price)))
        return buckets

    def priced(self, step: StepGraph) -> Iterator[tuple[list[Member], list[int], Price]]:
        """The sequences that buckets are made of, with the bytes of their members and what calls of them take."""
        for sequence in sequences(step, keep_bits=self.keep_bits):
            sent = [collective_of(step, member.start) for member in sequence]
            yield sequence, [each.bytes for each in sent], cache(partial(_seconds, self.cluster, sent[0]))


class _Remembered(ComputeCosts):
    """Prices nodes once, whichever copy of the graph they are in."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self._known: dict[tuple[str, Any], float] = {}

    def seconds(self, node: Node) -> float:
        key = node.name, node.target
        if key not in self._known:
            self._known[key] = super().seconds(node)
        return self._known[key]


def _seconds(cluster: Cluster, like: Collective, size: int, members: int) -> float:
    return transfer(cluster, replace(like, bytes=size, members=members)).seconds


def _predicted(
    step: StepGraph,
    decisions: Decisions,
    cluster: Cluster,
    costs: ComputeCosts,
    limit: int | None,
    trials: Sequence[Trial] = (),
) -> Schedule:
    """The schedule that a step is whose nodes stand in order of issue."""
    problem, nodes = build(step, cluster, costs)
    simulation = simulate(problem)
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
                    transport=problem.tasks[at].lane.partition(":")[0],
                    why=_why(cluster, sent, node),
                )
            )
    return Schedule(step, decisions, simulation, reports, limit, list(trials))


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
