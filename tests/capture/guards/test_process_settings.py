"""Settings of the process that a program changes between calls: what becomes of warnings, and of numpy's errors."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import weft


class Slow(UserWarning):
    pass


def test_a_warning_that_becomes_an_error() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            warnings.warn("slow", Slow, stacklevel=1)
        except Slow:
            return x * 0.5
        return x

    compiled = weft.compile(step)
    x = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Slow)
        for _ in range(6):
            assert torch.equal(compiled(x), x)
        assert len(compiled.captures) == 1
        warnings.simplefilter("error", Slow)
        assert torch.equal(compiled(x), x * 0.5)


@pytest.mark.parametrize("how", ["ignore", "raise"])
def test_an_error_of_numpys(how: str) -> None:
    values = np.zeros(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            np.divide(1.0, values)
        except FloatingPointError:
            return x * 0.5
        return x

    compiled = weft.compile(step)
    x = torch.ones(2)
    with np.errstate(divide="ignore"):
        for _ in range(6):
            assert torch.equal(compiled(x), x)
        assert len(compiled.captures) == 1
        with np.errstate(divide=how):
            assert torch.equal(compiled(x), step(x))
        assert torch.equal(compiled(x), x)
