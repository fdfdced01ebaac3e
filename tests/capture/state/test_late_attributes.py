"""Attributes that a step looks for and does not find at first, on objects of many kinds: the next call finds them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft

Step = Callable[[torch.Tensor], torch.Tensor]


class Plain:
    pass


class FallsBack:
    def __getattr__(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x


def function(x: torch.Tensor) -> torch.Tensor:
    return x


OWNERS: dict[str, Callable[[], Any]] = {
    "function": lambda: types.FunctionType(function.__code__, globals(), "function"),
    "lambda": lambda: lambda x: x,
    "partial": lambda: functools.partial(function),
    "object": Plain,
    "class": lambda: type("Made", (), {}),
    "module": lambda: nn.Linear(1, 1),
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
}


def caught(owner: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            return owner.on_end(x)
        except AttributeError:
            return x

    return step


def caught_with_others(owner: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            return owner.on_end(x)
        except Exception:  # noqa: BLE001
            return x

    return step


def caught_with_all(owner: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            return owner.on_end(x)
        except:  # noqa: E722
            return x

    return step


def suppressed(owner: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(AttributeError):
            return owner.on_end(x)
        return x

    return step


def called(owner: Any) -> Step:
    return lambda x: owner.on_end(x)


def compare(make: Callable[[], Any], look: Callable[[Any], Step]) -> None:
    """Call steps, eager and compiled, before the attribute is there, with it, with another one, and without again."""

    def run(wrap: Callable[[Step], Any]) -> list[float]:
        owner = make()
        step = wrap(look(owner))
        results = [step(torch.ones(1)).item()]
        for factor in (3.0, 5.0):
            owner.on_end = lambda x, factor=factor: x * factor
            results += [step(torch.ones(1)).item() for _ in range(2)]
        del owner.on_end
        return [*results, step(torch.ones(1)).item()]

    assert run(weft.compile) == run(lambda step: step) == [1.0, 3.0, 3.0, 5.0, 5.0, 1.0]


@pytest.mark.parametrize("look", [caught, caught_with_others, caught_with_all, suppressed])
@pytest.mark.parametrize("owner", OWNERS)
def test_an_attribute_that_appears_later_is_found(owner: str, look: Callable[[Any], Step]) -> None:
    compare(OWNERS[owner], look)


def test_an_attribute_that_appears_later_takes_the_place_of_a_fallback() -> None:
    compare(FallsBack, called)


def test_attributes_of_functions_that_no_code_names_do_not_count() -> None:
    owner = OWNERS["function"]()
    step = weft.compile(caught(owner))
    step(torch.ones(1))
    owner.other = 1
    step(torch.ones(1))
    assert len(step.captures) == 1, step.captures
