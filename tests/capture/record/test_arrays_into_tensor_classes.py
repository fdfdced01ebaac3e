"""``torch.Tensor(array)`` and its kin, of arrays that numpy draws or computes in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import weft

STEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "drawn": lambda x: x * torch.Tensor(np.random.normal(0, 1, (2, 3))),
    "of the size of the batch": lambda x: x * torch.Tensor(np.random.normal(0, 1, (x.shape[0], 3))),
    "FloatTensor": lambda x: x * torch.FloatTensor(np.random.rand(2, 3)),
    "DoubleTensor": lambda x: x * torch.DoubleTensor(np.random.rand(2, 3)),
    "whole numbers": lambda x: x[torch.LongTensor(np.random.randint(0, 2, 4))],
    "whole numbers as floats": lambda x: x * torch.Tensor(np.random.randint(0, 9, (2, 3))),
    "turned": lambda x: x * torch.Tensor(np.random.rand(3, 2).T),
    "computed": lambda x: x * torch.Tensor(np.sqrt(np.random.rand(2, 3)) * 3),
}


@pytest.mark.parametrize("name", STEPS)
def test_arrays_of_a_step(name: str) -> None:
    def run(compile_: Callable[[Any], Any]) -> list[torch.Tensor]:
        step = compile_(lambda x: STEPS[name](x))
        np.random.seed(3)
        return [step(torch.arange(6.0).reshape(2, 3) + at) for at in range(4)]

    for one, other in zip(run(weft.compile), run(lambda step: step), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
