"""``torch.distributions`` of numbers of a step: torch's own code asks there whether a parameter is a number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributions as D
from torch import Tensor

import weft
from both_ways import assert_equal

STEPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "of the data": lambda x, at: D.Normal(x.sum().item(), 1.0).log_prob(x),
    "of the data and a tensor": lambda x, at: D.Normal(x, x.sum().item()).entropy(),
    "of the arguments": lambda x, at: D.Normal(0.0, at + 1.0).log_prob(x),
    "two of the arguments": lambda x, at: D.Normal(at * 0.5, at + 1.0).log_prob(torch.tensor(1.0)),
    "a probability": lambda x, at: D.Bernoulli(probs=1 / (at + 2)).log_prob((x > 1).float()),
    "of numpy": lambda x, at: D.Normal(0.0, np.float64(2) * (at + 1)).log_prob(x),
    "drawn": lambda x, at: D.Normal(x.sum().item(), 1.0).sample((2,)),
}


@pytest.mark.parametrize("name", STEPS)
def test_numbers_are_parameters(name: str) -> None:
    step = STEPS[name]
    compiled = weft.compile(step)
    for at in range(4):
        results = []
        for each in (compiled, step):
            torch.manual_seed(at)
            results.append(each(torch.full((3,), at / 2 + 0.5), at))
        assert_equal(*results)
    assert len(compiled.captures) <= (4 if name == "of numpy" else 2)
