"""Fake rules of operations whose rule in torch refuses operands that their kernels accept.

A fake rule computes the sizes, strides and dtype of an operation's result. Where torch's is too strict, the capture
would refuse a step that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.torch_adapter import OpOverload

aten = torch.ops.aten


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Kernels of grouped GEMMs accept float32 and float16 too; torch's rule accepts only bfloat16."""
    half = torch.bfloat16
    out = aten._grouped_mm.default(a.to(half), b.to(half), *args, **kwargs)
    return out if a.dtype == half else out.to(a.dtype, memory_format=torch.preserve_format)


def _loss_backward(op: OpOverload) -> Callable[..., torch.Tensor]:
    """The backward of a loss: torch's rule divides by the number of elements, which may be 0."""

    def rule(grad: torch.Tensor, values: torch.Tensor, *args: Any) -> torch.Tensor:
        empty = all(isinstance(size, int) for size in values.shape) and 0 in values.shape
        return torch.empty_like(values) if empty else op(grad, values, *args)

    return rule


_LOSSES = (aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)
_RULES: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    **{op: _loss_backward(op) for op in _LOSSES},
}


def fake_rule(op: OpOverload) -> Callable[..., Any]:
    """The function that computes the fake result of ``op``: the operation itself, with few exceptions."""
    return _RULES.get(op, op)
