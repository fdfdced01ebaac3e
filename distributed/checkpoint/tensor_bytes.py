"""The bytes of a tensor, without numpy: torch does not require it, and ``Tensor.numpy`` raises where it is missing."""

from __future__ import annotations

import ctypes

import torch


def bytes_of(data: torch.Tensor) -> bytes:
    """A copy of what a contiguous tensor on the CPU holds."""
    assert data.is_contiguous()
    assert data.device.type == "cpu"
    return ctypes.string_at(data.data_ptr(), data.nbytes) if data.nbytes else b""
