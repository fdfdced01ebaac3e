"""Operations that hand on what they were given are not run.

Capture keeps what the step did: slices of a whole tensor, views of the shape it has, a transpose of a transpose,
padding of shards that divide evenly. Each costs the host a launch or at least a call, hundreds of times a step. Whether
an operation is one of these follows from global sizes, which are the same on every rank.

Keeps the bits of every result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.capture.graph import WAIT, StepGraph
from weft.inductor.runtime.geometry import looks_into, share_storage

Node = torch.fx.Node

aten = torch.ops.aten


def drop_noops(step: StepGraph) -> StepGraph:
    """Replace each operation that changes nothing by its input, or by the cast that is left of it. Changes ``step``."""
    for node in step.graph.nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        rewrite = _REWRITES.get(name)
        replacement = same_tensor(node) if rewrite is None else rewrite(step.graph, node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            step.graph.erase_node(node)
    return step


def _is_view(node: Node) -> bool:
    return looks_into(node) and node.target is not WAIT and isinstance(node.meta.get("val"), torch.Tensor)


def same_tensor(node: Node) -> Node | None:
    """The tensor that a view looks into, by however many views, and shows whole and as it is; None where there is
    none, and for what is no view."""
    if not _is_view(node):
        return None
    val, source = node.meta["val"], node.args[0]
    if not _is_static(val) or val.dim() == 0:
        return None
    while isinstance(source, Node) and isinstance(given := source.meta.get("val"), torch.Tensor):
        if _is_static(given) and _places(val) == _places(given) and share_storage(node, source):
            return source
        if not _is_view(source):
            return None
        source = source.args[0]
    return None


def _is_static(val: torch.Tensor) -> bool:
    return all(type(n) is int for n in (*val.shape, *val.stride(), val.storage_offset()))


def _places(val: torch.Tensor) -> tuple[object, ...]:
    return val.dtype, val.shape, val.stride(), val.storage_offset(), val.is_conj(), val.is_neg()


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
    if not isinstance(reduced, Node) or reduced.target is not torch.ops._c10d_functional.reduce_scatter_tensor.default:
        return None
    rows = reduced.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
    return _cast(graph, node, padded, dtype) if rows == size else None


def _cast(graph: torch.fx.Graph, node: Node, source: object, dtype: Any) -> Node | None:
    assert isinstance(source, Node)
    given = source.meta["val"]
    if not given.is_contiguous():
        return None
    if given.dtype == dtype:
        return source
    with graph.inserting_before(node):
        cast = graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    cast.meta = dict(node.meta)
    return cast


_REWRITES: dict[str, Callable[[torch.fx.Graph, Node], Node | None]] = {
    "weft::pad_shard": _padded,
    "weft::unpad_shard": _unpadded,
}
