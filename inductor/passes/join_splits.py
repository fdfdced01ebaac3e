"""The concatenation of all equal parts of a tensor along another dimension becomes one transposed copy, or none.

DTensor gathers along dimension d by an all-gather along dimension 0, a split into one part a rank, and a concatenation
along d; before a reduce-scatter it does the reverse. So the graph of a tensor-parallel step grows with the number of
ranks: 812 nodes at 2 ranks and 2,114 at 64 for two layers of a transformer. With ``n`` parts of size ``s``::

    cat([part_0, ..., part_n-1], b)   of   split(x, s, a)      is      x.unflatten(a, (n, s)).movedim(a, b).flatten(b)

whose copy moves no data where the dimensions between ``a`` and ``b`` have size 1, as with a batch of one sequence per
rank. ``fold_casts`` then drops it.

Keeps the bits of every result.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from weft.capture.graph import StepGraph, drop_dead
from weft.inductor.graph.emitter import emitter
from weft.inductor.graph.pass_runner import keeps_bits

Node = torch.fx.Node

aten = torch.ops.aten


@keeps_bits
def join_splits(step: StepGraph) -> StepGraph:
    """Replace each concatenation of all parts of a split by a transposed copy. Changes ``step``."""
    for node in list(step.graph.nodes):
        if node.target is aten.cat.default and (split := _split_of(node)) is not None:
            _transpose(step, node, split)
    drop_dead(step.graph)
    return step


def _split_of(cat: Node) -> Node | None:
    """The split whose parts, all of them, in order and of one static size, ``cat`` puts together."""
    parts = cat.args[0]
    val = cat.meta["val"]
    if not isinstance(parts, (list, tuple)) or not all(getattr(p, "target", None) is operator.getitem for p in parts):
        return None
    split = parts[0].args[0]  # type: ignore[union-attr]
    if split.target is not aten.split.Tensor or [p.args for p in parts] != [(split, at) for at in range(len(parts))]:  # type: ignore[union-attr]
        return None
    vals = split.meta["val"]
    # Channels-last parts are put together into a channels-last tensor, a tensor of symbolic size has no static view.
    static = all(type(size) is int for size in val.shape) and val.is_contiguous()
    equal = len(vals) == len(parts) and all(part.shape == vals[0].shape for part in vals)
    return split if static and equal else None


def _transpose(step: StepGraph, cat: Node, split: Node) -> None:
    source: Any = split.args[0]
    val, part, count = source.meta["val"], split.meta["val"][0], len(split.meta["val"])
    cut = _dimension(split, 2, val.dim())
    joined = _dimension(cat, 1, val.dim())
    shape = list(cat.meta["val"].shape)
    with step.graph.inserting_before(cat):
        emit = emitter(step.graph, cat)
        blocks = emit(aten.view.default, source, [*val.shape[:cut], count, *part.shape[cut:]])
        order = [at for at in range(val.dim() + 1) if at != cut]
        order.insert(joined, cut)
        moved = emit(aten.permute.default, blocks, order)
        if moved.meta["val"].is_contiguous():
            # Strides of dimensions of size 1 differ, so this order alone does not show that nothing moves.
            whole = emit(aten.view.default, source if val.is_contiguous() else moved, shape)
            result = emit(aten.clone.default, whole, memory_format=torch.contiguous_format)
        else:
            copy = emit(aten.clone.default, moved, memory_format=torch.contiguous_format)
            result = emit(aten.view.default, copy, shape)
    cat.replace_all_uses_with(result)


def _dimension(node: Node, at: int, dims: int) -> int:
    """The dimension that an operation is given as its argument number ``at``; 0 by default."""
    given: Any = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    return given % dims
