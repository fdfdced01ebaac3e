"""Bytes of what nodes compute."""

from __future__ import annotations

import math

import torch

UNKNOWN = 1 << 62  # larger than any number of bytes


def node_bytes(node: torch.fx.Node) -> int:
    """Bytes of a node's tensors; ``UNKNOWN``, more than any limit, where only the data decides."""
    val = node.meta["val"]
    items = val if isinstance(val, (list, tuple)) else [val]
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if any(type(size) is not int for tensor in tensors for size in tensor.shape):
        return UNKNOWN
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
