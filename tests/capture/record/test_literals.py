"""Tensors that a step makes from Python numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def _joined_sizes(x: torch.Tensor) -> Any:
    shape = torch.cat([torch.as_tensor([-1]), torch.as_tensor(x.size()[1:])]).tolist()
    return x.reshape(shape) * 2, shape


def _written(x: torch.Tensor) -> Any:
    counts = torch.tensor([3, 1, 2])
    counts[0] = 2
    first = int(counts.sum())
    counts += 1
    return x.new_zeros(first) + counts.max(), [2 * each for each in counts.tolist()], range(counts[0])


def _positions(x: torch.Tensor) -> Any:
    places = torch.cat([torch.tensor([-1]), torch.arange(6)[::2]])
    return torch.arange(places[-1] - places[0], places[1] - 1, -2), x[places[2] :] * 3


def _nested(x: torch.Tensor) -> Any:
    table = torch.tensor([[1.5, 2.5], [3.0, 4.25]])
    return x * 2 if table.sum() > 10 else x, table.tolist(), table[1].tolist(), (table * 0.1)[0, 1].item()


def _written_under_a_name_of_a_part(x: torch.Tensor) -> Any:
    whole = torch.tensor([1, 2, 3, 4])
    part = whole[1:3]
    part.mul_(2)
    return x.new_ones(int(whole[2])), whole.tolist()


def _beside_data(x: torch.Tensor) -> Any:
    mixed = torch.stack([torch.tensor(3.0), x.sum()])
    return mixed[0].item(), mixed.tolist()


FOLDED: dict[str, Callable[[torch.Tensor], Any]] = {
    each.__name__.strip("_"): each
    for each in (_joined_sizes, _written, _positions, _nested, _written_under_a_name_of_a_part)
}


@pytest.mark.parametrize("name", FOLDED)
def test_numbers_that_are_read_back_from_literals_are_plain(name: str) -> None:
    compiled = weft.compile(FOLDED[name])
    for rows in (4, 4, 5):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(x), FOLDED[name](x), rtol=0, atol=0)
    text = str(weft.capture(FOLDED[name], torch.randn(4, 6)))
    assert "_local_scalar_dense" not in text
    assert "to_list" not in text


def test_what_the_data_decides_is_read_in_each_call() -> None:
    compiled = weft.compile(_beside_data)
    for _ in range(3):
        x = torch.randn(4, 6)
        assert compiled(x) == _beside_data(x)
    assert len(compiled.captures) == 1
