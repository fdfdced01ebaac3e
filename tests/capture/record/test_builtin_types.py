"""``int``, ``float`` and their like in scripts that also use them as values, as command lines do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal

CALLS = 6


def arguments() -> argparse.Namespace:
    """What a script asks its command line: ``float`` and ``int`` are values in this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=2)

    class Defaults:
        scale, kind = 0.5, float

    parser.set_defaults(scale=Defaults.kind(Defaults.scale))
    parsed = parser.parse_args([])
    return parsed if parsed.epochs is not None else argparse.Namespace()


class Trainer:
    """A small model, and what a training loop notes of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=arguments().scale)
        self.losses: list[float] = []
        self.correct = 0
        self.steps = 0

    def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One update; returns the predictions."""
        out = self.model(x)
        loss = nn.functional.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss))
        return out

    def state(self) -> list[Any]:
        return [self.model.state_dict(), self.losses, self.correct, self.steps]


def counts_correct(trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> float:
    right = int((trainer.train(x, y).argmax(1) == y).sum())
    trainer.correct += right
    return float(right) / len(y)


def mixes_up(trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> float:
    share = float(np.random.beta(1.0, 1.0))
    trainer.train(share * x + (1 - share) * x.flip(0), y)
    return share


def warms_up(trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> float:
    trainer.steps += 1
    scale = min(1.0, float(trainer.steps) / 20)
    trainer.train(x * scale, y)
    return scale


def uses_types(trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    right = (trainer.train(x, y).argmax(1) == y).to(float).sum()
    trainer.steps = max(trainer.steps, 0) + int(y.numel())
    kinds = [kind.__name__ for kind in (int, float) if type(trainer.correct) is kind]
    made = torch.zeros(2, dtype=int) + trainer.steps  # type: ignore[bad-argument-type]
    return [float(right), made, kinds, isinstance(trainer.steps, int), [float(each) for each in (right, 3)]]


@pytest.mark.parametrize("step", [counts_correct, mixes_up, warms_up, uses_types])
def test_a_file_that_reads_its_command_line_trains_with_symbolic_numbers(step: Callable[..., float]) -> None:
    def trained(called: Callable[..., float], trainer: Trainer) -> list[Any]:
        torch.manual_seed(1)
        batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(CALLS)]
        return [called(trainer, *batch) for batch in batches] + trainer.state()

    compiled = weft.compile(step)
    assert_equal(trained(compiled, Trainer()), trained(step, Trainer()))
    assert len(compiled.captures) <= 2


OF_NUMPY: dict[str, Callable[[Any], Any]] = {
    "clipped integer": lambda draw: int(np.clip(np.random.randint(0, 9), 2, 5)),
    "clipped float": lambda draw: float(np.clip(np.random.rand(), 0.2, 0.5)),
    "integer of a generator": lambda draw: [int(draw.integers(10)), draw.integers(10)],
    "float of a generator": lambda draw: float(draw.normal()),
    "rounded": lambda draw: int(np.round(10 * np.random.rand())),
    "not converted": lambda draw: [np.clip(np.random.rand(), 0.2, 0.5), np.round(10 * np.random.rand())],
}


@pytest.mark.parametrize("name", OF_NUMPY)
def test_a_number_of_numpys_that_is_converted_has_the_type_of_python(name: str) -> None:
    def drawn(wrap: Callable[..., Any]) -> list[Any]:
        np.random.seed(0)
        generator, numbers = np.random.default_rng(0), OF_NUMPY[name]
        step = wrap(lambda x: (x * 2, numbers(generator)))
        return [repr(step(torch.ones(2))[1]) for _ in range(CALLS)]

    assert drawn(weft.compile) == drawn(lambda step: step)


@pytest.mark.parametrize("chosen", [lambda n: max([n]), lambda n: min((n,)), lambda n: max(each for each in [n])])
def test_the_largest_of_one_number_is_the_number(chosen: Callable[[Any], Any]) -> None:
    step = lambda x, at: (x * chosen(at), chosen(x.sum().item()))
    compiled = weft.compile(step)
    for at in range(4):
        assert_equal(compiled(torch.full((2,), at / 3), at), step(torch.full((2,), at / 3), at))
    assert len(compiled.captures) == 2, compiled.captures


NUMPY_TYPES: dict[str, Callable[[int], Any]] = {
    "isinstance": lambda at: (isinstance(np.cos(at), np.floating), isinstance(np.maximum(at, 3), int)),
    "type": lambda at: (type(np.cos(at)).__name__, type(np.cos(at)) is float, type(np.float64(0.5) * at).__name__),
    "tensors": lambda at: (torch.tensor(np.sqrt(at)), torch.tensor([np.sqrt(at), 1.0]), torch.as_tensor(np.exp(at))),
    "methods": lambda at: (
        np.sqrt(at).round(1),
        np.round(np.sqrt(at), 1),
        np.clip(np.sqrt(at), None, 1),
        np.exp(at).item(),
    ),
    "interpolated": lambda at: (
        torch.as_tensor(np.interp(at, [0, 10], [0.1, 1])),
        np.interp(at, [0, 3], [0, 1]).round(),
    ),
}


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_a_number_that_numpy_makes_of_one_that_changes_is_numpys(name: str) -> None:
    numbers = NUMPY_TYPES[name]
    compiled = weft.compile(lambda x, at: (x * 2, numbers(at)))
    for at in (1, 2, 3, 2):
        assert repr(compiled(torch.ones(2), at)[1]) == repr(numbers(at))


SOURCE = """
import torch

def step(x):
    return x * int((x > 0).sum()), step.__globals__["kind" + "_of"](3), step.__globals__["counts" + ""](x)

def kind_of(value):
    return [kind.__name__ for kind in (int, float) if type(value) is kind], type(value) is int, max([value, 1])

def counts(x):
    return torch.zeros(2, dtype=int), [kind(value) for kind, value in zip([float, int], [2, 2.5])]
"""


@pytest.fixture
def script() -> Iterator[ModuleType]:
    """A module with functions that weft does not see the step call."""
    made = ModuleType("script_of_this_test")
    sys.modules[made.__name__] = made
    exec(compile(SOURCE, "script_of_this_test.py", "exec"), vars(made))
    yield made
    del sys.modules[made.__name__]


def test_functions_that_weft_does_not_see_have_the_very_types(script: ModuleType) -> None:
    codes = script.kind_of.__code__, script.counts.__code__
    compiled = weft.compile(script.step)
    for positive in (3, 2, 1):
        x = torch.tensor([1.0] * positive + [-1.0] * (3 - positive))
        result, eager = compiled(x), script.step(x)
        assert torch.equal(result[0], eager[0])
        assert result[1] == eager[1]
        assert result[2][0].dtype == torch.int64
        assert result[2][1] == eager[2][1]
    assert len(compiled.captures) == 1
    assert codes == (script.kind_of.__code__, script.counts.__code__)
    assert "int" not in vars(script)
