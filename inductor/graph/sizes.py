"""Tensors, symbols and bytes of the fake values that nodes record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch

from weft import torch_adapter

UNKNOWN = 1 << 62  # larger than any number of bytes


def tensors_in(val: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, in order."""
    if isinstance(val, torch.Tensor):
        return [val]
    found: list[torch.Tensor] = []
    # Most lists hold tensors alone, some of them thousands: no call for each.
    for item in val if isinstance(val, (list, tuple)) else ():
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += tensors_in(item)
    return found


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """The fake tensors of a node's result, in lists too, in order."""
    return tensors_in(node.meta.get("val"))


def symbols_of(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The symbols of fake values: of numbers, and of the sizes, strides and offsets of tensors, in lists too."""
    return {symbol for number in _numbers_in([*values]) for symbol in torch_adapter.expression(number).free_symbols}


def _numbers_in(val: Any) -> Iterator[Any]:
    if isinstance(val, (list, tuple)):
        for item in val:
            yield from _numbers_in(item)
    elif isinstance(val, torch.Tensor):
        strided = (*val.stride(), val.storage_offset()) if val.layout is torch.strided else ()
        yield from (n for n in (*val.shape, *strided) if type(n) is not int)
    elif isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield val


def spanned(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from the first element of a tensor to behind its last; 0 for a tensor without elements."""
    return 0 if 0 in sizes else 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def may_overlap(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether elements of a tensor may share memory: windows of ``unfold``, an expanded tensor. False for symbols."""
    if any(type(n) is not int for n in (*sizes, *strides)) or 0 in sizes:
        return False
    last = 0  # where the last element of the inner dimensions lies
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1):
        if stride <= last:
            return True
        last += (size - 1) * stride
    return False


def layout_text(val: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, device, sizes and strides of a tensor, to be compared. As text: comparing symbols may add guards."""
    return val.dtype, val.device, *map(str, val.shape), *map(str, val.stride())


def node_bytes(node: torch.fx.Node) -> int:
    """Bytes of a node's tensors, 0 for a number; ``UNKNOWN``, more than any limit, where only the data decides."""
    val = node.meta.get("val")  # nodes that compute sizes have none
    items = val if isinstance(val, (list, tuple)) else [val]
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if any(type(size) is not int for tensor in tensors for size in tensor.shape):
        return UNKNOWN
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
