"""Flags that a schedule decides: what a step makes of a comparison with a number that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twenty_calls import twenty_calls

from both_ways import mlp

Flagged = Callable[[nn.Module, torch.Tensor, bool], Any]


def _no_gradients(model: nn.Module, x: torch.Tensor, flag: bool) -> Any:
    with torch.set_grad_enabled(flag):
        return model(x).requires_grad


def _unfrozen(model: nn.Module, x: torch.Tensor, flag: bool) -> Any:
    for parameter in model[0].parameters():
        parameter.requires_grad = flag
    return model(x).square().mean()


def _in_training(model: nn.Module, x: torch.Tensor, flag: bool) -> Any:
    model.train(flag)
    return model.training, model(x).sum()


CASES: dict[str, tuple[Flagged, int]] = {
    "set_grad_enabled": (_no_gradients, 3),
    "requires_grad": (_unfrozen, 4),
    "requires_grad_": (lambda model, x, flag: model.requires_grad_(flag)(x).sum(), 4),
    "train": (_in_training, 4),
    "argument": (lambda model, x, flag: x.sort(descending=flag).values + x.sum(0, keepdim=flag), 3),
    "dropout": (lambda model, x, flag: F.dropout(model(x), 0.5, training=flag), 3),
    "result": (lambda model, x, flag: (x + 1, flag, type(flag), not flag), 3),
    "factor": (lambda model, x, flag: x * flag + (flag + 1), 3),
    "choice": (lambda model, x, flag: torch.where(torch.tensor(flag), x, x + 1), 3),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_argument", [True, False])
def test_a_flag_has_two_outcomes(name: str, is_argument: bool) -> None:
    flagged, captures = CASES[name]

    def make() -> Callable[..., Any]:
        model, calls = mlp(), [0]

        def step(x: torch.Tensor, at: int) -> Any:
            calls[0] += 1
            return flagged(model, x, (at if is_argument else calls[0]) > 11)

        return step

    if not is_argument:
        captures += 1
    twenty_calls(make, lambda at: (torch.randn(4, 8, generator=torch.Generator().manual_seed(at)), at), captures)


def test_a_flag_of_a_size_has_two_outcomes() -> None:
    step = lambda x: (x.sort(descending=x.shape[0] > 7).values, x.shape[0] > 7)
    twenty_calls(lambda: step, lambda at: (torch.arange(2.0 + at % 11).cos(),), 4)
