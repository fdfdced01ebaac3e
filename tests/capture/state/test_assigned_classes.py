"""Steps that assign ``obj.__class__``: each call does, and a capture that ends early leaves what it found."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import weft


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Phase:
    def weight(self) -> float:
        return 1.0


class Late(Phase):
    def weight(self) -> float:
        return 3.0


# How a step is captured: whole, in parts behind a branch on a value, or not at all.
OPTIMIZERS = {"whole": torch.optim.SGD, "in parts": torch.optim.RAdam, "refused": torch.optim.SGD}


def trained(compiled: bool, how: str, *, parametrized: bool = False) -> list[Any]:
    torch.manual_seed(0)
    model, phase = nn.Linear(3, 3), Phase()
    optimizer = OPTIMIZERS[how](model.parameters(), lr=0.05)

    def step(x: torch.Tensor) -> torch.Tensor:
        phase.__class__ = Late if type(phase) is Phase else Phase
        if parametrized and not nn.utils.parametrize.is_parametrized(model):
            nn.utils.parametrizations.weight_norm(model)
        elif not parametrized:
            model.__class__ = Doubling if type(model) is nn.Linear else nn.Linear
        if how == "refused":
            x.untyped_storage().tolist()
        loss = model(x).square().sum() * phase.weight()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = weft.compile(step, fallback="eager" if how == "refused" else None) if compiled else step
    found: list[Any] = []
    try:
        for _ in range(4):
            loss = run(torch.randn(2, 3)).item()
            found.append((loss, type(model).__name__, type(phase), [p.tolist() for p in model.parameters()]))
    except weft.errors.WeftError:
        found.append(("refused", type(model), type(phase), [name for name, _ in model.named_parameters()]))
    return found


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_each_call_assigns_the_class(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    assert trained(True, how) == trained(False, how)


def test_a_parametrization_registered_in_a_refused_step_is_registered_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    assert trained(True, "refused", parametrized=True) == trained(False, "refused", parametrized=True)


@pytest.mark.parametrize("how", ["whole", "in parts"])
def test_a_capture_that_fails_gives_objects_their_classes_back(how: str) -> None:
    assert trained(True, how, parametrized=True) == [("refused", nn.Linear, Phase, ["weight", "bias"])]
