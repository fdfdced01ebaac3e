"""What would change a predicted step: it is planned again with one change, or priced at other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from weft import torch_adapter
from weft.capture.node_kinds import group_of, is_collective
from weft.capture.step_interface import Role
from weft.errors import CannotCarry, LinkMissing, MemoryLimitUnreachable
from weft.inductor.cost.cluster import Cluster
from weft.inductor.cost.collective_cost import collective_of, transfer
from weft.inductor.cost.simulate import Simulation, simulate
from weft.inductor.cost.task_graph import Kind, TaskGraph
from weft.inductor.graph.collectives import ALL_GATHER, kind_of
from weft.inductor.schedule.schedule_result import Schedule
from weft.plan.plan import StepPlanner
from weft.plan.prediction import Change, Prediction, ScalingPoint
from weft.plan.questions import GATHERED_AGAIN, GATHERED_ONCE, HALF_BATCH, RECOMPUTED, TWICE_BATCH
from weft.transport_rows import LIBRARY

AGAIN, PRICED = "planned again", "same schedule, priced again"
MOST_RANKS = 16_384

_UNLIMITED = 2**50  # bytes
_RECOMPUTED_FRACTION = 0.75  # of the peak, that recomputation is asked to stay within

Report = Callable[[str], None]


def with_changes(
    planner: StepPlanner,
    found: Prediction,
    cluster: Cluster,
    limit: int | None,
    report: Report = lambda what: None,
    *,
    plans_again: bool = True,
) -> Prediction:
    """A prediction with its changes and its scaling curve.

    Args:
        planner: that made ``found``, in the same fake world.
        cluster, limit: what ``found`` was made for; the limit in bytes.
        report: called with the name of each change before it is planned.
        plans_again: whether to plan the step again for each change, which takes about as long as the first plan.
            Without it there are only changes that can be priced with the same schedule.
    """
    changes = []
    made = _changes if plans_again else _priced_changes
    for name, how, make in made(planner, found, cluster, limit):
        report(name)
        changes.append(_change(name, how, make))
    report("other numbers of GPUs")
    return replace(found, changes=changes, scaling=scaling(planner, found, cluster))


Numbers = tuple[float, float | None, int | None, float]
"""Seconds of a step, tokens a second, bytes at the peak, exposed seconds."""


def _change(name: str, how: str, make: Callable[[], Numbers]) -> Change:
    try:
        return Change(name, how, *make())
    except MemoryLimitUnreachable as error:
        return Change(name, how, None, None, None, None, str(error).partition(":")[0])


def _changes(
    planner: StepPlanner, found: Prediction, cluster: Cluster, limit: int | None
) -> Iterator[tuple[str, str, Callable[[], Numbers]]]:
    again = lambda cluster, limit: _numbers(found, planner.schedule(cluster, limit))
    if found.samples is not None:
        for name, batch in ((HALF_BATCH, found.samples // 2), (TWICE_BATCH, found.samples * 2)):
            if batch:
                yield name, AGAIN, lambda batch=batch: _rebatched(planner, found, cluster, batch)
    if any(each.kind == ALL_GATHER.kind.name for each in found.collectives):
        yield GATHERED_ONCE, AGAIN, lambda: again(cluster, _UNLIMITED)
        yield GATHERED_AGAIN, AGAIN, lambda: _least(planner, found, cluster)
    budget = int(found.peak_bytes * _RECOMPUTED_FRACTION)
    yield f"within {budget / 2**30:.1f} GiB, {RECOMPUTED}", AGAIN, lambda: again(cluster, budget)
    if found.collectives and found.world_size > cluster.gpus_per_node and cluster.network is not None:
        slower = replace(cluster, network=replace(cluster.network, bandwidth=cluster.network.bandwidth / 2))
        yield "half the network", AGAIN, lambda: again(slower, limit)
    if found.collectives:
        yield "twice the GPUs", PRICED, lambda: _numbers(found, _at(planner, cluster, 2 * found.world_size), None)


def _priced_changes(
    planner: StepPlanner, found: Prediction, cluster: Cluster, limit: int | None
) -> Iterator[tuple[str, str, Callable[[], Numbers]]]:
    if found.collectives and found.world_size > cluster.gpus_per_node and cluster.network is not None:
        slower = replace(cluster, network=replace(cluster.network, bandwidth=cluster.network.bandwidth / 2))
        yield "half the network", PRICED, lambda: _numbers(found, _at(planner, slower, found.world_size), None)
    if found.collectives:
        yield "twice the GPUs", PRICED, lambda: _numbers(found, _at(planner, cluster, 2 * found.world_size), None)


def _numbers(found: Prediction, made: Schedule | Simulation, peak: int | None = 0) -> Numbers:
    simulation = made.simulation if isinstance(made, Schedule) else made
    tokens = None if found.tokens is None else found.tokens / found.shared_by / simulation.seconds
    return simulation.seconds, tokens, None if peak is None else simulation.peak, simulation.exposed_seconds


def _rebatched(planner: StepPlanner, found: Prediction, cluster: Cluster, batch: int) -> Numbers:
    other = planner.rebatched(batch)
    changed = replace(found, tokens=None if found.tokens is None else found.tokens * batch // (found.samples or 1))
    return _numbers(changed, other.schedule(cluster))


def _least(planner: StepPlanner, found: Prediction, cluster: Cluster) -> Numbers:
    """The least memory of any schedule without recomputation."""
    return _numbers(found, planner.least_memory(cluster))


# ---- other numbers of ranks


def scaling(planner: StepPlanner, found: Prediction, cluster: Cluster) -> list[ScalingPoint]:
    """The step at other numbers of ranks: powers of two from one node to :data:`MOST_RANKS`."""
    points = []
    world = min(cluster.gpus_per_node, found.world_size)
    sizes = {found.world_size}
    while world <= max(MOST_RANKS, found.world_size):
        sizes.add(world)
        world *= 2
    for size in sorted(sizes):
        try:
            simulation = _at(planner, cluster, size)
        except LinkMissing:  # no network
            break
        except _NoSuchSize:
            continue
        seconds, tokens, _, exposed = _numbers(found, simulation)
        points.append(ScalingPoint(size, seconds, tokens, exposed / seconds if seconds else 0.0))
    return points if found.collectives else []


class _NoSuchSize(Exception):
    """The mesh of a step has no form at this number of ranks."""


def _at(planner: StepPlanner, cluster: Cluster, world_size: int) -> Simulation:
    """The planned schedule at another number of ranks: the outermost mesh axis grows or shrinks, with it what each rank
    has of parameters sharded over it, and the optimizer's part in the time."""
    schedule = planner.planned[cluster.name]
    simulation, nodes, step = schedule.simulation, schedule.nodes, schedule.step
    factor = world_size / torch_adapter.world_size()
    known: dict[str, tuple[int, ...]] = {}
    paths = frozenset(entry.path for entry in step.inputs if entry.role is Role.PARAMETER)
    shards = 1.0
    for node in nodes:
        if is_collective(node):
            axis, group = group_of(node), torch_adapter.group_ranks(step.groups[group_of(node)])
            if axis not in known:
                known[axis] = _scaled(group, factor)
            if kind_of(node).gathers and len(known[axis]) != len(group) and _moves_parameters(node, paths):
                shards = factor
    launch, tasks = cluster.gpu.launch_latency, []
    for task, node in zip(simulation.task_graph.tasks, nodes, strict=True):
        if task.kind is Kind.START:
            sent = replace(collective_of(step, node), ranks=known[group_of(node)])
            try:
                cost = transfer(cluster, sent, node.meta.get("transport", LIBRARY))
            except CannotCarry:  # it leaves the node now
                cost = transfer(cluster, sent, LIBRARY)
            task = replace(task, seconds=cost.seconds, link=cost.link, interference=cost.interference)
        elif task.kind is Kind.COMPUTE and node.meta.get("stage") == "optimizer":
            task = replace(task, seconds=launch + max(task.seconds - launch, 0.0) / shards)
        tasks.append(task)
    task_graph = simulation.task_graph
    return simulate(TaskGraph(tasks, task_graph.storages, task_graph.base, task_graph.set_aside), simulation.order)


def _moves_parameters(node: torch.fx.Node, paths: frozenset[str]) -> bool:
    return not paths.isdisjoint(node.meta.get("param_names", ()))


def _scaled(ranks: tuple[int, ...], factor: float) -> tuple[int, ...]:
    """The ranks of a group in a world that is larger by ``factor``: more of them where the group spans the world.

    Raises:
        _NoSuchSize: it would have no whole number of ranks.
    """
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) * stride < torch_adapter.world_size():
        return ranks
    count = len(ranks) * factor
    if count < 1 or count != int(count):
        raise _NoSuchSize
    return tuple(range(ranks[0], ranks[0] + int(count) * stride, stride))
