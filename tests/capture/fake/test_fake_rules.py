"""Operations whose rule for fakes in torch is stricter than their kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from both_ways import batches, both_ways, training


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_mm_accepts_every_float_dtype(dtype: torch.dtype) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 16).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([2, 2, 5], dtype=torch.int32)
            return F.grouped_mm(x.to(dtype), self.weight, offs=ends)

    both_ways(training(lambda model, x: model(x).float().square().mean(), Experts), batches(shape=(5, 8)))
