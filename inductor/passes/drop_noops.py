"""Operations that return their input unchanged are dropped.

Capture records what the step did: slices of a whole tensor, views to the shape that a tensor has, a transpose of a
transpose, padding of shards that divide evenly. Each costs the host at least a call, hundreds of times a step. Whether
an operation is a no-op follows from global sizes, which are the same on every rank.

Keeps the bits of every result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.capture.graph import StepGraph, calls
from weft.capture.node_kinds import WAIT
from weft.capture.node_meta import meta_of
from weft.inductor.graph.aliasing import looks_into, share_storage
from weft.inductor.graph.collectives import REDUCE_SCATTER
from weft.inductor.graph.operations import op_name
from weft.inductor.graph.pass_runner import keeps_bits

Node = torch.fx.Node

aten = torch.ops.aten


@keeps_bits
def drop_noops(step: StepGraph) -> StepGraph:
    """Replace each no-op by its input, or by a cast where it only casts. Changes ``step``."""
    for node in calls(step.graph):
        name = op_name(node)
        rewrite = _REWRITES.get(name)
        replacement = same_tensor(node) if rewrite is None else rewrite(step.graph, node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            step.graph.erase_node(node)
    return step


def _is_view(node: Node) -> bool:
    return looks_into(node) and node.target is not WAIT and isinstance(node.meta.get("val"), torch.Tensor)


def same_tensor(node: Node) -> Node | None:
    """The tensor, through any number of views, that the view ``node`` equals in sizes, strides and offset. None where
    there is none, and where ``node`` is not a view."""
    if not _is_view(node):
        return None
    val, source = node.meta["val"], node.args[0]
    place = _place(val)
    if place is None or val.dim() == 0:
        return None
    while isinstance(source, Node) and isinstance(source_val := source.meta.get("val"), torch.Tensor):
        if place == _place(source_val) and _kind(val) == _kind(source_val) and share_storage(node, source):
            return source
        if not _is_view(source):
            return None
        source = source.args[0]
    return None


def _place(val: torch.Tensor) -> tuple[object, ...] | None:
    """Sizes, strides and offset; None where one is symbolic: comparing it would add guards."""
    place = (*val.shape, *val.stride(), val.storage_offset())
    return place if all(type(n) is int for n in place) else None


def _kind(val: torch.Tensor) -> tuple[object, ...]:
    return val.dtype, val.is_conj(), val.is_neg()


def _padded(graph: torch.fx.Graph, node: Node) -> Node | None:
    """``pad_shard(shard, size, parts, dtype)`` is a cast where the parts divide evenly, or the whole (parts=1) has
    the size."""
    shard, size, parts, dtype = node.args
    short = parts == 1 and shard.meta["val"].shape[0] != size  # type: ignore[union-attr]
    return _cast(graph, node, shard, dtype) if size % parts == 0 and not short else None  # type: ignore[operator]


def _unpadded(graph: torch.fx.Graph, node: Node) -> Node | None:
    """``unpad_shard(padded, size, group, dtype)`` of what a reduce-scatter of ``size`` rows left is a cast."""
    padded, size, _, dtype = node.args
    reduced = padded.args[0] if padded.target is WAIT else None  # type: ignore[union-attr]
    if not isinstance(reduced, Node) or reduced.target is not REDUCE_SCATTER.op:
        return None
    rows = reduced.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
    return _cast(graph, node, padded, dtype) if rows == size else None


def _cast(graph: torch.fx.Graph, node: Node, source: object, dtype: Any) -> Node | None:
    assert isinstance(source, Node)
    source_val = source.meta["val"]
    if not source_val.is_contiguous():
        return None
    if source_val.dtype == dtype:
        return source
    with graph.inserting_before(node):
        cast = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    cast.meta = meta_of(node, val=node.meta["val"])
    return cast


_REWRITES: dict[str, Callable[[torch.fx.Graph, Node], Node | None]] = {
    "weft::pad_shard": _padded,
    "weft::unpad_shard": _unpadded,
}
