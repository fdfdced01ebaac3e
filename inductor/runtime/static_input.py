"""Static buffers for inputs of CUDA graphs whose address changes between calls."""

from __future__ import annotations

import torch

from weft.inductor.graph.sizes import spanned


class StaticInput:
    """A buffer with a fixed address, of the sizes and strides of the tensor ``like``, and first filled from it.

    Attributes:
        tensor: the buffer. Its elements overlap if those of ``like`` do (``expand``, ``unfold``).
    """

    def __init__(self, like: torch.Tensor) -> None:
        sizes, strides = like.size(), like.stride()
        span = spanned(sizes, strides)
        self._whole: torch.Tensor | None = None
        if span < like.numel():
            self._whole = torch.empty(span, dtype=like.dtype, device=like.device)
            self.tensor = self._whole.as_strided(sizes, strides)
        else:
            self.tensor = torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
        self.fill(like)

    def fill(self, value: torch.Tensor) -> None:
        """Copy ``value``, which must have the sizes and strides of the buffer."""
        # Elements that overlap cannot be the target of ``copy_``; the memory below them is copied as one flat tensor.
        if self._whole is None:
            self.tensor.copy_(value, non_blocking=True)
        else:
            self._whole.copy_(value.as_strided(self._whole.shape, (1,)), non_blocking=True)
