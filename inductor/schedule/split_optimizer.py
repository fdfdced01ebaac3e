"""Optimizer updates are split by bucket, so that a parameter is updated as soon as its gradient is reduced.

A fused update waits for the last gradient of all. Where nothing else delays it, it is split into one part per
collective that the gradients of its tensors come from last. The parts of the first buckets then overlap with the last
collective, and their gradients are freed earlier. Splitting gains nothing where all parts wait for the same value, as
sharded updates do for the gradient norm that clips them: there the update stays whole. Where gradients are reduced to
shards and gathered again, the norm follows from the shards, and the parts overlap with the last all-gathers.

Every tensor is updated by itself, so the bits stay the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective
from weft.capture.node_meta import same_meta
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.multi_tensor.operation import MultiTensor

Node = torch.fx.Node


@keeps_bits
def split_updates(step: StepGraph) -> StepGraph:
    """Split the multi-tensor updates of ``step``, whose collectives are merged already. Changes ``step``."""
    # After the merge: a part per collective is a part per bucket then.
    updates = [node for node in step.graph.nodes if isinstance(node.target, MultiTensor) and node.target.updated]
    if updates:
        collectives = _collectives(step)
        for update in updates:
            parts = _parts(update, collectives)
            # Each part is a kernel launch of its own, which pays only if parts can start at different times.
            if len(parts) > 1:
                _split(step.graph, update, parts)
    return step


def _collectives(step: StepGraph) -> dict[Node, int]:
    """By node, the collectives that it depends on, as a bit mask: bit n stands for the n-th collective of the step."""
    found: dict[Node, int] = {}
    # Masks are Python integers: a union costs one operation for 64 collectives, where a set would be copied at every
    # node.
    count = 0
    for node in step.graph.nodes:
        bits = 0
        for used in node.all_input_nodes:
            bits |= found[used]
        if is_collective(node):
            bits |= 1 << count
            count += 1
        found[node] = bits
    return found


def _parts(update: Node, collectives: dict[Node, int]) -> list[list[int]]:
    """The tensors of an update, grouped by the last collective that they, but not all tensors, wait for; in order of
    these collectives. Empty if one tensor holds a number for each of them
    (:mod:`weft.inductor.passes.scalars_to_memory`): it cannot be split."""
    arguments: tuple[Any, ...] = update.args
    common = 0
    for shared in arguments:
        if isinstance(shared, Node):
            # What all tensors share: the learning rate, the coefficient that clips. Its collectives delay every part.
            common |= collectives[shared]
            if getattr(shared.meta["val"], "ndim", 0):
                return []
    parts: dict[int, list[int]] = {}
    for at, row in enumerate(zip(*filter(_is_list, arguments), strict=True)):
        bits = 0
        # A collective that all tensors wait for, such as the one behind the norm that clips, delays every part alike.
        for each in row:  # a tensor, or a number
            bits |= collectives.get(each, 0)
        # The highest bit: the last of its collectives in the graph. As long as the order of issue is not known, that is
        # the best guess of which one ends last.
        parts.setdefault((bits & ~common).bit_length(), []).append(at)
    return [parts[last] for last in sorted(parts)]


def _is_list(arguments: Any) -> bool:
    return isinstance(arguments, (list, tuple)) and len(arguments) > 0


def _split(graph: torch.fx.Graph, update: Node, parts: Sequence[Sequence[int]]) -> None:
    """Replace ``update`` by one call per part. Readers of its results read elements of these calls."""
    # Where each tensor of the whole update has gone.
    place = {at: (part, number) for part, listed in enumerate(parts) for number, at in enumerate(listed)}
    with graph.inserting_before(update):
        calls = [_call(graph, update, part) for part in parts]
        lists: dict[tuple[int, Any], Node] = {}
        # An update returns lists. `old` picks a list, `element` a tensor of it, which is all that others read.
        for old in [*update.users]:
            which: Any = old.args[1]
            for element in [*old.users]:
                at: Any = element.args[1]
                part, number = place[at]
                if (part, which) not in lists:
                    picked = graph.call_function(operator.getitem, (calls[part], which))
                    picked.meta = same_meta(old, val=[old.meta["val"][at] for at in parts[part]])
                    lists[part, which] = picked
                element.args = (lists[part, which], number)
            graph.erase_node(old)
    graph.erase_node(update)


def _call(graph: torch.fx.Graph, update: Node, part: Sequence[int]) -> Node:
    target: Any = update.target
    arguments: tuple[Any, ...] = update.args
    chosen = tuple([each[at] for at in part] if _is_list(each) else each for each in arguments)
    call = graph.call_function(target, chosen)
    call.meta = same_meta(update, val=[[vals[at] for at in part if vals] for vals in update.meta["val"]])
    return call
