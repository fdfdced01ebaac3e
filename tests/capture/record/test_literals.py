"""Tensors that a step makes from Python numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import weft

NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "float": lambda: torch.tensor(0.1),
    "int": lambda: torch.tensor(2**60 + 1),
    "bool": lambda: torch.tensor(True),
    "float64": lambda: torch.tensor(0.1, dtype=torch.float64),
    "bfloat16": lambda: torch.tensor(0.1, dtype=torch.bfloat16),
    "infinity": lambda: torch.tensor(-torch.inf),
    "nan": lambda: torch.tensor(torch.nan),
    "negative zero": lambda: torch.tensor(-0.0),
    "complex": lambda: torch.tensor(1 + 2j),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_literal_has_eagers_bits_and_is_no_input(name: str) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        literal = NUMBERS[name]()
        return literal, x * literal, torch.sqrt(literal * 2)

    compiled = weft.compile(step)
    for _ in range(3):
        x = torch.randn(5)
        for found, expected in zip(compiled(x), step(x), strict=True):
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(_signs(found), _signs(expected))
    inputs = weft.explain(compiled).step_graph.inputs
    assert len(inputs) == (2 if name == "complex" else 1)


def _signs(tensor: torch.Tensor) -> torch.Tensor:
    return torch.signbit(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


def test_a_literal_that_the_step_writes_to_is_new_in_each_call() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        total = torch.tensor(0.0)
        total += x.sum()
        total.mul_(2)
        return total

    compiled = weft.compile(step)
    kept = []
    for _ in range(4):
        x = torch.randn(5)
        kept.append((compiled(x), step(x)))
    for found, expected in kept:
        assert torch.equal(found, expected)


def test_a_branch_on_literals_takes_no_read() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        scale = torch.sqrt(torch.tensor(64.0) * 4)
        return x * 2 if scale > 10 else x / scale

    compiled = weft.compile(step)
    for _ in range(3):
        x = torch.randn(5)
        assert torch.equal(compiled(x), step(x))
    assert "_local_scalar_dense" not in str(weft.explain(compiled).step_graph)
    assert len(compiled.captures) == 1
