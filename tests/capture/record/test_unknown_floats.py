"""Floats that C++ computes from numbers that change, in steps with branches."""

from __future__ import annotations

import torch
from torch import nn

import weft


def test_after_a_value_was_read_they_end_the_attempt_and_are_no_error_of_the_step() -> None:
    """A BatchNorm without momentum reads its count of batches, and the rate of the dropout has changed."""
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(
            x: torch.Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        called = weft.compile(step) if compiled else step
        losses = []
        for at in range(10):
            if at == 3:
                model[1].training = False
            if at == 5:
                model[2].p = 0.25
            if at == 7:
                model[1].train()
                model[1].momentum = None
            torch.manual_seed(at)
            losses.append(called(torch.randn(3, 4)))
        results.append([*losses, *model.parameters(), *model.buffers()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
