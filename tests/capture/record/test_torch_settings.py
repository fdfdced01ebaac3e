"""Steps that change settings of torch are refused before they do; run uncompiled, they leave what eager leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.errors import OutsideEffect


def _deterministic() -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


def _default_dtype() -> None:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)


def _matmul_precision() -> None:
    torch.set_float32_matmul_precision("high" if torch.get_float32_matmul_precision() == "highest" else "highest")


def _benchmark() -> None:
    if torch.backends.flags_frozen():
        pytest.skip("torch's test utilities, which another test has imported, forbid it")
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


def settings() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
    )


CHANGES = [_deterministic, _default_dtype, _matmul_precision, _benchmark]


def seen(change: Callable[[], None], **options: Any) -> list[Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        change()
        return y * torch.ones(2)

    run = weft.compile(step, **options) if options else step
    found = []
    for at in range(4):  # an even number of changes: the settings are as they were
        y = run(torch.full((2,), at + 1.0, dtype=torch.float32))
        found.append((y.dtype, y.tolist(), settings()))
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_changes_a_setting_is_refused(change: Callable[[], None]) -> None:
    before = settings()
    with pytest.raises(OutsideEffect, match="a compiled step runs no Python"):
        seen(change, mode="default")
    assert settings() == before


@pytest.mark.parametrize("change", CHANGES)
def test_it_changes_once_a_call_where_it_runs_uncompiled(
    change: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    assert seen(change, fallback="eager") == seen(change)
