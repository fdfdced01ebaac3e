"""Attributes that a step removes, adds and assigns are in eager's order, also where other code does the same between
calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft

Made = tuple[Callable[[torch.Tensor], Any], Callable[[int], Any]]


class State:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = 1, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        self.last = x * 2
        return x

    def note(self) -> None:
        self.seen = 1
        a = self.a
        del self.a
        self.a = a + 1


def removed_and_added() -> Made:
    s = State(a=1, b=2, c=3)

    def step(x: torch.Tensor) -> Any:
        del s.b
        s.d = 4
        s.b = 5
        return x

    def after(at: int) -> None:
        if at % 2:
            del s.d

    return step, lambda at: (list(vars(s)), after(at))


def moved_with_its_value() -> Made:
    s = State(a=1, other=1, b=2)

    def step(x: torch.Tensor) -> Any:
        a, b = s.a, s.b
        del s.a, s.b
        s.a, s.c, s.b = a, 1, b
        return x

    def after(at: int) -> None:
        s.other = vars(s).pop("other")
        setattr(s, f"other{at}", 1)

    return step, lambda at: (list(vars(s)), after(at))


def come_and_gone() -> Made:
    s = State(a=1, b=2, c=3)

    def step(x: torch.Tensor) -> Any:
        if hasattr(s, "c"):
            del s.c
        else:
            s.c, s.d = 4, 5
        return x

    return step, lambda at: list(vars(s))


def named_in_several_functions() -> Made:
    s = State(a=1)

    def helper() -> None:
        s.k = 1

    def step(x: torch.Tensor) -> Any:
        s.z = x * 2
        helper()
        s.m = 1
        del s.a
        s.a = x + 1
        return x

    def after(at: int) -> Any:
        found = list(vars(s))
        for name in found[1:]:
            delattr(s, name)
        s.a = 1
        return found

    return step, after


def of_a_module() -> Made:
    net = Net()

    def after(at: int) -> Any:
        found = list(vars(net))
        if at % 2:
            del net.seen, net.last
        return found

    return lambda x: net(x), after


def of_a_tensor() -> Made:
    weight: Any = nn.Parameter(torch.ones(2))
    weight.a, weight.b = 1, 2

    def step(x: torch.Tensor) -> Any:
        del weight.a
        weight.c, weight.a = 3, 4
        return x * weight.a

    return step, lambda at: (list(vars(weight)), delattr(weight, "c"))


@pytest.mark.parametrize(
    "case",
    [removed_and_added, moved_with_its_value, come_and_gone, named_in_several_functions, of_a_module, of_a_tensor],
)
def test_attributes_are_in_the_order_of_eager(case: Callable[[], Made]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[str]:
        step, after = case()
        step = wrap(step)
        return [str((step(torch.full((2,), float(at))), after(at))) for at in range(5)]

    assert run(weft.compile) == run(lambda step: step)
