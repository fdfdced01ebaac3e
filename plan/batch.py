"""A call of a step with another batch."""

from __future__ import annotations

from typing import Any

import torch

from weft import torch_adapter


def with_batch(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with another first size of all tensors whose first size is that of the largest one. Nothing is copied: the
    new tensors have no values, so this is for fake worlds alone."""
    leaves, spec = torch_adapter.flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        return args, kwargs
    before = max(tensors, key=torch.Tensor.numel).shape[0]
    return torch_adapter.unflatten([_resized(leaf, before, batch) for leaf in leaves], spec)


def _resized(leaf: Any, before: int, batch: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != before:
        return leaf
    return leaf.new_empty((batch, *leaf.shape[1:])).requires_grad_(leaf.requires_grad)
