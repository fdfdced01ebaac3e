"""``torch.LongTensor(list)``, ``torch.Tensor(list)`` and the like of numbers that change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import LongTensor, nn
from torch.nn import functional as F

import weft
from both_ways import both_ways, training

DRAWS = random.Random(1)
WHOLE = [[DRAWS.randrange(8) for _ in range(6)] for _ in range(20)]
FLOATS = [[DRAWS.random() for _ in range(6)] for _ in range(20)]
LENGTHS = [[DRAWS.randrange(8) for _ in range(2 + at % 5)] for at in range(20)]

STEPS: dict[str, tuple[Callable[..., torch.Tensor], list[Any]]] = {
    "labels": (lambda y, v: F.cross_entropy(y, torch.LongTensor(v)), WHOLE),
    "labels of varying number": (lambda y, v: F.cross_entropy(y[: len(v)], torch.LongTensor(v)), LENGTHS),
    "imported name": (lambda y, v: F.cross_entropy(y, LongTensor(v)), WHOLE),
    "Tensor": (lambda y, v: y.sum(1) * torch.Tensor(v), FLOATS),
    "Tensor of integers": (lambda y, v: y.sum(1) * torch.Tensor(v), WHOLE),
    "Tensor of a tuple": (lambda y, v: y.sum(1) * torch.Tensor(v), [*map(tuple, FLOATS)]),
    "FloatTensor": (lambda y, v: y.sum(1) * torch.FloatTensor(v), FLOATS),
    "DoubleTensor": (lambda y, v: y.sum(1) * torch.DoubleTensor(v), FLOATS),
    "HalfTensor": (lambda y, v: y.sum(1) * torch.HalfTensor(v), FLOATS),
    "IntTensor": (lambda y, v: y[:, torch.IntTensor(v).long()], WHOLE),
    "nested lists": (lambda y, v: y[:2] * torch.FloatTensor([[v[0]], [v[1] * 2]]), FLOATS),
    "a new list": (lambda y, v: y[:3, 0] * torch.Tensor([v[0], 1.5, v[1]]), FLOATS),
}


@pytest.mark.parametrize("name", STEPS)
def test_tensors_of_lists_of_numbers_that_change_are_one_capture(name: str) -> None:
    function, values = STEPS[name]
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    make = training(lambda net, x, v: function(net(x), v).float().pow(2).mean(), lambda: nn.Linear(8, 8))
    step = both_ways(make, [(x, value) for value in values], captures=None)
    assert len(step.captures) <= 3, step.captures


def test_the_classes_stay_classes() -> None:
    def step(x: torch.Tensor, n: int) -> Any:
        known = {torch.FloatTensor: 1, torch.LongTensor: 2}
        halves = x.type(torch.HalfTensor)
        kinds = isinstance(x, torch.FloatTensor), isinstance(x.long(), (torch.LongTensor, int)), torch.LongTensor.dtype
        return halves, torch.FloatTensor(2, 3).fill_(n), torch.Tensor(n, 2).shape[0], kinds, known[torch.LongTensor]

    both_ways(lambda: (step, []), [(torch.ones(2), n) for n in (2, 3, 4)], captures=None)
    assert "__new__" not in vars(torch.Tensor)
    assert type(torch.LongTensor).__name__ == "tensortype"
    assert torch.Tensor([1.0]).tolist() == [1.0]


@pytest.mark.parametrize("values", [[[1, 2]] * 2 + [[3, 2**40]], [[1, 2]] * 2 + [[True, 2]], [[1, 2]] * 2 + [[1.5, 2]]])
def test_lists_that_a_class_takes_otherwise_or_not_at_all(values: list[Any]) -> None:
    def outcomes(step: Callable[..., Any]) -> list[Any]:
        found = []
        for each in values:
            try:
                found.append(step(each).tolist())
            except (RuntimeError, TypeError, weft.errors.WeftError):
                found.append("raises")
        return found

    step = lambda v: torch.IntTensor(v) * 2
    assert outcomes(weft.compile(step)) == outcomes(step)
