"""A large all-reduce becomes a reduce-scatter and an all-gather.

The bytes on the wire are the same, but each half has transports of its own over peer memory
(:mod:`weft.inductor.transports.peer_calls`): sums in float32 of what is sent in bfloat16, and copy engines, which slow
computation down by a third or less of what NCCL's kernels do. A multiplication by one over the number of ranks before
the sum becomes a mean. A cast in front of it then feeds the reduction itself, and
:mod:`weft.inductor.passes.wire_dtype` can send what was cast: gradients in the dtype in which GEMMs wrote them.

Changes results: sums are made in another order, in float32 where a transport over peers carries them, and a mean may
divide the sum where its parts were divided before. All ranks get the same bits, as from an all-reduce.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_kinds import WAIT, group_of, is_effect
from weft.inductor.graph.aliasing import looks_into, readers_of
from weft.inductor.graph.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    knob_allows,
    ranks_on_a_host,
    transports_of,
)
from weft.inductor.graph.emitter import emitter
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.graph.sizes import UNKNOWN, node_bytes
from weft.inductor.passes.tensor_lists import is_static

Node = torch.fx.Node

aten = torch.ops.aten

# What divides its first operand by the number of ranks where the second one is this.
_DIVISIONS: dict[Any, Callable[[int], float]] = {
    aten.mul.Tensor: lambda world: 1 / world,
    aten.mul.Scalar: lambda world: 1 / world,
    aten.div.Tensor: float,
    aten.div.Scalar: float,
}

# Calibrated on 4 H200: one tensor more in a call costs copy_sum and copy_engine 11 us more than NCCL's all-reduce. Half
# the bytes to reduce and engines for the others save 2.6 us a MB of float32, what computation loses beside them counted
# in. What has no narrower values, which NCCL reduces, costs 17 us more and saves 0.7 us a MB.
LEAST_BYTES = 4 << 20
LEAST_WIDE_BYTES = 24 << 20

# An all-gather is inserted after reductions of this many further bytes: by then its own reduction has ended, and
# several gathers can share a bucket. The schedule starts it sooner where that is faster. Half and twice this value gave
# schedules that are as fast.
_GATHER_DISTANCE = 512 << 20


@changes_bits("a reduce-scatter may sum in another order than an all-reduce, and a mean may divide after the sum")
def split_all_reduces(step: StepGraph) -> StepGraph:
    """Split the all-reduces on GPUs that are large enough, and beside which something is computed. Changes ``step``.

    Does nothing unless ``knobs.transports`` allows transports over peers for both halves. Groups on several hosts have
    no peers and are left alone. So is what is waited for at once: nothing would hide a second latency.
    """
    # Decided from sizes, the knob and hosts only, the same on all ranks: whether peers can map each other's memory is
    # asked much later, and kernels are fused around both halves before.
    reduces = transports_of(REDUCE_SCATTER.kind, sums_in_float32=True)
    if knob_allows(reduces) and knob_allows(transports_of(ALL_GATHER.kind)):
        order = list(step.graph.nodes)
        place = {node: at for at, node in enumerate(order)}
        # 0 for a group on several hosts: no transport over peers could carry the halves.
        worlds = _worlds(step)
        # Without computation before the first use, nothing hides the second collective's latency.
        large = [node for node in order if node.target is ALL_REDUCE.op and _is_large(node, worlds[group_of(node)])]
        split(step, [node for node in large if any(map(_computes, order[place[node] + 1 : _first_use(node, place)]))])
    return step


def split(step: StepGraph, nodes: Sequence[Node]) -> None:
    """Split those of the all-reduces ``nodes``, which stand in this order, that can be: by "sum" or "avg" over several
    ranks of one host, of floats of known sizes without gaps, which the ranks divide evenly. Changes ``step``."""
    worlds = _worlds(step)
    eligible = [node for node in nodes if _can_split(node, worlds[group_of(node)])]
    for node, before in zip(eligible, _gather_positions(step, eligible), strict=True):
        _split(step.graph, node, worlds[group_of(node)], before)
    drop_dead(step.graph)


def _worlds(step: StepGraph) -> dict[str, int]:
    return {name: ranks_on_a_host(group) for name, group in step.groups.items()}


def _is_large(node: Node, world: int) -> bool:
    size = node_bytes(node)
    if node.meta["val"].device.type != "cuda" or not LEAST_BYTES <= size < UNKNOWN:
        return False
    # If the value or the source of its cast has two bytes, the transport sends half of what float32 takes.
    sent = node.meta["val"], _uncast(_mean(node, world)[0])[0].meta["val"]
    return min(val.itemsize for val in sent) == 2 or size >= LEAST_WIDE_BYTES


def _first_use(node: Node, place: dict[Node, int]) -> int:
    """Position of the first node that computes with the result of a collective, or of the output node."""
    return min(map(place.__getitem__, readers_of(node)), default=len(place) - 1)


def _computes(node: Node) -> bool:
    return node.op == "call_function" and not is_effect(node) and not looks_into(node)


def _can_split(node: Node, world: int) -> bool:
    operand, op = node.args[:2]
    vals = [node.meta["val"], operand.meta["val"]]  # type: ignore[union-attr]
    waited = all(user.target is WAIT for user in node.users)
    if world < 2 or op not in ("sum", "avg") or not waited or not is_static(vals):
        return False
    size = vals[0].numel()
    return bool(size) and size % world == 0 and all(val.is_floating_point() and val.is_contiguous() for val in vals)


def _split(graph: torch.fx.Graph, node: Node, world: int, before: Node) -> None:
    """Replace ``node`` by a reduce-scatter at its place and an all-gather before ``before``."""
    operand, op = _mean(node, world)
    shape, group = node.meta["val"].shape, node.args[2]
    source, dtype = _uncast(operand)
    flat = shape[0] % world != 0  # a reduce-scatter splits dimension 0
    with graph.inserting_before(node):
        emit = emitter(graph, node)
        source = emit(aten.view.default, source, [-1]) if flat else source
        # A cast of its own, which no other reader keeps from becoming part of the reduction.
        source = emit(aten._to_copy.default, source, dtype=dtype) if dtype is not None else source
        start = emit(REDUCE_SCATTER.op, source, op, world, group)
    # Far behind the reduce-scatter: right behind it, the wait for the shard would stall computation.
    with graph.inserting_before(before):
        shard = emit(WAIT, start)
        whole = emit(WAIT, emit(ALL_GATHER.op, shard, world, group))
        whole = emit(aten.view.default, whole, list(shape)) if flat else whole
    for wait in list(node.users):
        wait.replace_all_uses_with(whole)
        graph.erase_node(wait)
    graph.erase_node(node)


def _mean(node: Node, world: int) -> tuple[Node, str]:
    """The operand and the reduction ("sum", "avg") of an all-reduce that absorbs a division by the number of ranks."""
    operand: Any = node.args[0]
    op = str(node.args[1])
    if op != "sum" or operand.target not in _DIVISIONS or operand.kwargs or "inplace" in operand.meta:
        return operand, op
    value, number = operand.args
    divides = world > 1 and type(number) in (int, float) and number == _DIVISIONS[operand.target](world)
    val = value.meta["val"]
    # A division that also casts or broadcasts does more than divide.
    same = divides and val.dtype == operand.meta["val"].dtype and val.shape == operand.meta["val"].shape
    return (value, "avg") if same and val.is_contiguous() else (operand, op)


def _uncast(node: Node) -> tuple[Node, torch.dtype | None]:
    """The source of the plain cast ``node`` and the dtype that it casts to; ``node`` and None for other nodes."""
    source: Any = node.args[0] if node.args else node
    plain = node.target is aten._to_copy.default and list(node.kwargs) == ["dtype"] and "inplace" not in node.meta
    if not plain or not source.meta["val"].is_contiguous():
        return node, None
    return source, node.meta["val"].dtype


def _gather_positions(step: StepGraph, nodes: Sequence[Node]) -> list[Node]:
    """The node before which the all-gather of each of ``nodes`` is inserted: the first of ``nodes`` that follows more
    than ``_GATHER_DISTANCE`` bytes later, or the wait for the result."""
    place = {node: at for at, node in enumerate(step.graph.nodes)}
    # Bytes as a clock: what follows on the same stream takes a time that its bytes tell, on any cluster.
    ends = list(accumulate(map(node_bytes, nodes)))
    later = (nodes[bisect_left(ends, end + _GATHER_DISTANCE) :][:1] for end in ends)
    return [min([*node.users, *each], key=place.__getitem__) for node, each in zip(nodes, later, strict=True)]
