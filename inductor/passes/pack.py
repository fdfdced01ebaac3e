"""Neighbouring collectives on the CPU go through one flat buffer.

On gloo a collective costs a fraction of a millisecond however small it is, far more than copying a layer's parameters
into one buffer and out again. A gathered buffer holds one row a rank, the members side by side in each; a reduced one
holds each rank's rows of all members.

Keeps the bits of every result: gathers only move data, and a sum of two ranks has one order. Gloo sums more than two
in an order that depends on where an element lies, so there reduce-scatters are left alone.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.inductor.graph.collectives import ALL_GATHER, REDUCE_SCATTER
from weft.inductor.graph.emitter import Emit, emitter
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.passes.adjacent_collectives import dependents_before, runs

Node = torch.fx.Node

aten = torch.ops.aten


@keeps_bits
def pack(step: StepGraph) -> StepGraph:
    """Merge runs of collectives on CPU tensors, up to ``knobs.bucket_mib`` of inputs a run. Changes ``step``."""
    for run in runs(step, _can_join):
        _merge(step.graph, run)
    return step


def _can_join(node: Node) -> bool:
    val = node.meta["val"]
    if node.target not in (ALL_GATHER.op, REDUCE_SCATTER.op) or val.device.type != "cpu":
        return False
    if any(type(n) is not int for n in val.shape):
        return False
    # The sum of two numbers has one order, wherever an element lies in the buffer.
    order_is_one = node.target is ALL_GATHER.op or node.args[2:3] == (2,)
    return order_is_one and all(user.target is WAIT for user in node.users)


def _merge(graph: torch.fx.Graph, run: list[Node]) -> None:
    last = run[-1]
    # Waits, views and casts of earlier members read the merged call, which takes the place of the last one.
    for node in reversed(dependents_before(run)):
        last.append(node)
    gathers = last.target is ALL_GATHER.op
    inputs: list[Any] = [node.args[0] for node in run]
    world: Any = last.args[1] if gathers else last.args[2]
    with graph.inserting_before(last):
        emit = emitter(graph, last)
        flat = _side_by_side(emit, inputs) if gathers else _rank_by_rank(emit, inputs, world)
        merged = emit(last.target, flat, *last.args[1:])
        # Ranks compare by these which captured collectives a call carries.
        merged.meta["members"] = tuple(at for node in run for at in node.meta.get("members", ()))
    waits = {user for node in run for user in node.users}
    first = last
    while first not in waits:
        first = first.next
    with graph.inserting_before(first):
        emit = emitter(graph, first)
        whole = emit(WAIT, merged)
        parts = _columns(emit, whole, run, world) if gathers else _pieces(emit, whole, run)
    for node, part in zip(run, parts, strict=True):
        for wait in list(node.users):
            wait.replace_all_uses_with(part)
            graph.erase_node(wait)
        graph.erase_node(node)


def _side_by_side(emit: Emit, inputs: list[Node]) -> Node:
    """All elements of this rank's parts in one row."""
    return emit(aten.cat.default, [emit(aten.reshape.default, node, [-1]) for node in inputs])


def _rank_by_rank(emit: Emit, inputs: list[Node], world: int) -> Node:
    """For each rank in turn, its rows of all gradients."""
    rows = [emit(aten.reshape.default, node, [world, -1]) for node in inputs]
    return emit(aten.reshape.default, emit(aten.cat.default, rows, 1), [-1])


def _columns(emit: Emit, whole: Node, run: list[Node], world: int) -> list[Node]:
    """The gathered tensors: each is a block of columns of the buffer, one row a rank."""
    table, start, parts = emit(aten.view.default, whole, [world, -1]), 0, []
    for node in run:
        val = node.meta["val"]
        end = start + val.numel() // world
        parts.append(emit(aten.reshape.default, emit(aten.slice.Tensor, table, 1, start, end), list(val.shape)))
        start = end
    return parts


def _pieces(emit: Emit, whole: Node, run: list[Node]) -> list[Node]:
    """The reduced shards: consecutive pieces of the buffer."""
    start, parts = 0, []
    for node in run:
        val = node.meta["val"]
        end = start + val.numel()
        parts.append(emit(aten.view.default, emit(aten.slice.Tensor, whole, 0, start, end), list(val.shape)))
        start = end
    return parts
