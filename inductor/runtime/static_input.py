"""A place for an argument of a step that lies somewhere else at every call."""

from __future__ import annotations

import torch


class StaticInput:
    """Memory that stays where it is, laid out like the tensor it was made for.

    Attributes:
        tensor: has the sizes and strides of that tensor, also where elements overlap (``expand``, ``unfold``).
    """

    def __init__(self, like: torch.Tensor) -> None:
        sizes, strides = like.size(), like.stride()
        span = _span(like)
        self._whole: torch.Tensor | None = None
        if span < like.numel():
            self._whole = torch.empty(span, dtype=like.dtype, device=like.device)
            self.tensor = self._whole.as_strided(sizes, strides)
        else:
            self.tensor = torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
        self.fill(like)

    def fill(self, value: torch.Tensor) -> None:
        """Copy ``value``, which is laid out alike."""
        if self._whole is None:
            self.tensor.copy_(value, non_blocking=True)
        else:
            self._whole.copy_(value.as_strided(self._whole.shape, (1,)), non_blocking=True)


def _span(value: torch.Tensor) -> int:
    """How many elements of memory there are from the first to the last of a tensor."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
