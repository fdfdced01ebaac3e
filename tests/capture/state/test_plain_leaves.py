"""Tensors that do not require grad, until a step or the code between its calls makes them require it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal
from weft.errors import PythonStateChanged


class Held:
    """A parameter, and a tensor that does not require grad."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.weight = tensor, nn.Parameter(torch.full((2,), 2.0))

    def backward(self, x: torch.Tensor) -> None:
        (self.weight * (x + self.tensor)).square().sum().backward()
        self.weight.grad = None


def with_gradient() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.grad = torch.ones(2)
    return tensor


TENSORS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.zeros(2),
    "with a gradient": with_gradient,
    "a buffer": lambda: nn.BatchNorm1d(2).running_mean,
}


def made_to_require_grad(held: Held, x: torch.Tensor) -> None:
    held.tensor.requires_grad_()
    held.backward(x)


def for_a_while(held: Held, x: torch.Tensor) -> None:
    made_to_require_grad(held, x)
    held.tensor.requires_grad_(False)


def assigned(held: Held, x: torch.Tensor) -> None:
    held.tensor.grad = x * 2 if held.tensor.grad is None else held.tensor.grad + x


def gradients(make: Callable[[], Any], change: Callable[[Held, torch.Tensor], None], raises: bool) -> list[list[Any]]:
    """What a step and the same step compiled leave on the tensor, call by call."""
    found = []
    for compiled in (True, False):
        held = Held(make())

        def step(x: torch.Tensor, held: Held = held) -> None:
            change(held, x)
            if raises:
                raise ValueError("of the step")

        run = weft.compile(step) if compiled else step
        rows: list[Any] = []
        for at in range(3):
            try:
                run(torch.full((2,), at + 1.0))
            except ValueError as error:
                rows.append(str(error))
            grad = held.tensor.grad
            assert grad is None or type(grad) is torch.Tensor
            rows.append((held.tensor.requires_grad, None if grad is None else grad.clone()))
        found.append(rows)
    return found


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("change", [made_to_require_grad, for_a_while, assigned])
def test_a_step_that_raises_leaves_what_eager_leaves(make: Any, change: Any) -> None:
    assert_equal(*gradients(make, change, raises=True))


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("change", [for_a_while, assigned])
def test_the_gradient_of_a_tensor_that_requires_none_is_state(make: Any, change: Any) -> None:
    assert_equal(*gradients(make, change, raises=False))


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_refused_step_leaves_the_tensor_as_it_was(make: Any) -> None:
    held = Held(make())
    before = held.tensor.grad
    step = weft.compile(lambda x: made_to_require_grad(held, x))
    for _ in range(2):
        with pytest.raises(PythonStateChanged, match=r"held\.tensor\.requires_grad \(False -> True\)"):
            step(torch.ones(2))
        assert held.tensor.grad is before
        assert not held.tensor.requires_grad


class WithView:
    """A view of a tensor; the tensor itself is nowhere in the state of a step that uses the view."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base, self.view, self.weight = base, base.view(2), nn.Parameter(torch.full((2,), 3.0))


def of_the_view(held: WithView, x: torch.Tensor) -> torch.Tensor:
    loss = (held.view * x * held.weight).sum()
    loss.backward()
    held.weight.grad = None
    return loss.detach()


def of_the_tensor_too(held: WithView, x: torch.Tensor) -> torch.Tensor:
    return of_the_view(held, x * held.base)


def multiplied(held: WithView, x: torch.Tensor) -> torch.Tensor:
    return (x * held.view).detach()


def asked(held: WithView, x: torch.Tensor) -> tuple[bool, bool, torch.Tensor]:
    return held.view.requires_grad, held.view.is_leaf, (held.view * x).detach()


@pytest.mark.parametrize("passes_view", [False, True])
@pytest.mark.parametrize("first", [0, 2, -1], ids=["before all calls", "between calls", "before the view is made"])
@pytest.mark.parametrize("use", [of_the_view, of_the_tensor_too, multiplied, asked])
def test_a_view_of_a_tensor_that_is_made_to_require_grad(use: Any, first: int, passes_view: bool) -> None:
    found = []
    for compiled in (True, False):
        held = WithView(torch.ones(2).requires_grad_(first < 0))

        def step(x: torch.Tensor, held: WithView = held) -> Any:
            return use(held, x)

        run, rows = weft.compile(step) if compiled else step, []
        for at in range(4):
            if at == first:
                held.base.requires_grad_()
                held.view.register_hook(lambda grad: grad * 2)
            result = run(held.view if passes_view and first >= 0 else torch.full((2,), at + 1.0))
            grad = held.base.grad
            rows.append((result, None if grad is None else grad.clone(), held.view.requires_grad, held.view.is_leaf))
        found.append(rows)
    assert_equal(*found)
