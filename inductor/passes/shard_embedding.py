"""Sharded embedding tables are looked up on the rank that has the rows; only rows of their gradients are sent.

FSDP gathers the whole table for the few rows that a batch picks, and reduces the whole gradient, which is almost all
zero. Where all ranks together pick fewer rows than the table has, moving ids and rows is cheaper. Every rank gathers
all ids and looks up those that fall into its shard. A reduce-scatter of rows, of which exactly one rank's is not zero,
gives each rank the rows of its own batch. Backward gathers the gradients of the rows, and every rank sums those of its
shard. The whole table exists on no rank. This is the vocabulary-parallel embedding of Megatron-LM (Shoeybi et al.
2019), applied to FSDP's shards.

The gradient of a replicated table is mostly zero as well. Instead of an all-reduce, every rank gathers the ids and the
gradient rows of all ranks and sums them in the same order, so all ranks get the same bits.

Changes results: a gradient is summed once over the tokens of all ranks in float32, where each rank's sum was rounded
and then averaged; a looked-up -0 becomes 0. Needs equal batch sizes on all ranks, which ``knobs.even_batches`` states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_kinds import WAIT
from weft.inductor.graph.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from weft.inductor.graph.emitter import Emit, emitter
from weft.inductor.graph.operations import op_name
from weft.inductor.graph.pass_runner import changes_bits

Node = torch.fx.Node

aten = torch.ops.aten

_CUTS = (aten.narrow.default, aten.slice.Tensor)
_PADS = "weft::pad_shard"


@changes_bits("a table's gradient is summed once over all ranks' tokens in float32")
def shard_embedding(step: StepGraph) -> StepGraph:
    """Rewrite look-ups in gathered tables and reductions of their gradients, where that moves at most three quarters of
    the bytes. Does nothing unless ``knobs.even_batches``. Changes ``step``."""
    if knobs.even_batches:
        rewriter = _ShardedEmbedding(step)
        for node in list(step.graph.nodes):
            if node.target is aten.embedding.default:
                rewriter.look_up(node)
            elif node.target is aten.embedding_dense_backward.default:
                rewriter.reduce(node)
                rewriter.sum_rows(node)
        drop_dead(step.graph)
    return step


@dataclass(frozen=True)
class _Ids:
    """The ids of all ranks' batches, concatenated in rank order, each of shape [tokens].

    Attributes:
        every: int, as indices into the whole table.
        own: int, as indices into this rank's shard.
        inside: bool, whether an id is in this rank's shard.
    """

    every: Node
    own: Node
    inside: Node


class _ShardedEmbedding:
    """Rewrites the look-ups and gradients of one step; ids are gathered once for forward and backward."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.graph = step.graph
        self.known: dict[tuple[Any, ...], _Ids] = {}

    def look_up(self, node: Node) -> None:
        """Replace a look-up in a gathered table by look-ups in the shards and a reduce-scatter of rows."""
        table, ids = node.args[:2]
        gather = _gather_of(table)
        if gather is None or not isinstance(ids, Node):
            return
        part, world, group = gather.args
        rows, width = part.meta["val"].shape  # type: ignore[union-attr]
        if not _pays(ids, world * rows, world):  # type: ignore[operator]
            return
        with self.graph.inserting_before(node):
            emit = emitter(self.graph, node)
            start = _starter(emit, gather)
            all_ids = self._ids(emit, start, ids, int(table.meta["val"].shape[0]), rows, world, group)  # type: ignore[union-attr]
            outside = emit(aten.logical_not.default, all_ids.inside)
            picked = emit(aten.embedding.default, part, emit(aten.masked_fill.Scalar, all_ids.own, outside, 0))
            # Zeros from all ranks but the one with the row: the sum is exact in any order and dtype.
            rows_ = emit(aten.masked_fill.Scalar, picked, emit(aten.unsqueeze.default, outside, 1), 0)
            mine = emit(WAIT, start(REDUCE_SCATTER.op, rows_, "sum", world, group))
            node.replace_all_uses_with(emit(aten.reshape.default, mine, [*ids.meta["val"].shape, width]))
        for dead in (node, *_between(table, gather), gather):
            if not dead.users:
                self.graph.erase_node(dead)

    def reduce(self, node: Node) -> None:
        """Replace the reduce-scatter of a table's gradient by an all-gather of the rows' gradients."""
        gradient, ids, _, padding, by_frequency = node.args
        reduction = _reduction_of(node)
        if reduction is None or by_frequency or not isinstance(gradient, Node) or not isinstance(ids, Node):
            return
        _, op, world, group = reduction.args
        shard = reduction.meta["val"]
        if op not in ("avg", "sum") or not _pays(ids, shard.shape[0] * world, world):  # type: ignore[operator]
            return
        whole = node.meta["val"]
        with self.graph.inserting_before(reduction):
            emit = emitter(self.graph, node)
            start = _starter(emit, reduction)
            all_ids = self._ids(emit, start, ids, whole.shape[0], shard.shape[0], world, group)
            flat = emit(aten.reshape.default, gradient, [-1, shard.shape[1]])
            every = emit(WAIT, start(ALL_GATHER.op, _contiguous(emit, flat), world, group))
            keep = all_ids.inside
            if padding >= 0:  # type: ignore[operator]
                keep = emit(aten.logical_and.default, keep, emit(aten.ne.Scalar, all_ids.every, padding))
            # Ids outside the shard map to one row past its end, which embedding_dense_backward skips as padding.
            spot = emit(aten.masked_fill.Scalar, all_ids.own, emit(aten.logical_not.default, keep), shard.shape[0])
            # One float32 sum over the tokens of all ranks, rounded once.
            wide = _as(emit, every, torch.promote_types(whole.dtype, torch.float32))
            wide = emit(aten.mul.Tensor, wide, 1.0 / world) if op == "avg" else wide  # type: ignore[operator]
            mine = emit(aten.embedding_dense_backward.default, wide, spot, shard.shape[0], shard.shape[0], False)
            mine = _as(emit, mine, shard.dtype)
        _replace(self.graph, reduction, mine)

    def sum_rows(self, node: Node) -> None:
        """Sum the gradient of a replicated table over the tokens of all ranks, on every rank."""
        gradient, ids, rows, padding, by_frequency = node.args
        scaled_sum = _sum_of(node)
        if scaled_sum is None or by_frequency or not isinstance(gradient, Node) or not isinstance(ids, Node):
            return
        reduction, factor = scaled_sum
        group = reduction.args[2]
        world = len(torch_adapter.group_ranks(self.step.groups[group]))  # type: ignore[index]
        if not _pays(ids, rows, world):  # type: ignore[arg-type]
            return
        whole = reduction.meta["val"]
        with self.graph.inserting_before(reduction):
            emit = emitter(self.graph, node)
            start = _starter(emit, reduction)
            flat = emit(aten.reshape.default, gradient, [-1, whole.shape[1]])
            every = emit(WAIT, start(ALL_GATHER.op, _contiguous(emit, flat), world, group))
            wide = _as(emit, every, torch.promote_types(whole.dtype, torch.float32))
            factor = factor / world if reduction.args[1] == "avg" else factor
            wide = wide if factor == 1 else emit(aten.mul.Tensor, wide, factor)
            flat = emit(aten.reshape.default, ids, [-1])
            everywhere = emit(WAIT, start(ALL_GATHER.op, _contiguous(emit, flat), world, group))
            summed = emit(aten.embedding_dense_backward.default, wide, everywhere, rows, padding, False)
            summed = _as(emit, summed, whole.dtype)
        _replace(self.graph, reduction, summed)

    def _ids(self, emit: Emit, start: Emit, ids: Node, size: int, rows: int, world: Any, group: Any) -> _Ids:
        """The ids of all ranks of ``group``, gathered once for each ``ids``.

        Eager raises for an id outside the table. Here such an id is in no shard, so each rank checks its own ids.
        """
        key = ids, size, world, group
        if key not in self.known:
            flat = emit(aten.reshape.default, ids, [-1])
            known = emit(aten.logical_and.default, emit(aten.ge.Scalar, flat, 0), emit(aten.lt.Scalar, flat, size))
            check = emit(aten._assert_async.msg, emit(aten.all.default, known), f"an id beyond an embedding of {size}")
            check.meta["effect"] = True  # nothing reads it, and it must not be dropped
            every = emit(WAIT, start(ALL_GATHER.op, _contiguous(emit, flat), world, group))
            first = torch_adapter.group_rank(self.step.groups[group]) * rows
            own = emit(aten.sub.Tensor, every, first)
            inside = emit(aten.logical_and.default, emit(aten.ge.Scalar, own, 0), emit(aten.lt.Scalar, own, rows))
            self.known[key] = _Ids(every, own, inside)
        return self.known[key]


def _starter(emit: Emit, original: Node) -> Emit:
    """``emit`` for collectives. They get the capture order of ``original``, by which ranks can fall back to the
    captured order."""

    def start(target: Any, *args: Any) -> Node:
        node = emit(target, *args)
        node.meta["capture_order"] = original.meta.get("capture_order", 0)
        return node

    return start


def _pays(ids: Node, size: int, world: Any) -> bool:
    """Whether all ranks together pick at most three quarters of ``size`` rows: rows are written and read once more than
    a gathered table is."""
    # The choice needs known sizes, and all ranks must make the same one.
    sizes = ids.meta["val"].shape
    return world > 1 and all(type(n) is int for n in sizes) and 4 * world * sizes.numel() <= 3 * size


def _gather_of(table: Any) -> Node | None:
    """The all-gather of a table that is sharded by rows and read by one look-up only; else None."""
    node = table
    while isinstance(node, Node) and len(node.users) == 1 and node.target in _CUTS and node.args[1:3] == (0, 0):
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not WAIT or len(node.users) != 1:
        return None
    gather = node.args[0]
    assert isinstance(gather, Node)
    # Another reader would need the gathered table anyway.
    is_table = gather.target is ALL_GATHER.op and gather.meta["val"].dim() == 2
    return gather if is_table and len(gather.users) == 1 else None


def _between(table: Any, gather: Node) -> list[Node]:
    """The nodes from ``table`` back to the gather, which is not included."""
    nodes = []
    while table is not gather:
        nodes.append(table)
        table = table.args[0]
    return nodes


def _reduction_of(gradient: Node) -> Node | None:
    """The reduce-scatter that is the only reader of ``gradient``, through casts and padding; else None."""
    node = gradient
    while len(node.users) == 1 and node.target is not REDUCE_SCATTER.op:
        (user,) = node.users
        pads = op_name(user) == _PADS and user.args[2] == 1
        if not pads and user.target not in (aten._to_copy.default, REDUCE_SCATTER.op):
            return None
        node = user
    return node if node.target is REDUCE_SCATTER.op and all(user.target is WAIT for user in node.users) else None


def _sum_of(gradient: Node) -> tuple[Node, float] | None:
    """The all-reduce that is the only reader of ``gradient``, through casts and multiplications by numbers, and the
    product of these numbers; else None."""
    node, factor = gradient, 1.0
    while len(node.users) == 1 and node.target is not ALL_REDUCE.op:
        (user,) = node.users
        number: Any = user.args[1] if user.target is aten.mul.Tensor else 1.0
        if user.target not in (aten.mul.Tensor, aten._to_copy.default, ALL_REDUCE.op) or isinstance(number, Node):
            return None
        node, factor = user, factor * number
    sums = node.target is ALL_REDUCE.op and node.args[1] in ("sum", "avg")
    return (node, factor) if sums and all(user.target is WAIT for user in node.users) else None


def _replace(graph: torch.fx.Graph, reduction: Node, value: Node) -> None:
    """Replace the results of ``reduction`` by ``value``."""
    for wait in list(reduction.users):
        wait.replace_all_uses_with(value)
        graph.erase_node(wait)
    graph.erase_node(reduction)


def _contiguous(emit: Emit, node: Node) -> Node:
    if node.meta["val"].is_contiguous():
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def _as(emit: Emit, node: Node, dtype: torch.dtype) -> Node:
    return node if node.meta["val"].dtype == dtype else emit(aten._to_copy.default, node, dtype=dtype)
