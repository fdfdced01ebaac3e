"""Functions of libraries that refuse a symbolic number by its type, where eager's plain number is right."""

from __future__ import annotations

import fractions
from typing import Any

import pytest
import torch

import weft
from weft.errors import CannotCapture, UncapturableDraw


def test_a_fraction_of_a_number_that_the_data_decides_is_named() -> None:
    def step(x: torch.Tensor) -> Any:
        return x * float(fractions.Fraction(int(x.sum().item() * 1000), 7))

    step(torch.ones(2))
    with pytest.raises(CannotCapture, match=r"test_numbers_in_libraries\.py") as caught:
        weft.compile(step)(torch.ones(2))
    assert "a number that only the data decides" in str(caught.value)


def test_an_error_of_types_that_eager_raises_too() -> None:
    def step(x: torch.Tensor) -> Any:
        return x * float(fractions.Fraction(1.5, 7))  # type: ignore[arg-type]

    for called in (step, weft.compile(step)):
        with pytest.raises(TypeError, match="Rational"):
            called(torch.ones(2))


class _Pause:
    def __await__(self) -> Any:
        return (yield)


def test_a_coroutine_from_outside_the_step_is_named_and_not_moved_on() -> None:
    sent: list[float] = []

    async def work() -> None:
        while True:
            sent.append((await _Pause()).sum())

    state = {"work": work()}
    state["work"].send(None)

    def step(x: torch.Tensor) -> torch.Tensor:
        state["work"].send(x.detach())
        return x + 1

    with pytest.raises(UncapturableDraw, match="a coroutine from outside the step"):
        weft.compile(step)(torch.ones(2))
    assert not sent
    step(torch.ones(2))
    assert len(sent) == 1
    state["work"].close()


def test_a_coroutine_that_the_step_makes_runs() -> None:
    async def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        work = twice(x)
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError

    for at in range(3):
        assert torch.equal(weft.compile(step)(torch.full((2,), float(at))), torch.full((2,), 2.0 * at))
