"""What Python looks up at each call: its own names, which a variable of the module may hide, and what makes the
missing values of a dictionary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft

CALLS = 8


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    for name in ("max", "float", "len", "range", "getattr"):
        globals().pop(name, None)


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x * max(0.5, 2.0),
    "len": lambda x: x * len((1, 2)),
    "float": lambda x: x * float("3"),
    "range": lambda x: x + sum(range(4)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_variable_of_the_module_that_hides_a_name_of_pythons(guard_checks: str, name: str) -> None:
    step = STEPS[name]
    compiled = weft.compile(step)
    x = torch.ones(2)
    hidden: dict[str, Any] = {"max": lambda *_: 7.0, "len": lambda _: 5, "float": lambda _: 4.0, "range": lambda _: [1]}
    for _ in range(CALLS):
        assert torch.equal(compiled(x), step(x))
    assert len(compiled.captures) == 1
    plain = step(x)
    globals()[name] = hidden[name]
    changed = step(x)
    assert not torch.equal(changed, plain)
    assert torch.equal(compiled(x), changed)
    del globals()[name]
    assert torch.equal(compiled(x), plain)
    assert len(compiled.captures) == 2


def test_another_function_for_missing_values(guard_checks: str) -> None:
    weights: defaultdict[str, float] = defaultdict(lambda: 1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        value = weights["more"]
        del weights["more"]
        return x * value

    compiled = weft.compile(step)
    x = torch.ones(2)
    for _ in range(CALLS):
        assert torch.equal(compiled(x), x)
    weights.default_factory = lambda: 2.0
    assert torch.equal(compiled(x), x * 2)
    weights.default_factory = None
    with pytest.raises(KeyError):
        compiled(x)


def test_a_key_of_another_type() -> None:
    keyed: dict[Any, float] = {1: 2.0}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * keyed[1] * (3.0 if next(iter(keyed)) is True else 1.0)

    compiled = weft.compile(step)
    x = torch.ones(2)
    for _ in range(4):
        assert torch.equal(compiled(x), x * 2)
    keyed[True] = keyed.pop(1)
    assert torch.equal(compiled(x), x * 6)


def test_what_a_step_assigns_makes_the_missing_values_from_then_on() -> None:
    results = []
    for compile_ in (weft.compile, lambda step: step):
        weights: defaultdict[str, float] = defaultdict(float)

        def step(x: torch.Tensor, weights: defaultdict[str, float] = weights) -> torch.Tensor:
            weights.default_factory = int
            return x + 1

        called: Any = compile_(step)
        called(torch.ones(2))
        called(torch.ones(2))
        results.append((weights.default_factory, weights["new"]))
    assert results[0] == results[1] == (int, 0)
