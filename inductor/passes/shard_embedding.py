"""Embeddings are looked up where their rows are, and only rows of their gradients are sent.

A sharded embedding table is gathered whole, for the few rows that a batch picks, and its gradient is reduced whole, of
which almost all is zero. Where all ranks together pick fewer rows than the table has, it is cheaper to move ids and
rows: every rank learns all ids, looks up those that fall into its shard, and a reduce-scatter of rows, of which one
rank's is not zero, hands each rank those of its own batch. Backward gathers the gradients of the rows, and every rank
sums those of its shard. No whole table exists on any rank. The vocabulary-parallel embedding of Megatron-LM (Shoeybi et
al. 2019), for tables that FSDP shards.

The gradient of a table that every rank has is mostly zero as well. Where it is summed over ranks, each of them is given
the ids and the gradients of the rows of all, and makes the sum itself: the same one, for it is made in one order.

Changes numerics: a gradient is summed once over the tokens of all ranks, in float32, where each rank's sum was rounded
and then averaged; a looked-up -0 is a 0. Needs batches of one size on all ranks, which ``knobs.even_batches`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft import knobs, torch_adapter
from weft.capture.graph import WAIT, StepGraph, drop_dead
from weft.inductor.passes.emitter import Emit, emitter

Node = torch.fx.Node

aten = torch.ops.aten
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor.default
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default

_CUTS = (aten.narrow.default, aten.slice.Tensor)
_PADS = "weft::pad_shard"


def shard_embedding(step: StepGraph) -> StepGraph:
    """Rewrite look-ups in gathered tables, and the reduction of their gradients, where that moves three quarters of the
    bytes or less. Changes ``step``; does nothing unless ``knobs.even_batches``."""
    if knobs.even_batches:
        spread = _Spread(step)
        for node in list(step.graph.nodes):
            if node.target is aten.embedding.default:
                spread.look_up(node)
            elif node.target is aten.embedding_dense_backward.default:
                spread.reduce(node)
                spread.sum_rows(node)
        drop_dead(step.graph)
    return step


@dataclass(frozen=True)
class _Ids:
    """The ids of all ranks' batches, one after the other: int [tokens], as they are, as positions in this rank's
    shard, and whether they are in it."""

    every: Node
    own: Node
    inside: Node


class _Spread:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.graph = step.graph
        self.known: dict[tuple[Any, ...], _Ids] = {}

    def look_up(self, node: Node) -> None:
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
            found = self._ids(emit, start, ids, int(table.meta["val"].shape[0]), rows, world, group)  # type: ignore[union-attr]
            outside = emit(aten.logical_not.default, found.inside)
            picked = emit(aten.embedding.default, part, emit(aten.masked_fill.Scalar, found.own, outside, 0))
            rows_ = emit(aten.masked_fill.Scalar, picked, emit(aten.unsqueeze.default, outside, 1), 0)
            mine = emit(WAIT, start(_REDUCE, rows_, "sum", world, group))
            node.replace_all_uses_with(emit(aten.reshape.default, mine, [*ids.meta["val"].shape, width]))
        for dead in (node, *_between(table, gather), gather):
            if not dead.users:
                self.graph.erase_node(dead)

    def reduce(self, node: Node) -> None:
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
            found = self._ids(emit, start, ids, whole.shape[0], shard.shape[0], world, group)
            flat = emit(aten.reshape.default, gradient, [-1, shard.shape[1]])
            every = emit(WAIT, start(_GATHER, _contiguous(emit, flat), world, group))
            keep = found.inside
            if padding >= 0:  # type: ignore[operator]
                keep = emit(aten.logical_and.default, keep, emit(aten.ne.Scalar, found.every, padding))
            # What falls elsewhere goes behind the last row, which embedding_dense_backward leaves out as padding.
            spot = emit(aten.masked_fill.Scalar, found.own, emit(aten.logical_not.default, keep), shard.shape[0])
            wide = _as(emit, every, torch.promote_types(whole.dtype, torch.float32))
            wide = emit(aten.mul.Tensor, wide, 1.0 / world) if op == "avg" else wide  # type: ignore[operator]
            mine = emit(aten.embedding_dense_backward.default, wide, spot, shard.shape[0], shard.shape[0], False)
            mine = _as(emit, mine, shard.dtype)
        _replace(self.graph, reduction, mine)

    def sum_rows(self, node: Node) -> None:
        """Sum the gradient of a table that every rank has over the tokens of all ranks, on each of them."""
        gradient, ids, rows, padding, by_frequency = node.args
        found = _sum_of(node)
        if found is None or by_frequency or not isinstance(gradient, Node) or not isinstance(ids, Node):
            return
        reduction, factor = found
        group = reduction.args[2]
        world = len(torch_adapter.group_ranks(self.step.groups[group]))  # type: ignore[index]
        if not _pays(ids, rows, world):  # type: ignore[arg-type]
            return
        whole = reduction.meta["val"]
        with self.graph.inserting_before(reduction):
            emit = emitter(self.graph, node)
            start = _starter(emit, reduction)
            flat = emit(aten.reshape.default, gradient, [-1, whole.shape[1]])
            every = emit(WAIT, start(_GATHER, _contiguous(emit, flat), world, group))
            wide = _as(emit, every, torch.promote_types(whole.dtype, torch.float32))
            factor = factor / world if reduction.args[1] == "avg" else factor
            wide = wide if factor == 1 else emit(aten.mul.Tensor, wide, factor)
            flat = emit(aten.reshape.default, ids, [-1])
            everywhere = emit(WAIT, start(_GATHER, _contiguous(emit, flat), world, group))
            summed = emit(aten.embedding_dense_backward.default, wide, everywhere, rows, padding, False)
            summed = _as(emit, summed, whole.dtype)
        _replace(self.graph, reduction, summed)

    def _ids(self, emit: Emit, start: Emit, ids: Node, size: int, rows: int, world: Any, group: Any) -> _Ids:
        """What ``ids`` picks on all ranks of ``group``; gathered once, by the first that asks.

        Eager refuses an id beyond the table. Here such an id is in nobody's shard, so each rank checks its own.
        """
        key = ids, size, world, group
        if key not in self.known:
            flat = emit(aten.reshape.default, ids, [-1])
            known = emit(aten.logical_and.default, emit(aten.ge.Scalar, flat, 0), emit(aten.lt.Scalar, flat, size))
            check = emit(aten._assert_async.msg, emit(aten.all.default, known), f"an id beyond an embedding of {size}")
            check.meta["effect"] = True
            every = emit(WAIT, start(_GATHER, _contiguous(emit, flat), world, group))
            first = torch_adapter.group_rank(self.step.groups[group]) * rows
            own = emit(aten.sub.Tensor, every, first)
            inside = emit(aten.logical_and.default, emit(aten.ge.Scalar, own, 0), emit(aten.lt.Scalar, own, rows))
            self.known[key] = _Ids(every, own, inside)
        return self.known[key]


def _starter(emit: Emit, original: Node) -> Emit:
    """``emit`` for collectives that stand where ``original`` stood among those that were captured."""

    def start(target: Any, *args: Any) -> Node:
        node = emit(target, *args)
        node.meta["number"] = original.meta.get("number", 0)
        return node

    return start


def _pays(ids: Node, size: int, world: Any) -> bool:
    """Whether the rows that all ranks pick are three quarters of a table of ``size`` rows at most: they are written and
    read once more than the table is."""
    sizes = ids.meta["val"].shape
    return world > 1 and all(type(n) is int for n in sizes) and 4 * world * sizes.numel() <= 3 * size


def _gather_of(table: Any) -> Node | None:
    """The all-gather of a table that nothing but one look-up reads, and whose shards are rows."""
    node = table
    while isinstance(node, Node) and len(node.users) == 1 and node.target in _CUTS and node.args[1:3] == (0, 0):
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not WAIT or len(node.users) != 1:
        return None
    gather = node.args[0]
    assert isinstance(gather, Node)
    return gather if gather.target is _GATHER and len(gather.users) == 1 and gather.meta["val"].dim() == 2 else None


def _between(table: Any, gather: Node) -> list[Node]:
    """The nodes from ``table`` back to the gather, which is left out."""
    found = []
    while table is not gather:
        found.append(table)
        table = table.args[0]
    return found


def _reduction_of(gradient: Node) -> Node | None:
    """The reduce-scatter that alone reads ``gradient``, cast and padded behind."""
    node = gradient
    while len(node.users) == 1 and node.target is not _REDUCE:
        (user,) = node.users
        pads = getattr(getattr(user.target, "_schema", None), "name", "") == _PADS and user.args[2] == 1
        if not pads and user.target not in (aten._to_copy.default, _REDUCE):
            return None
        node = user
    return node if node.target is _REDUCE and all(user.target is WAIT for user in node.users) else None


def _sum_of(gradient: Node) -> tuple[Node, float] | None:
    """The all-reduce that alone reads ``gradient``, cast and multiplied with numbers before, and their product."""
    node, factor = gradient, 1.0
    while len(node.users) == 1 and node.target is not _ALL_REDUCE:
        (user,) = node.users
        number: Any = user.args[1] if user.target is aten.mul.Tensor else 1.0
        if user.target not in (aten.mul.Tensor, aten._to_copy.default, _ALL_REDUCE) or isinstance(number, Node):
            return None
        node, factor = user, factor * number
    sums = node.target is _ALL_REDUCE and node.args[1] in ("sum", "avg")
    return (node, factor) if sums and all(user.target is WAIT for user in node.users) else None


def _replace(graph: torch.fx.Graph, reduction: Node, value: Node) -> None:
    """Let ``value`` be what waits for ``reduction`` give."""
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
