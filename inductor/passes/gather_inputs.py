"""The inputs of all-gathers: casts, padding and views between an input of the step and a collective."""

from __future__ import annotations

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.collectives import ALL_GATHER, is_kind
from weft.inductor.graph.operations import op_name

Node = torch.fx.Node

_PREPARATIONS = frozenset({"aten::_to_copy", "aten::constant_pad_nd", "aten::clone", "weft::pad_shard"})


def is_gather(node: Node) -> bool:
    """Whether the node starts an all-gather, of one tensor or of several."""
    return is_kind(node, ALL_GATHER.kind)


def from_placeholders(node: Node) -> bool:
    """Whether the inputs of ``node`` are placeholders, or casts, padding and views of them."""
    return all(n.op == "placeholder" or (_prepares(n) and from_placeholders(n)) for n in node.all_input_nodes)


def gather_inputs(step: StepGraph) -> set[Node]:
    """The nodes between placeholders and all-gathers that nothing else reads."""
    nodes: set[Node] = set()
    for node in reversed(step.graph.nodes):
        only_gathered = bool(node.users) and all(user in nodes or is_gather(user) for user in node.users)
        if only_gathered and _prepares(node) and from_placeholders(node):
            nodes.add(node)
    return nodes


def _prepares(node: Node) -> bool:
    name = op_name(node)
    return (name in _PREPARATIONS or looks_into(node)) and node.target is not WAIT and "inplace" not in node.meta
