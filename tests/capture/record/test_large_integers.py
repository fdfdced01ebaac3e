"""Whole numbers of more than 64 bits that a step computes: torch takes some of them for infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft

STEPS: dict[str, Callable[[int, torch.Tensor], Any]] = {
    "the highest bit": lambda n, x: x.square() if n >> 63 else x.abs(),
    "a higher bit": lambda n, x: x.square() if (n << 8) >> 71 else x.abs(),
    "a number of bits": lambda n, x: (x * (n >> 63), n >> 40),
    "shifted out of 64 bits": lambda n, x: (x * 2, n << 70),
    "a power": lambda n, x: (x + (n**3 > 2**150), n**3),
    "a quotient": lambda n, x: x * (n // 2**63),
    "a comparison": lambda n, x: x * 3 if n >= 2**63 else x,
    "a remainder": lambda n, x: (x + n % 3, n % 2**65),
}


@pytest.mark.parametrize("name", STEPS)
def test_numbers_of_a_generator(name: str) -> None:
    def run(compile_: Callable[[Any], Any]) -> list[Any]:
        seed = 12345

        def step(x: torch.Tensor) -> Any:
            nonlocal seed
            seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
            return STEPS[name](seed, x)

        called = compile_(step)
        return [shown(called(torch.full((2,), 3.0))) + [seed] for _ in range(7)]

    def shown(result: Any) -> list[Any]:
        parts = result if isinstance(result, tuple) else (result,)
        return [each.tolist() if isinstance(each, torch.Tensor) else each for each in parts]

    assert run(weft.compile) == run(lambda step: step)
