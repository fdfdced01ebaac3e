"""Gradients are sent in the dtype they have and summed in the dtype that is asked for.

A wrapper that reduces bfloat16 gradients in float32 casts them first, since a library sums in the dtype that it sends.
The cast doubles the bytes on the wire and in memory. A transport that sums by itself needs neither. So a lossless cast
that feeds only a reduce-scatter becomes part of it: the reduce-scatter becomes an operation of
:mod:`weft.inductor.graph.widening_ops`.

Keeps the bits of every result where the operation runs as a cast and a library call (:func:`expand`). Transports that
sum in float32 add the same numbers, in the order of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_meta import meta_of, same_meta
from weft.inductor.graph.collectives import (
    REDUCE_SCATTER,
    WIDENING_REDUCE_SCATTER,
    collective_op,
    knob_allows,
    payload_of,
    sum_dtype_of,
    transports_of,
)
from weft.inductor.graph.operations import op_name
from weft.inductor.graph.pass_runner import keeps_bits, required
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.passes.fold_casts import represents_exactly
from weft.inductor.passes.tensor_lists import multi_tensor_call
from weft.transport_rows import LIBRARIES

Node = torch.fx.Node

aten = torch.ops.aten


def wire_dtype(step: StepGraph) -> StepGraph:
    """Move lossless casts of the inputs of reduce-scatters into the reduce-scatters. Changes ``step``."""
    for node in step.graph.nodes:
        if node.target is not REDUCE_SCATTER.op:
            continue
        wide = node.args[0]
        assert isinstance(wide, Node)
        narrow = _narrow(step.graph, wide)
        if narrow is not None:
            # The dtype to sum in becomes an operand: the graph still says what is computed, whichever transport carries
            # it.
            node.target = WIDENING_REDUCE_SCATTER.op
            node.args = (narrow, *node.args[1:], wide.meta["val"].dtype)
            step.graph.erase_node(wide)
    return step


@keeps_bits
def wire_casts(step: StepGraph) -> StepGraph:
    """:func:`wire_dtype`, if ``knobs.transports`` allows a transport that sums in float32 by itself; for a library the
    casts would only be inserted again. Changes ``step``."""
    sums = transports_of(REDUCE_SCATTER.kind, sums_in_float32=True)
    return wire_dtype(step) if knob_allows(sums) else step


def _narrow(graph: torch.fx.Graph, wide: Node) -> Node | None:
    """The source of the cast ``wide``, padded as ``wide`` is. None where ``wide`` is no cast, is not lossless, or has
    other users."""
    # Another reader needs the wide tensor in memory, and a value that is written in place is no plain cast.
    pads = op_name(wide) == "weft::pad_shard"
    casts = pads or wide.target is aten._to_copy.default
    if not casts or len(wide.users) > 1 or "inplace" in wide.meta:
        return None
    source, val = wide.args[0], wide.meta["val"]
    assert isinstance(source, Node)
    source_val = source.meta["val"]
    if (
        source_val.dtype == val.dtype
        or not source_val.is_floating_point()
        or not represents_exactly(val.dtype, source_val.dtype)
    ):
        return None
    if not pads:
        plain = {"dtype", "device", "layout"}.issuperset(
            name for name, value in wide.kwargs.items() if value is not None
        )
        return source if plain and source_val.device == val.device and source_val.is_contiguous() else None
    with graph.inserting_before(wide):
        padded = graph.create_node("call_function", wide.target, (*wide.args[:-1], source_val.dtype))
    padded.meta = meta_of(wide, val=_like(val, source_val.dtype))
    return padded


@required
@keeps_bits
def library_casts(step: StepGraph) -> StepGraph:
    """:func:`expand` the collectives that widen and whose chosen transport is a library. Changes ``step``.

    The order of issue is searched after it: the casts take time, and what they make is live until the collective has
    ended.
    """
    for node in step.collectives():
        if node.meta["transport"] in LIBRARIES and sum_dtype_of(node) is not None:
            expand(step, node)
    return step


def expand(step: StepGraph, node: Node) -> Node:
    """Replace ``node``, a collective that widens, by casts and the library's collective, which sums in the dtype that
    it sends. Changes ``step``; returns the collective."""
    graph, row, dtype = step.graph, collective_op(node.target), sum_dtype_of(node)
    assert row is not None
    assert dtype is not None
    plain = collective_op(row.library)
    assert plain is not None
    # A bucket gets one multi-tensor cast instead of a kernel per gradient.
    coalesced = node.target is row.coalesced
    target: Any = plain.coalesced if coalesced else plain.op
    with graph.inserting_before(node):
        if not coalesced:
            (operand,) = payload_of(node)
            wide: Any = graph.call_function(aten._to_copy.default, (operand,), {"dtype": dtype})
            wide.meta = meta_of(node, val=_like(operand.meta["val"], dtype))
        else:
            operands = payload_of(node)
            (wide,) = multi_tensor_call(
                graph, node, Cast(dtype), (operands,), [[_like(each.meta["val"], dtype) for each in operands]]
            )
        given = [wide if at == row.payload else value for at, value in enumerate(node.args) if at != row.sum_dtype]
        collective = graph.call_function(target, tuple(given))
    collective.meta = same_meta(node)
    node.replace_all_uses_with(collective)
    graph.erase_node(node)
    return collective


def _like(val: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous fake of the same sizes."""
    return torch_adapter.contiguous_fake(val.fake_mode, val.device, dtype, val.shape)  # type: ignore[attr-defined]
