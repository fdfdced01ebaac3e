"""From a StepGraph to a task graph: one task per node, in the order of the graph.

A task needs the operands of its node, and what any other order would break: an operation that writes to memory comes
after all readers of the old value; calls with effects and random draws keep their order; a call that orders the step
with outside streams keeps its place; inputs come first and the output last. Collectives keep no order among themselves:
ranks agree on the order that is chosen (:mod:`weft.inductor.schedule.agree_on_schedule`).

Transports over symmetric memory may already be applied to the graph
(:mod:`weft.inductor.transports.apply_transports`). Values in the symmetric arena are then no storages of the task
graph, because the arena is allocated before the step and stays after it.
"""

from __future__ import annotations

import dataclasses
import operator

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_ordered, is_wait
from weft.capture.record.streams import StreamCall
from weft.inductor.cost.cluster import Cluster, Gpu
from weft.inductor.cost.collective_cost import collective_of, transfer
from weft.inductor.cost.compute_cost import ComputeCosts
from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.host_scalars import on_host
from weft.inductor.graph.liveness import Liveness, LiveRange, liveness
from weft.inductor.lowering.lower import device_kind
from weft.inductor.transports.arena_layout import shared_bytes
from weft.inductor.transports.peer_calls import PeerCall, arena_tensors_of
from weft.transport_rows import LIBRARY

Node = torch.fx.Node


@torch_adapter.only_mode()  # the dispatch mode of a fake world makes every access to a fake tensor slow
def build(
    step: StepGraph, cluster: Cluster, costs: ComputeCosts | None = None, memory: Liveness | None = None
) -> tuple[TaskGraph, list[Node]]:
    """The task graph of ``step`` on ``cluster``, and the node of each task.

    Storages are those of :mod:`weft.inductor.graph.liveness`, so in the order of the graph both give the same memory
    over time. Takes time linear in the nodes and their operands.

    Args:
        costs: of computation; default: estimates for the cluster's GPU.
        memory: the liveness of ``step``, where the caller has it.

    Raises:
        GroupGone: this process has no such process group.
        CannotCarry, LinkMissing: see :func:`weft.inductor.cost.collective_cost.transfer`.
    """
    builder = _TaskGraphBuilder(step, cluster, costs or ComputeCosts(gpu_in(step, cluster)), memory or liveness(step))
    # In the order of the nodes: what a task needs follows from who has read and written before it.
    tasks = [builder.task(at, node) for at, node in enumerate(builder.nodes)]
    aside = set_aside(step)
    return TaskGraph(tasks, builder.storages(), builder.inputs() + aside, aside), builder.nodes


def gpu_in(step: StepGraph, cluster: Cluster) -> Gpu:
    """The GPU as it computes in a step: in one that communicates, at the clock that is left beside transfers."""
    gpu, part = cluster.gpu, cluster.gpu.clock_beside_links
    if part == 1 or not _communicates(step):
        return gpu
    return dataclasses.replace(
        gpu,
        matmul={dtype: rate * part for dtype, rate in gpu.matmul.items()},
        attention_forward=gpu.attention_forward * part,
        attention_backward=gpu.attention_backward * part,
    )


def _communicates(step: StepGraph) -> bool:
    """Whether a step has a collective of several ranks."""
    return any(len(collective_of(step, node).ranks) > 1 for node in step.graph.nodes if is_collective(node))


def set_aside(step: StepGraph) -> int:
    """Bytes that the symmetric-memory transports of a step keep all the time; 0 if none is applied yet.

    They are the symmetric arena, and staging buffers (of ``copy_sum``). The collectives of one transport share a
    staging buffer, because their stream runs them one at a time; the largest counts.
    """
    staging: dict[str, int] = {}
    for node in step.graph.nodes:
        if isinstance(node.target, PeerCall):
            name, size = node.target.transport, node.target.staging_bytes(arena_tensors_of(node))
            staging[name] = max(staging.get(name, 0), size)
    return shared_bytes(step) + sum(staging.values())


class _TaskGraphBuilder:
    """Builds the tasks of a step in the order of its nodes."""

    def __init__(self, step: StepGraph, cluster: Cluster, costs: ComputeCosts, memory: Liveness) -> None:
        self.step = step
        self.cluster = cluster
        self.costs = costs
        self.nodes = memory.order
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self.on_gpu = device_kind(self.nodes) == "cuda"
        self.memory = memory
        self.users: dict[LiveRange, dict[int, None]] = {live_range: {} for live_range in self.memory.ranges}
        self.since_written: dict[LiveRange, list[int]] = {live_range: [] for live_range in self.memory.ranges}
        self.collectives: dict[Node, Node] = {}  # by result element or wait of a collective: its start
        self.fence: int | None = None  # every later task depends on it, directly or not
        self.sinks: dict[int, None] = {}  # tasks since the fence that no task needs so far

    def task(self, at: int, node: Node) -> Task:
        """The task of node number ``at``. Must be called once per node, in order."""
        kind, written = self._kind(node), self._written(node)
        task = Task(node.name, kind, self._needs(at, node, written), pinned=is_ordered(node))
        self._note_users(at, node, kind, written)
        if kind is Kind.COMPUTE:
            task.seconds = self.costs.seconds(node)
        elif kind is Kind.START:
            collective = collective_of(self.step, node)
            cost = transfer(self.cluster, collective, node.meta.get("transport", LIBRARY))
            task.seconds, task.stream = cost.seconds, cost.stream
            task.link, task.interference = cost.link, cost.interference
        return task

    def _kind(self, node: Node) -> Kind:
        if is_collective(node):
            self.collectives[node] = node
            return Kind.START
        waits = is_wait(node)
        # Through elements of a coalesced result, so that its waits are WAITs of the one START.
        if waits or node.target is operator.getitem:
            start = self.collectives.get(node.args[0])  # type: ignore[arg-type]
            if start is not None:
                self.collectives[node] = start
                return Kind.WAIT if waits else Kind.NO_TIME
        if self.costs.is_free(node):
            return Kind.NO_TIME
        # In a step on the GPU, nodes on CPU scalars run on the host, ahead of the compute stream.
        return Kind.NO_TIME if self.on_gpu and on_host(node) else Kind.COMPUTE

    # ---- order

    def _needs(self, at: int, node: Node, written: list[LiveRange]) -> tuple[int, ...]:
        # Operands first: `TaskGraph.start_of` follows the first need of a WAIT.
        needs = dict.fromkeys(map(self.place.__getitem__, node.all_input_nodes))
        for live_range in written:
            needs |= dict.fromkeys(self.since_written[live_range])  # write after read, write after write
        fences = _is_fence(node)
        # The needs of a fence reach every task before it through the sinks, and every later task reaches the fence.
        # Direct edges to all tasks would take quadratic time and memory.
        if fences:
            needs |= self.sinks
        # One edge is enough where no other need comes after the fence already.
        if self.fence is not None and max(needs, default=-1) < self.fence:
            needs[self.fence] = None
        sinks = self.sinks
        for need in needs:
            sinks.pop(need, None)
        sinks[at] = None
        if fences:
            self.fence = at
        return tuple(needs)

    def _written(self, node: Node) -> list[LiveRange]:
        """The storages that a node writes to without having allocated them."""
        if node.op != "call_function" or looks_into(node):
            return []
        return [live_range for live_range in self.memory.of[node] if live_range.maker is not node]

    # ---- memory

    def _note_users(self, at: int, node: Node, kind: Kind, written: list[LiveRange]) -> None:
        # A list element reads nothing: it would extend the live ranges of all tensors of a coalesced result.
        read = [] if node.target is operator.getitem else node.all_input_nodes
        # A collective reads its operands until its wait: nothing may overwrite them before.
        if kind is Kind.WAIT:
            read = [*read, *self.collectives[node].all_input_nodes]
        of, users, since_written = self.memory.of, self.users, self.since_written
        for used in read:
            for live_range in of[used]:
                users[live_range][at] = None
                since_written[live_range].append(at)
        # A write makes a new version: later writes come after this one and its readers.
        for live_range in written:
            since_written[live_range] = [at]
        for live_range in of.get(node, ()):
            users[live_range][at] = None

    def storages(self) -> list[Storage]:
        """The storages that tasks allocate, with their users."""
        output = len(self.nodes) - 1
        storages = []
        for live_range, users in self.users.items():
            if not live_range.is_input and live_range.size:
                maker = self.place[live_range.maker]
                # The output reads what the step leaves behind. That is live until the end, which `kept` says.
                readers = tuple(at for at in users if at not in (maker, output))
                storages.append(Storage(live_range.size, maker, readers, kept=output in users))
        return storages

    def inputs(self) -> int:
        """Bytes of the step's inputs."""
        return sum(each.size for each in self.memory.ranges if each.is_input)


def _is_fence(node: Node) -> bool:
    """Whether no task may be moved across a node: the last input, the output, and calls that order the step with
    outside streams."""
    op = node.op
    if op == "placeholder":
        return node.next.op != "placeholder"
    return op == "output" or bool(node.meta.get("fence")) or isinstance(node.target, StreamCall)
