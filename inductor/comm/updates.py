"""Optimizer updates by bucket: tensors whose gradients come together are updated together, as soon as these are there.

A fused update waits for the last gradient of all. Where nothing else holds it back, it is done in parts, one for each
collective that the tensors' gradients come from last: the parts of the first buckets hide the last collective, and
their gradients are let go of. Nothing is gained where all parts wait for the same, as sharded updates wait for the
norm that clips them: there the update stays whole. Where gradients are reduced to shards and gathered again, the norm
follows from the shards, and the parts hide the last gathers.

Every tensor is updated by itself, so the bits stay the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph, is_collective
from weft.inductor.multi_tensor.operation import MultiTensor

Node = torch.fx.Node


def split_updates(step: StepGraph) -> StepGraph:
    """Split the multi-tensor updates of ``step``, whose collectives are merged already. Changes ``step``."""
    updates = [node for node in step.graph.nodes if isinstance(node.target, MultiTensor) and node.target.updated]
    if updates:
        collectives = _collectives(step)
        for update in updates:
            parts = _parts(update, collectives)
            if len(parts) > 1:
                _split(step.graph, update, parts)
    return step


def _collectives(step: StepGraph) -> dict[Node, int]:
    """The collectives that each node follows: bit n stands for the n-th of the step."""
    found: dict[Node, int] = {}
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
    """The tensors of an update, by the last collective that they wait for and all others do not, in its order. None
    where one tensor holds a number of each (:mod:`weft.inductor.passes.numbers_to_memory`), which is not split."""
    given: tuple[Any, ...] = update.args
    common = 0
    for shared in given:
        if isinstance(shared, Node):
            common |= collectives[shared]
            if getattr(shared.meta["val"], "ndim", 0):
                return []
    parts: dict[int, list[int]] = {}
    for at, row in enumerate(zip(*filter(_is_list, given), strict=True)):
        bits = 0
        for each in row:  # a tensor, or a number
            bits |= collectives.get(each, 0)
        parts.setdefault((bits & ~common).bit_length(), []).append(at)
    return [parts[last] for last in sorted(parts)]


def _is_list(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and len(given) > 0


def _split(graph: torch.fx.Graph, update: Node, parts: Sequence[Sequence[int]]) -> None:
    """Put a call for each part in the place of ``update``, whose results go on as they are, elements of these calls."""
    place = {at: (part, number) for part, listed in enumerate(parts) for number, at in enumerate(listed)}
    with graph.inserting_before(update):
        calls = [_call(graph, update, part) for part in parts]
        lists: dict[tuple[int, Any], Node] = {}
        for old in [*update.users]:
            which: Any = old.args[1]
            for element in [*old.users]:
                at: Any = element.args[1]
                part, number = place[at]
                if (part, which) not in lists:
                    picked = graph.call_function(operator.getitem, (calls[part], which))
                    picked.meta = {**old.meta, "val": [old.meta["val"][at] for at in parts[part]]}
                    lists[part, which] = picked
                element.args = (lists[part, which], number)
            graph.erase_node(old)
    graph.erase_node(update)


def _call(graph: torch.fx.Graph, update: Node, part: Sequence[int]) -> Node:
    target: Any = update.target
    given: tuple[Any, ...] = update.args
    call = graph.call_function(target, tuple([each[at] for at in part] if _is_list(each) else each for each in given))
    call.meta = {**update.meta, "val": [[vals[at] for at in part if vals] for vals in update.meta["val"]]}
    return call
