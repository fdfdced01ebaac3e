"""Shards on their way to an all-gather: casts, padding and views between an input of the step and a collective."""

from __future__ import annotations

import torch

from weft.capture.graph import WAIT, StepGraph, is_collective
from weft.inductor.runtime.geometry import looks_into

Node = torch.fx.Node

_PREPARATIONS = frozenset({"aten::_to_copy", "aten::constant_pad_nd", "aten::clone", "weft::pad_shard"})


def is_gather(node: Node) -> bool:
    """Whether the node starts an all-gather, of one tensor or of several."""
    return is_collective(node) and "all_gather_into_tensor" in str(node.target)


def from_placeholders(node: Node) -> bool:
    """Whether the inputs of ``node`` come from placeholders with next to no work between."""
    return all(n.op == "placeholder" or (_prepares(n) and from_placeholders(n)) for n in node.all_input_nodes)


def shards(step: StepGraph) -> set[Node]:
    """The nodes between placeholders and all-gathers that prepare shards, and that nothing else reads."""
    found: set[Node] = set()
    for node in reversed(step.graph.nodes):
        only_gathered = bool(node.users) and all(user in found or is_gather(user) for user in node.users)
        if only_gathered and _prepares(node) and from_placeholders(node):
            found.add(node)
    return found


def _prepares(node: Node) -> bool:
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return (name in _PREPARATIONS or looks_into(node)) and node.target is not WAIT and "inplace" not in node.meta
