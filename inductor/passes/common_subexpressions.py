"""Common subexpressions are computed once.

An operation qualifies if it always gives the same bits for the same operands: no random numbers, no collectives, no
calls with effects, no sizes that depend on data. Four kinds of duplicates stay separate:

- Values that are written in place, or that the user holds after the step. Merging them would force a copy elsewhere.
- Values of different stages, unless they are views, numbers or scalars. A user who recomputes in backward what forward
  had (activation checkpointing) does so to save memory. A shard that is gathered in both stages is merged all the same:
  a schedule can gather a parameter once only if both gathers read one node, and a shard is small.
- Values of different streams, which no event orders.
- A value of which a copy is recorded in the memory of the earlier one (a tensor that the step overwrote with it).

Keeps the bits of every result. What is merged does not depend on sizes, which may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from weft.capture.graph import StepGraph, calls
from weft.capture.node_kinds import is_effect
from weft.inductor.graph.aliasing import SCATTERS, looks_into
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.passes.gather_inputs import gather_inputs
from weft.torch_adapter import OpOverload, storage_key

Node = torch.fx.Node

_NAMESPACES = frozenset({"aten", "prims", "weft"})
# Modules of the functions in expressions over sizes.
_SIZE_ARITHMETIC = frozenset({"_operator", "builtins", "math", "torch"})
_UNREPEATABLE = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)


@keeps_bits
def common_subexpressions(step: StepGraph) -> StepGraph:
    """Replace each node by an earlier one of the same operation on the same operands. Changes ``step``."""
    escapes = escaping(step)
    merged_across_stages = gather_inputs(step)
    known: dict[Hashable, Node] = {}
    for node in calls(step.graph):
        if node in escapes or not _repeatable(node):
            continue
        first = known.setdefault(_key(node, "" if node in merged_across_stages else node.meta.get("stage", "")), node)
        if first is not node and not _copied_to(node, first):
            if first.meta.get("val") is None:  # a number inside an expression over sizes
                first.meta["val"] = node.meta.get("val")
            node.replace_all_uses_with(first)
            step.graph.erase_node(node)
    return step


def _copied_to(node: Node, first: Node) -> bool:
    """Whether a user of ``node`` that is no view has the memory of ``first``."""
    memory = _memory(first)
    return memory is not None and any(_memory(user) == memory and not looks_into(user) for user in node.users)


def _memory(node: Node) -> Hashable:
    val = node.meta.get("val")
    return storage_key(val) if isinstance(val, torch.Tensor) else None


def _repeatable(node: Node) -> bool:
    if is_effect(node) or "inplace" in node.meta or node.target in SCATTERS:
        return False
    target = node.target
    if isinstance(target, OpOverload):
        return target.namespace in _NAMESPACES and _UNREPEATABLE.isdisjoint(target.tags) and not _uninitialized(target)
    return getattr(target, "__module__", "") in _SIZE_ARITHMETIC


def _uninitialized(target: OpOverload) -> bool:
    return target._schema.name.startswith(("aten::empty", "aten::new_empty"))


def _key(node: Node, stage: str) -> Hashable:
    stage = "" if _is_free(node) else stage
    kwargs = tuple((name, _operand(node.kwargs[name])) for name in sorted(node.kwargs))
    return node.target, _operand(node.args), kwargs, _layout(node.meta.get("val")), stage, node.meta.get("stream", 0)


def _is_free(node: Node) -> bool:
    val = node.meta.get("val")
    scalar = val.dim() == 0 if isinstance(val, torch.Tensor) else not isinstance(val, (list, tuple))
    return scalar or looks_into(node)


def _operand(value: Any) -> Hashable:
    """A key that distinguishes 1, 1.0 and True, and 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple([_operand(item) for item in value])
    if isinstance(value, slice):
        return "slice", _operand(value.start), _operand(value.stop), _operand(value.step)
    return value if isinstance(value, Node) or value is None else (type(value), repr(value))


def _layout(val: Any) -> Hashable:
    """Sizes, strides, dtype and device: the same operation can return another layout (a view that was written back)."""
    if isinstance(val, (list, tuple)):
        return tuple([_layout(item) for item in val])
    if not isinstance(val, torch.Tensor):
        return None
    numbers = (*val.shape, *val.stride(), val.storage_offset())
    return val.dtype, val.device, *(n if type(n) is int else str(n) for n in numbers)
