"""The signature of a graph: the text that must be equal on every rank.

Ranks compare signatures before the first collective runs. Two graphs with equal signatures issue the same collectives
in the same order, with the same groups, dtypes and payloads, so they cannot hang or mix up gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, is_collective, sizes_differ_by_rank
from weft.capture.step_interface import Return, Role, Update


def signature(step: StepGraph) -> str:
    """One line per operation, in order, with its operands; collectives with group, dtypes, sizes, stage and module.

    What may differ between ranks of a correct program is left out: names of nodes, sizes and integers, and numbers
    computed from them. Batches and shards of uneven parameters have different sizes on each rank.
    """
    names: dict[torch.fx.Node, str] = {}
    lines: list[str] = []
    paths = {entry.name: entry for entry in step.inputs}
    for node in step.graph.nodes:
        if node.op == "placeholder":
            entry = paths[node.name]
            names[node] = entry.path
            lines.append(f"input {entry.path}: {entry.role.value} {entry.sharding or _described(entry.role, node)}")
        elif node.op == "call_function" and not _is_size(node, names):
            names[node] = f"%{len(names)}"
            lines.append(f"{names[node]} = {_target(node)}({_operands(node, names)}){_identity(node)}")
    for what, value in zip(step.outputs, step.results, strict=True):
        place = (
            paths[what.input].path
            if isinstance(what, Update)
            else f"result {what.index}"
            if isinstance(what, Return)
            else what.path
        )
        lines.append(f"{place} <- {names.get(value, 'a number') if isinstance(value, torch.fx.Node) else value}")
    return "\n".join(lines)


def _described(role: Role, node: torch.fx.Node) -> str:
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return type(val).__name__
    return f"{val.dtype}" if role is Role.BATCH else f"{val.dtype} {list(val.shape)}"


def _is_size(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> bool:
    """Whether the node is a size of a tensor or arithmetic on sizes. A capture with fixed sizes has no such nodes."""
    val, inputs = node.meta.get("val"), node.all_input_nodes
    if isinstance(val, (int, torch.SymInt, torch.SymBool)):
        return True
    if isinstance(val, (torch.Tensor, list, tuple)) or node.meta.get("effect"):
        return False
    return bool(inputs) and all(used not in names for used in inputs)


def _target(node: torch.fx.Node) -> str:
    return (
        str(node.target) if hasattr(node.target, "namespace") else getattr(node.target, "__name__", repr(node.target))
    )


def _operands(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return names.get(value, "#")
        if isinstance(value, (list, tuple)):
            inner = [shown(item) for item in value]
            return "[#]" if inner and all(item == "#" for item in inner) else f"[{', '.join(inner)}]"
        return "#" if isinstance(value, int) and not isinstance(value, bool) else str(value)

    return ", ".join([*map(shown, node.args), *(f"{key}={shown(value)}" for key, value in node.kwargs.items())])


def _identity(node: torch.fx.Node) -> str:
    """The identity of a collective besides its operands: group, dtypes, sizes, stage and module."""
    if not is_collective(node):
        return ""
    vals = [used.meta["val"] for used in node.all_input_nodes if isinstance(used.meta.get("val"), torch.Tensor)]
    differ = sizes_differ_by_rank(node.target)
    sizes = ["?" if differ or not isinstance(v.numel(), int) else v.numel() for v in vals]
    return (
        f"  # {group_of(node)}: {[v.dtype for v in vals]} {sizes}; {node.meta.get('stage')} {node.meta.get('module')}"
    )
