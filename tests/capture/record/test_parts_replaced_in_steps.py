"""Steps that make parameters, put them in another order and register buffers leave what eager leaves."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import weft


def _parameter_made(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    model.bias = nn.Parameter(model.bias.detach() * 0.5)


def _frozen_parameter_made(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    model.bias = nn.Parameter(torch.ones(3), requires_grad=False)


def _parameter_made_at_two_places(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    model.bias = model.tied = nn.Parameter(model.bias.detach() + 1)


def _parameters_of_a_group_reversed(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    group = optimizer.param_groups[0]
    group["params"] = group["params"][::-1]


def _parameter_dropped_from_a_group(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    if at % 2 == 0 and optimizer.param_groups[0]["params"]:
        optimizer.param_groups[0]["params"].pop()


def _buffer_registered(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    model.register_buffer("hits", torch.ones(1), persistent=at % 2 == 0)


EFFECTS = [
    _parameter_made,
    _frozen_parameter_made,
    _parameter_made_at_two_places,
    _parameters_of_a_group_reversed,
    _parameter_dropped_from_a_group,
    _buffer_registered,
]
# How a step is captured: whole, in parts behind a branch on a value, or not at all.
OPTIMIZERS = {"whole": torch.optim.SGD, "in parts": torch.optim.RAdam, "refused": torch.optim.SGD}


def seen(compiled: bool, effect: Any, how: str) -> list[Any]:
    """What a program can tell of the model and the optimizer after each of four calls."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    model.tied = None
    optimizer = OPTIMIZERS[how](model.parameters(), lr=0.05)
    first = dict(model.named_parameters())

    def step(x: torch.Tensor, at: int) -> None:
        effect(model, optimizer, at)
        if how == "refused":
            x.untyped_storage().tolist()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = weft.compile(step, fallback="eager" if how == "refused" else None) if compiled else step
    found: list[Any] = []
    for at in range(4):
        run(torch.randn(2, 3), at)
        order = [[name for name, q in first.items() if q is p] for p in optimizer.param_groups[0]["params"]]
        states = [sorted(optimizer.state[p]) for p in optimizer.param_groups[0]["params"] if p in optimizer.state]
        tensors = [*model.named_parameters(), *model.named_buffers()]
        values = [(n, type(t), t.requires_grad, t.is_leaf, t.tolist(), t.grad is None) for n, t in tensors]
        found.append((order, states, values, list(model.state_dict()), model.tied is model.bias))
    return found


@pytest.mark.parametrize("how", OPTIMIZERS)
@pytest.mark.parametrize("effect", EFFECTS)
def test_what_a_step_replaces_is_what_eager_leaves(effect: Any, how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    eager, compiled = (seen(compiled, effect, how) for compiled in (False, True))
    assert eager == compiled
