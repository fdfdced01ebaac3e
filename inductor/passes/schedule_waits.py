"""Collectives are started early and waited for late, by rules that need no cost model.

The nodes of a graph stand in the order in which they are issued. This pass finds an order that data dependences allow.
Random operations and calls with effects keep their order. Every decision follows from the graph alone, so all ranks
issue their collectives in the same order.

On CPUs, and on GPUs without a description of the cluster, this is the order in which a step runs, if all ranks come to
the same collectives. If they do not, the collectives run in the order in which they were captured. With a description
this is the order from which :mod:`weft.inductor.schedule.planner` starts: it says when operands are ready and results
are needed.

Keeps the bits of every result.
"""

from __future__ import annotations

import operator
from collections import deque

import torch

from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, is_collective
from weft.capture.record.streams import StreamCall
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.collectives import collective_op
from weft.inductor.graph.node_order import reorder, start_of, waits_of
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.graph.sizes import node_bytes
from weft.inductor.lowering.lower import device_kind
from weft.inductor.passes.gather_inputs import from_placeholders, is_gather

Node = torch.fx.Node

# Prefetched bytes on GPUs: the default of the knob `prefetch_mib`, which is for CPUs. Where there is a description of
# the cluster the planner decides how much is prefetched, and must not come to another schedule because of that knob.
# A choice.
_GPU_PREFETCH_BYTES = 1 << 30


@keeps_bits
def schedule_waits(step: StepGraph, prefetch_bytes: int | None = None) -> StepGraph:
    """Put the nodes of the graph into the order of :func:`issue_order`. Changes ``step``."""
    reorder(step, issue_order(step, prefetch_bytes))
    return step


def issue_order(step: StepGraph, prefetch_bytes: int | None = None) -> list[Node]:
    """All nodes of the graph, in the order to issue them.

    - A wait, and the views of what it returns, come just before their first real use.
    - An all-gather whose input comes from placeholders by casts, padding and views only is started ahead of
      its place while no more than ``prefetch_bytes`` of gathered results are started and not yet waited for.
    - Collectives of rows with ``waited_early`` are waited for, oldest first, when their inputs exceed
      ``prefetch_bytes``: communication holds its inputs until then.
    - Before a call that orders the step with streams outside it, everything issued so far is waited for.
    - Elements are picked from a list right after it is made, so that the list can go.

    Args:
        prefetch_bytes: bytes (default: the knob ``prefetch_mib`` on CPUs, 1 GiB on GPUs); with 0 every collective
            starts where it stood.
    """
    if prefetch_bytes is None:
        on_cpu = device_kind(step.graph.nodes) == "cpu"
        prefetch_bytes = knobs.prefetch_mib << 20 if on_cpu else _GPU_PREFETCH_BYTES
    return _WaitScheduler(step, prefetch_bytes).run()


class _WaitScheduler:
    def __init__(self, step: StepGraph, limit: int) -> None:
        self.nodes = list(step.graph.nodes)
        self.limit = limit
        self.order: list[Node] = []
        self.done: set[Node] = set()
        self.deferred: dict[Node, None] = {}
        self.gathered = 0
        self.consumed = 0
        self.unwaited: deque[Node] = deque()
        self.ahead = deque(node for node in self.nodes if is_gather(node) and from_placeholders(node))

    def run(self) -> list[Node]:
        for node in self.nodes:
            # Fences order the step after work on side streams, so they come before everything.
            if node.op == "placeholder" or node.meta.get("fence"):
                self._append(node)
        self._start_ahead()
        for node in self.nodes:
            if node in self.done:
                continue
            if node.op == "output" or isinstance(node.target, StreamCall):
                for late in list(self.deferred):
                    self._run(late)
            # Views of a result wait with it: a view in between would be a use.
            if node.target is WAIT or (looks_into(node) and any(n in self.deferred for n in node.all_input_nodes)):
                self.deferred[node] = None
            else:
                self._run(node)
        return self.order

    def _run(self, node: Node) -> None:
        """Append ``node`` after what it still lacks."""
        if node in self.done:
            return
        for needed in node.all_input_nodes:
            self._run(needed)
        self.deferred.pop(node, None)
        if is_collective(node):
            self._make_room(node)
        self._append(node)
        if is_collective(node):
            self._account(node, 1)
        # A bucket's memory is there until the last of its waits.
        elif node.target is WAIT and all(wait in self.done for wait in waits_of(start_of(node))):
            self._account(start_of(node), -1)
            self._start_ahead()

    def _append(self, node: Node) -> None:
        self.order.append(node)
        self.done.add(node)
        for user in node.users:
            if user.target is operator.getitem and user not in self.done and node not in self.deferred:
                self.deferred.pop(user, None)
                self._append(user)

    def _start_ahead(self) -> None:
        """Start all-gathers, in the order of the graph, as long as there is room."""
        while self.ahead:
            if self.ahead[0] in self.done:
                self.ahead.popleft()
            # In the order of the graph, even if a later one would fit: the first is needed first.
            elif self.gathered + node_bytes(self.ahead[0]) <= self.limit:
                self._run(self.ahead.popleft())
            else:
                return

    def _make_room(self, node: Node) -> None:
        """Wait for the oldest collectives while they hold more memory than allowed, with that of ``node``."""
        while self.unwaited and self.consumed + _consumed_bytes(node) > self.limit:
            for wait in waits_of(self.unwaited.popleft()):
                self._run(wait)

    def _account(self, start: Node, sign: int) -> None:
        if is_gather(start):
            self.gathered += sign * node_bytes(start)
        elif _consumed_bytes(start):
            self.consumed += sign * _consumed_bytes(start)
            if sign > 0:
                self.unwaited.append(start)


def _consumed_bytes(start: Node) -> int:
    row = collective_op(start.target)
    if row is None or not row.waited_early:
        return 0
    return sum(node_bytes(node) for node in start.all_input_nodes)
