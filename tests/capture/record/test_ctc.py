"""The CTC loss, whose lengths are tensors, tuples or lists, the same at each call or others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twenty_calls import twenty_calls


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", [torch.tensor, tuple, list])
def test_lengths_may_vary(kind: Callable[[Any], Any], reduction: str, zero_infinity: bool) -> None:
    def make() -> Callable[..., Any]:
        model = nn.Linear(8, 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor, lengths: Any, of_targets: Any) -> Any:
            log_probs = model(x).log_softmax(-1)
            options = {"reduction": reduction, "zero_infinity": zero_infinity}
            loss = F.ctc_loss(log_probs, y, lengths, of_targets, **options)
            loss.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), model.weight.detach().clone()

        return step

    def call(at: int) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(at)
        x, y = torch.randn(10, 3, 8, generator=draw), torch.randint(1, 12, (3, 4), generator=draw)
        return x, y, kind((10 - at % 3, 9, 10)), kind((4, 3 - at % 2, 2))

    twenty_calls(make, call, 2)
