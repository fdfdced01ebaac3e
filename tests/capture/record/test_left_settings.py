"""A step that leaves a setting of torch changed for its thread is refused, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.errors import OutsideEffect

CHANGES: dict[str, Callable[[], Any]] = {
    "torch.is_grad_enabled()": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "torch.is_autocast_enabled('cpu')": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.get_autocast_dtype('cpu')": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "torch.is_anomaly_enabled()": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}


def settings() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), *autocast, torch.is_anomaly_enabled()


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_a_step_leaves_changed_is_named(name: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        CHANGES[name]()
        return x + 1

    before = settings()
    with pytest.raises(OutsideEffect, match=r"leaves .* changed") as caught:
        weft.compile(step)(torch.ones(2))
    assert name in str(caught.value)
    assert __file__ in str(caught.value)
    assert settings() == before


@pytest.mark.parametrize("branches", [False, True])
def test_a_setting_that_a_step_puts_back_is_captured(branches: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        torch.set_grad_enabled(False)
        y = x * weight
        if branches and y.sum() > 5:
            y = y * 2
        torch.set_grad_enabled(True)
        return y, (y * weight).sum(), torch.is_grad_enabled()

    compiled = weft.compile(step)
    for at in range(5):
        x = torch.full((2,), float(at))
        for one, other in zip(compiled(x), step(x), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_mode_that_only_the_call_has_is_kept() -> None:
    compiled = weft.compile(lambda x: x * 2)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
        assert torch.is_grad_enabled()
