"""Values that are the same on all ranks of a process group, as far as the graph shows it.

A pass that lets one rank compute what the others read must know this: what ranks compute between their collectives is
their own affair, and need not be the same. What is shown is that

- a result of an all-reduce, an all-gather or a broadcast over the group is the same on its ranks;
- so is an input that is the local tensor of a DTensor which is replicated over the group. That its ranks have equal
  tensors is what such a DTensor states, and it is not checked;
- so is what a deterministic operation computes from such values and from constants, if all ranks call it alike
  (:func:`described` is the text to compare);
- so is the result of a collective over another dimension of the same mesh, whose partners of the ranks of this group
  are such groups themselves: a parameter that FSDP shards over data-parallel ranks is gathered there.

Numbers from Python, batches, buffers that are no DTensors and random draws are not.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT, group_of, is_collective, is_effect
from weft.inductor.graph.collectives import KINDS, kind_of
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

_SAME_EVERYWHERE = (KINDS["all_reduce"], KINDS["all_gather"], KINDS["broadcast"])
_NAMESPACES = frozenset({"aten", "prims", "weft"})
# Results that operands do not determine. Uninitialized memory is found by name.
_UNDETERMINED = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)


def replicated_over(step: StepGraph, group: str) -> set[Node]:
    """The nodes of ``step`` whose values are the same on all ranks of the process group of that name."""
    axes = {entry.name: dict(entry.axes) for entry in step.inputs}
    meshes = [of.keys() for of in axes.values() if group in of]
    # Other dimensions of a mesh: ranks that differ in one of them alone are in one group of `group`'s kind.
    across = {name for mesh in meshes for name in mesh} - {group}
    found: set[Node] = set()
    for node in step.graph.nodes:
        if node.op == "placeholder":
            same = axes[node.name].get(group, False)
        elif node.op != "call_function":
            same = False
        elif is_collective(node) and group_of(node) == group:
            same = kind_of(node) in _SAME_EVERYWHERE
        else:
            same = found.issuperset(node.all_input_nodes) and _is_determined(node, across)
        if same:
            found.add(node)
    return found


def _is_determined(node: Node, across: set[str]) -> bool:
    """Whether ranks of one group get the same from equal operands; ``across``: other dimensions of its mesh."""
    if node.meta.get("effect"):
        return False
    if node.target in (operator.getitem, WAIT):
        return True
    # Operations that take a group compute with the rank in it, which differs between the ranks of that group.
    if group_of(node):
        return group_of(node) in across
    target = node.target
    if is_effect(node) or not isinstance(target, OpOverload) or target.namespace not in _NAMESPACES:
        return False
    return _UNDETERMINED.isdisjoint(target.tags) and "empty" not in target._schema.name


def described(nodes: Iterable[Node], step: StepGraph, group: str) -> str:
    """What is computed by ``nodes`` and by all that they depend on, up to inputs and to collectives over ``group``.

    The text is the same on all ranks that compute the same: without names of nodes, lines and numbers of devices.
    """
    inputs = {entry.name: entry for entry in step.inputs}
    numbers: dict[Node, int] = {}
    lines: list[str] = []

    def shown(value: Any) -> Any:
        if isinstance(value, Node):
            return f"%{numbers[value]}"
        if isinstance(value, (list, tuple)):
            return [shown(item) for item in value]
        return value.type if isinstance(value, torch.device) else str(value)

    def line(node: Node) -> str:
        val = node.meta.get("val")
        kind = f"{val.dtype} {list(val.shape)}" if isinstance(val, torch.Tensor) else ""
        if node.op == "placeholder":
            entry = inputs[node.name]
            return f"{entry.path} {entry.sharding} {kind}"
        if ends(node):
            return f"{node.target} {node.meta.get('members')} {kind}"
        named = [(name, shown(node.kwargs[name])) for name in sorted(node.kwargs)]
        return f"{node.target} {shown(node.args)} {named} {kind}"

    def ends(node: Node) -> bool:
        return node.op == "placeholder" or (is_collective(node) and group_of(node) == group)

    for root in nodes:
        todo = [root]
        while todo:
            node = todo[-1]
            used = [] if ends(node) else node.all_input_nodes
            missing = [each for each in used if each not in numbers]
            if missing and node not in numbers:
                todo += missing
                continue
            todo.pop()
            if node not in numbers:
                lines.append(line(node))
                numbers[node] = len(numbers)
    return "\n".join(lines)
