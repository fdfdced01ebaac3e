"""Sparse matrices among the arguments: in their place come their indices and values, which a graph can hold.

A batch of graphs brings an adjacency matrix of its own. The leaves of the arguments have its indices, its values and a
tensor of one element that is expanded to its sizes: all sizes may then change from call to call, as those of other
tensors do. The step is given a fake sparse tensor, of which :mod:`weft.capture.record.sparse_products` knows the parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.state.tensor_memory import sparse_parts

PARTS = "_weft_parts"
"""The attribute of a fake sparse tensor that has its indices and values."""


class SparseArgument:
    """A sparse matrix in coordinates as a node of a pytree.

    Args:
        parts: its indices, its values, and a tensor of its sizes.
        coalesced: whether it is.
    """

    def __init__(self, parts: list[torch.Tensor], coalesced: bool) -> None:
        self.parts = parts
        self.coalesced = coalesced


def apart(leaves: list[Any], spec: Any) -> Any:
    """The tree of these leaves with a node in the place of each sparse matrix; None where there is none."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.layout is torch.sparse_coo for leaf in leaves):
        return None
    return torch_adapter.unflatten([_apart(leaf) for leaf in leaves], spec)


def _apart(leaf: Any) -> Any:
    plain = type(leaf) is torch.Tensor and not leaf.requires_grad
    parts = sparse_parts(leaf) if plain else None
    if parts is None:
        return leaf
    return SparseArgument([*parts.values(), torch.zeros(()).expand(leaf.shape)], leaf.is_coalesced())


def _together(parts: list[Any], coalesced: bool) -> Any:
    """A sparse matrix of its parts; of fakes, what the step gets in a capture."""
    indices, values, sizes = parts
    # Torch's function in Python takes plain numbers as sizes.
    make = torch.ops.aten._sparse_coo_tensor_unsafe.default
    if not all(isinstance(part, FakeTensor) for part in parts):
        return make(indices, values, list(sizes.shape), is_coalesced=coalesced)
    with torch_adapter.only_mode(indices.fake_mode):
        matrix = make(indices, values, list(sizes.shape), is_coalesced=coalesced)
    setattr(matrix, PARTS, (indices, values))
    return matrix


torch_adapter.register_parts(
    SparseArgument,
    lambda matrix: (matrix.parts, matrix.coalesced),
    _together,
    lambda *_: [("indices()",), ("values()",), ("shape",)],
)
