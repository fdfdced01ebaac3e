"""Multi-tensor calls in a graph: which lists of tensors their kernels accept, and how a call is inserted."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.capture.node_meta import meta_of
from weft.inductor.graph.aliasing import is_lazy
from weft.inductor.multi_tensor.chunked_kernel import COLUMN_DTYPES, SCALAR_DTYPES
from weft.inductor.multi_tensor.operation import MultiTensor

Node = torch.fx.Node


def same_layouts(lists: Sequence[Sequence[Node]]) -> bool:
    """Whether the lists are equally long, and tensors at the same position have the same sizes, strides and device."""
    if len({len(nodes) for nodes in lists}) > 1:
        return False
    rows = ([node.meta["val"] for node in row] for row in zip(*lists, strict=True))
    return all(len({(val.shape, _strides(val), val.device) for val in row}) == 1 for row in rows if is_static(row))


def _strides(val: torch.Tensor) -> tuple[int, ...]:
    """The strides of dimensions larger than 1. Others do not matter: gradients of depthwise convolutions have another
    stride along their only channel than weights have."""
    return tuple([stride for size, stride in zip(val.shape, val.stride(), strict=True) if size != 1])


def is_static(vals: Sequence[torch.Tensor]) -> bool:
    """Whether sizes and strides of all tensors are known numbers."""
    return all(type(size) is int for val in vals for size in (*val.shape, *val.stride()))


def iterable_by_kernels(lists: Sequence[Sequence[Node]]) -> bool:
    """Whether a multi-tensor kernel can iterate over these tensors: dtypes of ``COLUMN_DTYPES``, static and dense,
    with the values that memory holds."""
    vals = [node.meta["val"] for nodes in lists for node in nodes]
    stored = is_static(vals) and not any(map(is_lazy, vals))
    return bool(vals) and stored and all(val.dtype in COLUMN_DTYPES and _dense(val) for val in vals)


def _dense(val: torch.Tensor) -> bool:
    """Whether the elements fill one contiguous range of memory without overlap, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(val.stride(), val.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return val.numel() == 0
        expected *= size
    return True


def readable_by_kernels(scalars: Sequence[Any], beside: Node) -> bool:
    """Whether kernels over ``beside`` can read these scalars: numbers, None, and 0-dim tensors on its device."""
    vals = [scalar.meta.get("val") if isinstance(scalar, Node) else scalar for scalar in scalars]
    device = beside.meta["val"].device
    tensors = [val for val in vals if isinstance(val, torch.Tensor)]
    return all(val.device == device and not val.dim() and val.dtype in SCALAR_DTYPES for val in tensors)


def list_of_elements(nodes: Sequence[Node]) -> Node | None:
    """The list node of which ``nodes`` are all elements, in order; None where there is none."""
    if not nodes or any(node.target is not operator.getitem for node in nodes):
        return None
    many = nodes[0].args[0]
    assert isinstance(many, Node)
    in_order = all(node.args == (many, at) for at, node in enumerate(nodes))
    return many if in_order and len(many.meta["val"]) == len(nodes) else None


def equal_scalars(values: Sequence[Any]) -> bool:
    """Whether all are the same node, or equal numbers."""
    first = values[0]
    return all(value is first or (type(value) is type(first) is not Node and value == first) for value in values)


def multi_tensor_call(
    graph: torch.fx.Graph,
    node: Node,
    call: MultiTensor,
    arguments: tuple[Any, ...],
    vals: Sequence[Sequence[torch.Tensor]],
) -> list[list[Node]]:
    """Insert ``call`` before ``node`` with the metadata of ``node``. Returns a node per tensor of each result list."""

    def pick(source: Node, at: int, val: Any) -> Node:
        picked = graph.call_function(operator.getitem, (source, at))
        picked.meta = meta_of(node, val=val)
        return picked

    with graph.inserting_before(node):
        new = graph.call_function(call, arguments)
        new.meta = meta_of(node, val=[list(list_) for list_ in vals])
        lists = [pick(new, at, list(list_)) for at, list_ in enumerate(vals)]
        return [[pick(a, at, val) for at, val in enumerate(list_)] for a, list_ in zip(lists, vals, strict=True)]


def replace_elements(pairs: Iterable[tuple[Node, Node]]) -> None:
    """Let all users of the first node of each pair read the second. No first node is also the second of a pair.

    The output of a step reads every element of an update: replaced one by one, each would rewrite the whole list.
    """
    new: dict[Node, Node] = {}
    readers: dict[Node, None] = {}
    for old, replacement in pairs:
        new[old] = replacement
        readers |= old.users
    for reader in readers:
        args, kwargs = torch.fx.node.map_arg((reader.args, reader.kwargs), lambda used: new.get(used, used))  # type: ignore
        reader.args, reader.kwargs = args, kwargs
