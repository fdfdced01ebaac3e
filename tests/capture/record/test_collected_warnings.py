"""Warnings that a step collects itself: the step sees those that it sees in eager."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import weft


def collected(action: Any, *, nested: bool, compiled: bool) -> list[Any]:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            warnings.warn("careful", stacklevel=1)
            if nested:
                with warnings.catch_warnings():
                    warnings.warn("nested", stacklevel=1)
        return x * len(caught), [str(each.message) for each in caught]

    run = weft.compile(step) if compiled else step
    with warnings.catch_warnings(record=True) as outside:
        warnings.simplefilter("always")
        x, texts = run(torch.ones(2))
        return [x.tolist(), texts, len(outside)]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("action", ["always", "ignore"])
def test_a_step_collects_the_warnings_of_eager(action: Any, nested: bool) -> None:
    assert collected(action, nested=nested, compiled=True) == collected(action, nested=nested, compiled=False)


def test_a_filter_that_the_step_sets_is_no_reason_to_capture_again() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=1)
        return x + 1

    compiled = weft.compile(step)
    with warnings.catch_warnings(record=True) as outside:
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(outside) == 3
    assert len(compiled.captures) == 1
