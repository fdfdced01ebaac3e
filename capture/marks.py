"""Which sizes of a tensor argument stay symbolic in a captured graph."""

from __future__ import annotations

import torch

from weft.capture.dynamic import MARKS


def mark_dynamic(tensor: torch.Tensor, dim: int | list[int] | tuple[int, ...]) -> None:
    """Keep these dimensions of an argument symbolic; an error if the step fixes one of them to a number."""
    _mark(tensor, dim, "dynamic")


def maybe_mark_dynamic(tensor: torch.Tensor, dim: int | list[int] | tuple[int, ...]) -> None:
    """Like :func:`mark_dynamic`, but a dimension that the step fixes to a number becomes static with a log line."""
    _mark(tensor, dim, "maybe")


def mark_static(tensor: torch.Tensor, dim: int | list[int] | tuple[int, ...] | None = None) -> None:
    """Capture these dimensions (all by default) as numbers, however often they change."""
    _mark(tensor, range(tensor.dim()) if dim is None else dim, "static")


def _mark(tensor: torch.Tensor, dims: int | list[int] | tuple[int, ...] | range, mark: str) -> None:
    for dim in (dims,) if isinstance(dims, int) else dims:
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"dimension {dim} of a tensor with {tensor.dim()}")
        tensor.__dict__.setdefault(MARKS, {})[dim % tensor.dim()] = mark
