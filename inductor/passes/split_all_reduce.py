"""A large all-reduce is a reduce-scatter, and an all-gather of what that leaves on each rank.

The bytes on the wire are the same. But each half has transports of its own over memory that peers share
(:mod:`weft.inductor.comm.transports`): sums in float32 of what went over the wire in bfloat16, and copies by engines,
beside which computation loses a third or less of what a library's kernels cost it. A multiplication with one over the
number of ranks before the sum becomes a mean, so that a cast before that feeds the reduction itself, which
:mod:`weft.inductor.passes.wire_dtype` lets send what was cast: gradients of replicas as products made them.

Changes numerics: sums are made in another order, in float32 where a transport over peers carries them; a mean may
divide the sum where its parts were divided before. All ranks get the same bits, as from an all-reduce.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import WAIT, StepGraph, drop_dead, group_of, is_effect, is_wait
from weft.inductor.passes.emitter import emitter
from weft.inductor.passes.lists import static
from weft.inductor.passes.sizes import UNKNOWN, node_bytes
from weft.inductor.passes.wire_dtype import SUM_BY_THEMSELVES, may_carry
from weft.inductor.runtime.geometry import looks_into

Node = torch.fx.Node

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_ALL_REDUCE = _c10d.all_reduce.default
_REDUCE = _c10d.reduce_scatter_tensor.default
_GATHER = _c10d.all_gather_into_tensor.default

# What divides its first operand by the number of ranks where the second one is this.
_DIVISIONS: dict[Any, Callable[[int], float]] = {
    aten.mul.Tensor: lambda world: 1 / world,
    aten.mul.Scalar: lambda world: 1 / world,
    aten.div.Tensor: float,
    aten.div.Scalar: float,
}

_GATHERING = ("copy_engine", "push")

# Calibrated on 4 H200: one tensor more in a call costs copy_sum and copy_engine 11 us more than NCCL's all-reduce. Half
# the bytes to reduce and engines for the others save 2.6 us a MB of float32, what computation loses beside them counted
# in. What has no narrower values, which NCCL reduces, costs 17 us more and saves 0.7 us a MB.
LEAST_BYTES = 4 << 20
LEAST_WIDE_BYTES = 24 << 20

# A gather stands behind reductions of so many bytes more: by then the one that it needs has ended, and those before it
# can share calls. Schedules start it sooner where that is better; with half of this and twice of this they are as fast.
_BEHIND = 512 << 20


def split_all_reduces(step: StepGraph) -> StepGraph:
    """Split the all-reduces on GPUs that are large enough, and beside which something is computed. Changes ``step``.

    Does nothing unless ``knobs.transports`` allows transports over peers for both halves. Groups on several hosts have
    no peers and are left alone. So is what is waited for at once: nothing would hide a second latency.
    """
    if may_carry(*SUM_BY_THEMSELVES) and may_carry(*_GATHERING):
        order = list(step.graph.nodes)
        place = {node: at for at, node in enumerate(order)}
        worlds = _worlds(step)
        large = [node for node in order if node.target is _ALL_REDUCE and _is_large(node, worlds[group_of(node)])]
        split(step, [node for node in large if any(map(_computes, order[place[node] + 1 : _first_use(node, place)]))])
    return step


def split(step: StepGraph, nodes: Sequence[Node]) -> None:
    """Split those of the all-reduces ``nodes``, which stand in this order, that can be: by "sum" or "avg" over several
    ranks of one host, of floats of known sizes without gaps, which the ranks divide evenly. Changes ``step``."""
    worlds = _worlds(step)
    found = [node for node in nodes if _can_split(node, worlds[group_of(node)])]
    for node, behind in zip(found, _behind(step, found), strict=True):
        _split(step.graph, node, worlds[group_of(node)], behind)
    drop_dead(step.graph)


def ranks_on_a_host(group: str) -> int:
    """How many ranks a process group has that is on one host, as torchrun numbers ranks; 0 for others, and for groups
    that this process does not have. The same on all ranks where all hosts have as many processes."""
    try:
        ranks = torch_adapter.group_ranks(group)
    except RuntimeError:
        return 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return len(ranks) if not here or len({rank // here for rank in ranks}) == 1 else 0


def _worlds(step: StepGraph) -> dict[str, int]:
    return {name: ranks_on_a_host(group) for name, group in step.groups.items()}


def _is_large(node: Node, world: int) -> bool:
    size = node_bytes(node)
    if node.meta["val"].device.type != "cuda" or not LEAST_BYTES <= size < UNKNOWN:
        return False
    sent = node.meta["val"], _uncast(_mean(node, world)[0])[0].meta["val"]
    return min(val.itemsize for val in sent) == 2 or size >= LEAST_WIDE_BYTES


def _first_use(node: Node, place: dict[Node, int]) -> int:
    """Where something is computed with the result of a collective, or it is a result of the step."""
    views, first = [node], len(place) - 1
    for view in views:
        for user in view.users:
            if is_wait(user) or looks_into(user):
                views.append(user)
            else:
                first = min(first, place[user])
    return first


def _computes(node: Node) -> bool:
    return node.op == "call_function" and not is_effect(node) and not looks_into(node)


def _can_split(node: Node, world: int) -> bool:
    given, op = node.args[:2]
    vals = [node.meta["val"], given.meta["val"]]  # type: ignore[union-attr]
    if world < 2 or op not in ("sum", "avg") or any(user.target is not WAIT for user in node.users) or not static(vals):
        return False
    size = vals[0].numel()
    return bool(size) and size % world == 0 and all(val.is_floating_point() and val.is_contiguous() for val in vals)


def _split(graph: torch.fx.Graph, node: Node, world: int, behind: Node) -> None:
    """Put a reduce-scatter where ``node`` is, and a gather in front of ``behind``."""
    given, op = _mean(node, world)
    shape, group = node.meta["val"].shape, node.args[2]
    source, dtype = _uncast(given)
    flat = shape[0] % world != 0
    with graph.inserting_before(node):
        emit = emitter(graph, node)
        source = emit(aten.view.default, source, [-1]) if flat else source
        # A cast of its own, which no other reader keeps from becoming part of the reduction.
        source = emit(aten._to_copy.default, source, dtype=dtype) if dtype is not None else source
        start = emit(_REDUCE, source, op, world, group)
    with graph.inserting_before(behind):
        shard = emit(WAIT, start)
        whole = emit(WAIT, emit(_GATHER, shard, world, group))
        whole = emit(aten.view.default, whole, list(shape)) if flat else whole
    for wait in list(node.users):
        wait.replace_all_uses_with(whole)
        graph.erase_node(wait)
    graph.erase_node(node)


def _mean(node: Node, world: int) -> tuple[Node, str]:
    """What an all-reduce reduces, and how, where it takes over a division by the number of ranks."""
    given: Any = node.args[0]
    op = str(node.args[1])
    if op != "sum" or given.target not in _DIVISIONS or given.kwargs or "inplace" in given.meta:
        return given, op
    value, number = given.args
    divides = world > 1 and type(number) in (int, float) and number == _DIVISIONS[given.target](world)
    val = value.meta["val"]
    same = divides and val.dtype == given.meta["val"].dtype and val.shape == given.meta["val"].shape
    return (value, "avg") if same and val.is_contiguous() else (given, op)


def _uncast(given: Node) -> tuple[Node, torch.dtype | None]:
    """What ``given`` is a plain cast of, and the dtype that it casts to; itself and None where it is no such."""
    source: Any = given.args[0] if given.args else given
    plain = given.target is aten._to_copy.default and list(given.kwargs) == ["dtype"] and "inplace" not in given.meta
    if not plain or not source.meta["val"].is_contiguous():
        return given, None
    return source, given.meta["val"].dtype


def _behind(step: StepGraph, nodes: Sequence[Node]) -> list[Node]:
    """In front of what the gather of each of ``nodes`` comes: of that among them which ``_BEHIND`` bytes come before,
    or of the wait for its result."""
    place = {node: at for at, node in enumerate(step.graph.nodes)}
    ends = list(accumulate(map(node_bytes, nodes)))
    later = (nodes[bisect_left(ends, end + _BEHIND) :][:1] for end in ends)
    return [min([*node.users, *each], key=place.__getitem__) for node, each in zip(nodes, later, strict=True)]
