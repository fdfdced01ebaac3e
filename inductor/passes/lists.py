"""Lists of tensors among the arguments of a graph's calls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.text import POINTERS, TRITON_DTYPES

Node = torch.fx.Node


def alike(lists: Sequence[Sequence[Node]]) -> bool:
    """Whether the lists are equally long, and tensors of one position have the same sizes, places and device."""
    if len({len(nodes) for nodes in lists}) > 1:
        return False
    rows = ([node.meta["val"] for node in row] for row in zip(*lists, strict=True))
    return all(len({(val.shape, _steps(val), val.device) for val in row}) == 1 for row in rows if static(row))


def _steps(val: torch.Tensor) -> tuple[int, ...]:
    """The strides that decide where an element lies: gradients of depthwise convolutions have another one along their
    only channel than weights have."""
    return tuple([stride for size, stride in zip(val.shape, val.stride(), strict=True) if size != 1])


def static(vals: Sequence[torch.Tensor]) -> bool:
    """Whether sizes and strides of all tensors are known numbers."""
    return all(type(size) is int for val in vals for size in (*val.shape, *val.stride()))


def walkable(lists: Sequence[Sequence[Node]]) -> bool:
    """Whether a multi-tensor kernel can walk all these tensors: floats of its kinds, of known sizes, without gaps."""
    vals = [node.meta["val"] for nodes in lists for node in nodes]
    return bool(vals) and static(vals) and all(val.dtype in TRITON_DTYPES and _dense(val) for val in vals)


def _dense(val: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each in a place of its own."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(val.stride(), val.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return val.numel() == 0
        expected *= size
    return True


def readable(scalars: Sequence[Any], beside: Node) -> bool:
    """Whether kernels that walk ``beside`` can read these: numbers, None, and 0-dim tensors on its device."""
    vals = [scalar.meta.get("val") if isinstance(scalar, Node) else scalar for scalar in scalars]
    device = beside.meta["val"].device
    tensors = [val for val in vals if isinstance(val, torch.Tensor)]
    return all(val.device == device and not val.dim() and val.dtype in POINTERS for val in tensors)


def elements_of(nodes: Sequence[Node]) -> Node | None:
    """The node of which ``nodes`` are all elements, in order, or None."""
    if not nodes or any(node.target is not operator.getitem for node in nodes):
        return None
    many = nodes[0].args[0]
    assert isinstance(many, Node)
    in_order = all(node.args == (many, at) for at, node in enumerate(nodes))
    return many if in_order and len(many.meta["val"]) == len(nodes) else None


def same_scalar(values: Sequence[Any]) -> bool:
    """Whether all are one node, or equal numbers."""
    first = values[0]
    return all(value is first or (type(value) is type(first) is not Node and value == first) for value in values)


def list_call(
    graph: torch.fx.Graph,
    node: Node,
    call: MultiTensor,
    arguments: tuple[Any, ...],
    vals: Sequence[Sequence[torch.Tensor]],
) -> list[list[Node]]:
    """Insert ``call`` before ``node``, whose user's line it takes over; returns a node a tensor of its results."""
    kept = {key: node.meta[key] for key in ("frames", "module", "stage") if key in node.meta}

    def pick(source: Node, at: int, val: Any) -> Node:
        picked = graph.call_function(operator.getitem, (source, at))
        picked.meta = {**kept, "val": val}
        return picked

    with graph.inserting_before(node):
        new = graph.call_function(call, arguments)
        new.meta = {**kept, "val": [list(list_) for list_ in vals]}
        lists = [pick(new, at, list(list_)) for at, list_ in enumerate(vals)]
        return [[pick(a, at, val) for at, val in enumerate(list_)] for a, list_ in zip(lists, vals, strict=True)]
