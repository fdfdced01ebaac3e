"""Functions and methods of numpy on single numbers that change, or that the step computes: eager's values and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from twenty_calls import twenty_calls

import weft
from weft.errors import CannotCapture

Numbers = Callable[[float, int], Any]  # of a number that the step's data decides, and an integer that changes

FOLLOWED: dict[str, Numbers] = {
    "interpolated": lambda loss, at: (np.interp(at, [0, 10], [0.1, 1]), np.interp(loss, (0.0, 9.0), (1.0, at))),
    "interpolated in arrays": lambda loss, at: np.interp(at / 3, np.arange(5), np.linspace(0, 1, 5) ** 2),
    "warm-up": lambda loss, at: 2 * np.interp(at, [0, 20], [1, 4]).round(),
    "rounded": lambda loss, at: (np.sqrt(loss).round(), np.sqrt(at).round(2), np.sqrt(loss + at).round(decimals=1)),
    "of Python": lambda loss, at: (np.sqrt(loss).item(), np.sqrt(at + 0.5).tolist(), np.maximum(at, 3).item()),
    "converted": lambda loss, at: (np.sqrt(loss).astype(int), np.sqrt(at).astype("float64"), np.exp(at).astype(float)),
    "in arithmetic": lambda loss, at: (
        (2 * np.sqrt(loss) + 1).round(),
        -(np.log1p(at) ** 2),
        (np.exp(-loss) - at).item(),
    ),
    "clipped": lambda loss, at: (np.exp(loss).clip(0.5, 2.5), np.sqrt(at).clip(1, 3)),
    "described": lambda loss, at: (np.sqrt(loss).ndim, np.exp(at).shape, str(np.sqrt(loss).dtype), np.exp(loss).size),
    "largest of one": lambda loss, at: (max([loss]), min((at,)), max(loss, loss), max([loss], default=0)),
    "of one element": lambda loss, at: (
        np.sqrt(loss).mean(),
        np.exp(at).max(),
        np.maximum(at, 3).mean(),
        np.maximum(at, 2).sum(),
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_numbers_are_followed(name: str) -> None:
    numbers = FOLLOWED[name]

    def step(x: torch.Tensor, at: int) -> Any:
        return x * 2, numbers(x.square().mean().item(), at)

    twenty_calls(lambda: step, lambda at: (torch.full((3,), at / 7), at), 2)


def test_attributes_that_need_a_value_make_it_a_guard_where_it_is_known() -> None:
    def step(x: torch.Tensor, at: int) -> Any:
        return x * at, at.to_bytes(2, "big"), at.real, np.sqrt(at).hex()

    twenty_calls(lambda: step, lambda at: (torch.ones(3), at % 2), 3)


@pytest.mark.parametrize(
    "numbers", [lambda loss: loss.hex(), lambda loss: np.sqrt(loss).hex(), lambda loss: np.sqrt(loss).astype("float32")]
)
def test_attributes_that_need_a_value_that_is_not_known_are_refused(numbers: Callable[[float], Any]) -> None:
    with pytest.raises(CannotCapture, match=r"test_numpy_numbers\.py:\d+"):
        weft.compile(lambda x: numbers(x.mean().item()))(torch.ones(3))


def test_python_numbers_have_no_attributes_of_numpy() -> None:
    def step(x: torch.Tensor) -> Any:
        number = x.mean().item()
        has = [hasattr(each, name) for each in (number, np.sqrt(number)) for name in ("cpu", "item", "dtype", "hex")]
        return number, has

    assert weft.compile(step)(torch.ones(3)) == step(torch.ones(3))
    with pytest.raises(AttributeError, match="'float' object has no attribute 'item'"):
        weft.compile(lambda x: x.mean().item().item())(torch.ones(3))
