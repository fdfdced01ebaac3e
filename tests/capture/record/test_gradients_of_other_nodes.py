"""Operations whose gradients depend on values, where the node of autograd behind their result is another one's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft


class LargestOfAll(torch.autograd.Function):
    """A maximum with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.sizes = x.shape
        return x.max()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.expand(ctx.sizes)


class Filled(torch.autograd.Function):
    """Zeros in the place of positive numbers, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.masked_fill(x > 0, torch.tensor(0.0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def _without_grad(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x) * 1
    with torch.no_grad():
        y.masked_fill_(y > 0, torch.tensor(0.0))
    return y.sum()


def _row_filled(linear: Any, x: Tensor) -> Tensor:
    y = linear(x)
    y[0].masked_fill_(y[0] > 0, linear.bias[1])
    return y.sum()


def _recomputed(of: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda linear, x: checkpoint(lambda y: of(linear(y)), x.requires_grad_(), use_reentrant=True).sum()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a custom function": lambda linear, x: LargestOfAll.apply(linear(x)),
    "a custom function that fills": lambda linear, x: Filled.apply(linear(x)).sum(),
    "without grad": _without_grad,
    "a view": _row_filled,
    "a product, recomputed": _recomputed(lambda y: y.prod(1)),
    "a maximum, recomputed": _recomputed(lambda y: y.max()),
    "filled, recomputed": _recomputed(lambda y: y.masked_fill(y > 0, torch.tensor(0.0))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradients_of_other_nodes_are_left_alone(name: str) -> None:
    def trained(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        linear = nn.Linear(3, 4)

        def step(x: Tensor) -> Tensor:
            linear.zero_grad()
            LOSSES[name](linear, x).backward()
            return linear.weight.grad.clone()  # type: ignore[union-attr]

        run = weft.compile(step) if compiled else step
        return [run(torch.randn(2, 3)) for _ in range(4)]

    assert all(map(torch.equal, trained(False), trained(True)))
