"""Optimizers around optimizers as public code writes them: subclasses that do not call ``Optimizer.__init__``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import weft


class Lookahead(torch.optim.Optimizer):
    """Every ``k`` steps the slow weights move towards the fast ones."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.inner, self.k, self.alpha = inner, k, alpha
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state: Any = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    state = self.state[fast]
                    if "slow" not in state:
                        state["slow"] = fast.detach().clone()
                    state["slow"].add_(fast - state["slow"], alpha=self.alpha)
                    fast.copy_(state["slow"])
            group["counter"] = (group["counter"] + 1) % self.k
        return loss


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.RAdam, torch.optim.AdamW])
def test_lookahead_trains_as_in_eager(inner: Any) -> None:
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = Lookahead(inner(model.parameters(), lr=0.05))

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Lookahead = optimizer) -> torch.Tensor:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        called: Any = weft.compile(step) if compiled else step
        losses = [called(torch.full((3, 4), float(at))) for at in range(9)]
        slow = [state["slow"] for state in optimizer.state.values()]
        results.append([*losses, *model.parameters(), *slow])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
