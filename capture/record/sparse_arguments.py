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


def with_parts(leaves: list[Any], spec: Any) -> tuple[list[Any], Any]:
    """These leaves and their spec with the parts of sparse matrices in the place of these."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.layout is torch.sparse_coo for leaf in leaves):
        return leaves, spec
    return torch_adapter.flatten(torch_adapter.unflatten([_apart(leaf) for leaf in leaves], spec))


def _apart(leaf: Any) -> Any:
    plain = type(leaf) is torch.Tensor and not leaf.requires_grad
    parts = sparse_parts(leaf) if plain else None
    if parts is None:
        return leaf
    return SparseArgument([*parts.values(), torch.zeros(()).expand(leaf.shape)], leaf.is_coalesced())


def _together(parts: list[Any], coalesced: bool) -> Any:
    """What the step gets of the fakes of the parts; the node again of all else."""
    indices, values, sizes = parts
    if not isinstance(indices, FakeTensor):
        return SparseArgument(parts, coalesced)
    with torch_adapter.only_mode(indices.fake_mode):
        # Torch's function for this takes plain numbers as sizes.
        make = torch.ops.aten._sparse_coo_tensor_unsafe.default
        matrix = make(indices, values, list(sizes.shape), is_coalesced=coalesced)
    setattr(matrix, PARTS, (indices, values))
    return matrix


torch_adapter.register_sequence(
    SparseArgument,
    lambda matrix: (matrix.parts, matrix.coalesced),
    _together,
    ("indices()", "values()", "shape"),
)
