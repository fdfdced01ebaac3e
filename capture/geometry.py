"""Where tensors of one storage lie in it."""

from __future__ import annotations

import torch

from weft import torch_adapter


def offset_within(tensor: torch.Tensor, whole: torch.Tensor) -> int | None:
    """Where ``tensor`` starts inside ``whole`` (elements), None unless it lies wholly inside."""
    if tensor.dtype != whole.dtype:
        return None
    start = int(tensor.storage_offset() - whole.storage_offset())
    return start if start >= 0 and start + extent(tensor) <= extent(whole) else None


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal sizes and strides (strides of dimensions of one element aside), as far as is known without the data."""
    if a.dim() != b.dim() or not all(torch_adapter.surely(m == n) for m, n in zip(a.shape, b.shape, strict=True)):
        return False
    strides = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(torch_adapter.surely(s == t) or torch_adapter.surely(n == 1) for s, t, n in strides)


def apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage have no byte in common, going by their first and last elements."""
    starts = [t.storage_offset() * t.element_size() for t in (a, b)]
    ends = [start + extent(t) * t.element_size() for start, t in zip(starts, (a, b), strict=True)]
    return ends[0] <= starts[1] or ends[1] <= starts[0]


def extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of ``tensor`` in its storage, those between included."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
