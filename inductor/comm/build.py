"""From a graph to a scheduling problem: one task a node, in the order of the graph.

What a task needs is what its node reads, and what keeps the step as it is: whoever writes over memory comes after all
that read what was there; calls with effects and random numbers keep their order; a call that orders the step with
streams outside stays where it is in it; inputs come first and the outputs last. Collectives keep no order among
themselves, since the order that is chosen follows from the graph alone, and so is the same on all ranks.

The graph may be one whose collectives are calls over peers, laid out (:mod:`weft.inductor.comm.carry`). What lies in
memory that ranks share is no storage then: that memory is there before the step and after it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph, is_collective, is_effect, is_wait
from weft.capture.streams import FENCE, StreamCall
from weft.inductor.comm.cluster import Cluster
from weft.inductor.comm.collective_cost import collective_of, transfer
from weft.inductor.comm.compute_cost import ComputeCosts, is_free
from weft.inductor.comm.layout import shared_bytes
from weft.inductor.comm.problem import Kind, Problem, Storage, Task
from weft.inductor.comm.transports import LIBRARIES, CopySumReduceScatter, members_of
from weft.inductor.liveness import BLOCK, LiveRange, liveness
from weft.inductor.lower import device_kind
from weft.inductor.passes.host import tensors_of
from weft.inductor.passes.wire_dtype import WIDENING, WIDENING_COALESCED
from weft.inductor.runtime.geometry import looks_into

Node = torch.fx.Node


@torch_adapter.only_mode()  # that of a fake world makes every look at a fake slow
def build(step: StepGraph, cluster: Cluster, costs: ComputeCosts | None = None) -> tuple[Problem, list[Node]]:
    """The problem of scheduling ``step`` on ``cluster``, and the nodes that its tasks stand for: those of the graph.

    Storages are those of :mod:`weft.inductor.liveness`, so in the order of the graph they hold what it says. Takes time
    linear in the nodes and what they read.

    Args:
        costs: of computation; by default as the cluster's GPU computes.

    Raises:
        GroupGone: this process has no such process group.
        CannotCarry, LinkMissing: see :func:`weft.inductor.comm.collective_cost.transfer`.
    """
    builder = _Builder(step, cluster, costs or ComputeCosts(cluster.gpu))
    tasks = [builder.task(at, node) for at, node in enumerate(builder.nodes)]
    aside = set_aside(step)
    return Problem(tasks, builder.storages(), builder.inputs() + aside, aside), builder.nodes


def set_aside(step: StepGraph) -> int:
    """Bytes that a step's collectives over peers have all the time: the memory that ranks share, and that which
    ``copy_sum`` copies into, one for all of a step. 0 where no collective is such a call yet."""
    landings = (
        node.target.landed_bytes(members_of(node))
        for node in step.graph.nodes
        if isinstance(node.target, CopySumReduceScatter)
    )
    return shared_bytes(step) + max(landings, default=0)


class _Builder:
    """Makes the tasks of a step one after the other."""

    def __init__(self, step: StepGraph, cluster: Cluster, costs: ComputeCosts) -> None:
        self.step = step
        self.cluster = cluster
        self.costs = costs
        self.nodes = list(step.graph.nodes)
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self.on_gpu = device_kind(self.nodes) == "cuda"
        self.memory = liveness(step, self.nodes)
        self.users: dict[LiveRange, dict[int, None]] = {found: {} for found in self.memory.ranges}
        self.since_written: dict[LiveRange, list[int]] = {found: [] for found in self.memory.ranges}
        self.collectives: dict[Node, Node] = {}  # of an element of what a collective gives, or of a wait for it
        self.fence: int | None = None  # needed by all that follows
        self.sinks: dict[int, None] = {}  # tasks since the fence that none needs so far

    def task(self, at: int, node: Node) -> Task:
        """The task of node number ``at``; called for each node in turn."""
        kind = self._kind(node)
        task = Task(node.name, kind, self._needs(at, node), pinned=_is_pinned(node))
        self._note_users(at, node)
        if kind is Kind.COMPUTE:
            task.seconds = self.costs.seconds(node)
        elif kind is Kind.START:
            collective = collective_of(self.step, node, self.costs.unbacked)
            made = transfer(self.cluster, collective, node.meta.get("transport", "nccl"))
            task.seconds, task.lane = made.seconds, made.lane
            task.link, task.interference = made.link, made.interference
        return task

    def _kind(self, node: Node) -> Kind:
        if is_collective(node):
            self.collectives[node] = node
            return Kind.START
        given = node.args[0] if node.args else None
        if given in self.collectives and (is_wait(node) or node.target is operator.getitem):
            self.collectives[node] = self.collectives[given]
            return Kind.WAIT if is_wait(node) else Kind.FREE
        on_host = self.on_gpu and not any(tensor.is_cuda for tensor in tensors_of(node))
        return Kind.FREE if on_host or is_free(node) else Kind.COMPUTE

    # ---- order

    def _needs(self, at: int, node: Node) -> tuple[int, ...]:
        needs = dict.fromkeys(self.place[used] for used in node.all_input_nodes)
        for written in self._written(node):
            needs |= dict.fromkeys(self.since_written[written])
        fences = _is_fence(node)
        if fences:
            needs |= self.sinks
        if self.fence is not None and all(need < self.fence for need in needs):
            needs[self.fence] = None
        for need in needs:
            self.sinks.pop(need, None)
        self.sinks[at] = None
        if fences:
            self.fence = at
        return tuple(needs)

    def _written(self, node: Node) -> list[LiveRange]:
        """The storages that a node writes to and has not made."""
        if node.op != "call_function" or looks_into(node):
            return []
        return [found for found in self.memory.of[node] if found.maker is not node]

    # ---- memory

    def _note_users(self, at: int, node: Node) -> None:
        read = [] if node.target is operator.getitem else node.all_input_nodes
        if is_wait(node) and node in self.collectives:
            read = [*read, *self.collectives[node].all_input_nodes]
        for used in read:
            for found in self.memory.of[used]:
                self.users[found][at] = None
                self.since_written[found].append(at)
        for written in self._written(node):
            self.since_written[written] = [at]
        for found in self.memory.of.get(node, ()):
            self.users[found][at] = None

    def storages(self) -> list[Storage]:
        """All that the tasks make."""
        output = len(self.nodes) - 1
        found = []
        for each, users in self.users.items():
            if not each.is_input and each.size:
                maker = self.place[each.maker]
                readers = tuple(at for at in users if at not in (maker, output))
                found.append(Storage(each.size, maker, readers, kept=output in users))
        widens = (at for at, node in enumerate(self.nodes) if node.target in (WIDENING, WIDENING_COALESCED))
        return found + [Storage(_widened(self.nodes[at]), at) for at in widens if self._by_library(self.nodes[at])]

    def _by_library(self, node: Node) -> bool:
        return node.meta.get("transport", LIBRARIES[0]) in LIBRARIES

    def inputs(self) -> int:
        """Bytes of the inputs."""
        return sum(each.size for each in self.memory.ranges if each.is_input)


def _widened(node: Node) -> int:
    """Bytes that the casts which a library has to be handed are larger than what they are made of and take the place
    of, see :mod:`weft.inductor.passes.wire_dtype`."""
    dtype: Any = node.args[-1]
    given = [val for used in node.all_input_nodes for val in tensors_of(used)]
    more = ((torch_adapter.hint(val.numel()) or 0) * (dtype.itemsize - val.dtype.itemsize) for val in given)
    return sum(-(-size // BLOCK) * BLOCK for size in more)


def _is_pinned(node: Node) -> bool:
    return is_effect(node) and not is_collective(node) and not is_wait(node)


def _is_fence(node: Node) -> bool:
    """Whether all before a node comes before it, and all after it after it: the last of the inputs, the output, calls
    that order the step with streams outside it."""
    if node.op == "placeholder":
        return node.next.op != "placeholder"
    return node.op == "output" or bool(node.meta.get(FENCE)) or isinstance(node.target, StreamCall)
