"""Context variables that have a default and no value yet: a step may set them, in one attempt or in several."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_what_a_step_sets(is_set: bool, branches: bool, is_reset: bool) -> None:
    def run(compile_: Callable[[Any], Any]) -> list[Any]:
        depth = contextvars.ContextVar("depth", default=1)
        if is_set:
            depth.set(3)

        def step(x: torch.Tensor) -> torch.Tensor:
            token = depth.set(depth.get() + 1)
            y = x * depth.get()
            if branches and y.sum() > 10:
                y = y * 2
            if is_reset:
                depth.reset(token)
            return y

        called = compile_(step)
        return [(called(torch.ones(2)).tolist(), depth.get()) for _ in range(5)]

    assert run(weft.compile) == run(lambda step: step)


def test_what_a_program_sets_between_calls() -> None:
    depth = contextvars.ContextVar("depth", default=1.0)
    compiled = weft.compile(lambda x: x * depth.get())
    x = torch.ones(2)
    assert torch.equal(compiled(x), x)
    depth.set(2.0)
    assert torch.equal(compiled(x), x * 2)
