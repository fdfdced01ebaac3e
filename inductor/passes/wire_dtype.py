"""Gradients go over the wire in the dtype they have, and are summed in the dtype they are wanted in.

A wrapper that reduces bfloat16 gradients in float32 casts them first: that is how a collective that sums in the dtype
it sends is told to sum in float32. It doubles the bytes on the wire and in memory, and a transport that sums by itself
needs neither. So a cast that loses nothing and feeds a reduce-scatter alone becomes part of it:

    weft_c10d::reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name, ScalarType dtype)
    weft_c10d::reduce_scatter_tensor_coalesced(Tensor[] inputs, ..., ScalarType dtype) -> Tensor[]
        ``_c10d_functional``'s operations of these names on inputs cast to ``dtype``, which is that of the results. They
        are waited for like those.

Keeps the bits of every result where the operation runs as what it was made from (:func:`expand`, or by itself);
transports that sum in float32 add the same numbers, in the order of the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.passes.fold_casts import holds_exactly
from weft.inductor.passes.lists import list_call

Node = torch.fx.Node

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_library = torch.library.Library("weft_c10d", "FRAGMENT")
_SIGNATURE = "str reduce_op, int group_size, str group_name, ScalarType dtype"
_library.define(f"reduce_scatter_tensor(Tensor input, {_SIGNATURE}) -> Tensor")
_library.define(f"reduce_scatter_tensor_coalesced(Tensor[] inputs, {_SIGNATURE}) -> Tensor[]")


@torch.library.impl(_library, "reduce_scatter_tensor", "CompositeExplicitAutograd")
def _reduce(input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, dtype: torch.dtype) -> torch.Tensor:
    return _c10d.reduce_scatter_tensor.default(input.to(dtype), reduce_op, group_size, group_name)


@torch.library.impl(_library, "reduce_scatter_tensor_coalesced", "CompositeExplicitAutograd")
def _reduce_all(
    inputs: Sequence[torch.Tensor], reduce_op: str, group_size: int, group_name: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    wide = [input.to(dtype) for input in inputs]
    return _c10d.reduce_scatter_tensor_coalesced.default(wide, reduce_op, group_size, group_name)


@torch.library.register_fake("weft_c10d::reduce_scatter_tensor", lib=_library)
def _reduced_like(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, dtype: torch.dtype
) -> torch.Tensor:
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]), dtype=dtype)


@torch.library.register_fake("weft_c10d::reduce_scatter_tensor_coalesced", lib=_library)
def _all_reduced_like(
    inputs: Sequence[torch.Tensor], reduce_op: str, group_size: int, group_name: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    return [_reduced_like(input, reduce_op, group_size, group_name, dtype) for input in inputs]


SUM_BY_THEMSELVES = ("pull", "copy_sum")
"""Transports (:mod:`weft.inductor.comm.transports`) that reduce-scatter in float32 whatever they send."""

_ops = torch.ops.weft_c10d
WIDENING = _ops.reduce_scatter_tensor.default
WIDENING_COALESCED = _ops.reduce_scatter_tensor_coalesced.default
_PLAIN = {
    WIDENING: _c10d.reduce_scatter_tensor.default,
    WIDENING_COALESCED: _c10d.reduce_scatter_tensor_coalesced.default,
}


def wire_dtype(step: StepGraph) -> StepGraph:
    """Let reduce-scatters take over the casts of their inputs, where these lose nothing. Changes ``step``."""
    for node in step.graph.nodes:
        if node.target is not _c10d.reduce_scatter_tensor.default:
            continue
        wide = node.args[0]
        assert isinstance(wide, Node)
        narrow = _narrow(step.graph, wide)
        if narrow is not None:
            node.target = WIDENING
            node.args = (narrow, *node.args[1:], wide.meta["val"].dtype)
            step.graph.erase_node(wide)
    return step


def wire_casts(step: StepGraph) -> StepGraph:
    """:func:`wire_dtype`, where ``knobs.transports`` allows one that sums in float32 by itself: a library would only
    have the casts made again. Changes ``step``."""
    return wire_dtype(step) if may_carry(*SUM_BY_THEMSELVES) else step


def may_carry(*transports: str) -> bool:
    """Whether ``knobs.transports`` allows one of these, with any number of programs."""
    names = {re.sub(r"_\d+$", "", name.strip()) for name in knobs.transports.split(",")}
    return bool(names & {*transports, "all"})


def _narrow(graph: torch.fx.Graph, wide: Node) -> Node | None:
    """What ``wide`` is a cast of, padded as it is; None where it is no cast, loses something, or has other users."""
    pads = getattr(getattr(wide.target, "_schema", None), "name", "") == "weft::pad_shard"
    casts = pads or wide.target is aten._to_copy.default
    if not casts or len(wide.users) > 1 or "inplace" in wide.meta:
        return None
    source, val = wide.args[0], wide.meta["val"]
    assert isinstance(source, Node)
    given = source.meta["val"]
    if given.dtype == val.dtype or not given.is_floating_point() or not holds_exactly(val.dtype, given.dtype):
        return None
    if not pads:
        plain = {"dtype", "device", "layout"}.issuperset(
            name for name, value in wide.kwargs.items() if value is not None
        )
        return source if plain and given.device == val.device and given.is_contiguous() else None
    with graph.inserting_before(wide):
        padded = graph.create_node("call_function", wide.target, (*wide.args[:-1], given.dtype))
    padded.meta = {**wide.meta, "val": _like(val, given.dtype)}
    return padded


def expand(step: StepGraph, node: Node) -> Node:
    """Put casts and a collective of ``_c10d_functional`` in the place of ``node``, one of this file's operations: what
    a library does that sums in the dtype it sends. Changes ``step``; returns the collective."""
    taken: Any = node.args
    given, *rest, dtype = taken
    graph, target = step.graph, _PLAIN[node.target]  # type: ignore[index]
    origin = {key: node.meta[key] for key in ("frames", "module", "stage") if key in node.meta}
    with graph.inserting_before(node):
        if node.target is WIDENING:
            wide: Any = graph.call_function(aten._to_copy.default, (given,), {"dtype": dtype})
            wide.meta = origin | {"val": _like(given.meta["val"], dtype)}
        else:
            (wide,) = list_call(
                graph, node, Cast(dtype), (given,), [[_like(each.meta["val"], dtype) for each in given]]
            )
        made = graph.call_function(target, (wide, *rest))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def _like(val: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous fake of the same sizes."""
    with torch_adapter.only_mode(val.fake_mode):  # type: ignore[attr-defined]
        return torch.empty(val.shape, dtype=dtype, device=val.device)
