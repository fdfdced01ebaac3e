"""Results on fake tensors of operations whose own rule in torch refuses what their kernels accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.torch_adapter import OpOverload


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Kernels multiply groups in float32 and float16 too; torch's rule knows bfloat16 only."""
    half = torch.bfloat16
    out = torch.ops.aten._grouped_mm.default(a.to(half), b.to(half), *args, **kwargs)
    return out if a.dtype == half else out.to(a.dtype, memory_format=torch.preserve_format)


_RULES: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_mm}


def fake_rule(op: OpOverload) -> Callable[..., Any]:
    """What computes the result of ``op`` on fakes: the operation itself, for all but a few."""
    return _RULES.get(op, op)
