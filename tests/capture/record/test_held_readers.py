"""Functions of Python's own types that read attributes, and that the user's code holds under names of its own."""

from __future__ import annotations

import decimal
import inspect
import operator
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import Tensor

import weft


class Config:
    """What steps read."""

    def __init__(self) -> None:
        self.rate = 2

    def scaled(self, factor: int) -> int:
        """A multiple of the rate."""
        return self.rate * factor


class Slot:
    """The same in a slot."""

    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 2


config, slot = Config(), Slot()
get, get_of_class, put = object.__getattribute__, type.__getattribute__, object.__setattr__
bound, own = config.__getattribute__, Config.__getattribute__
of_slot, described = Slot.rate.__get__, Slot.rate  # type: ignore[attr-defined]
by_name, by_method = operator.attrgetter("rate"), operator.methodcaller("scaled", 3)


def put_by_held(x: Tensor) -> Tensor:
    put(config, "rate", get(config, "rate") + 1)
    return x * get(config, "rate")


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "object.__getattribute__": lambda x: x * get(config, "rate"),
    "of a class": lambda x: x * get_of_class(Config, "scaled")(config, 2),
    "of an object": lambda x: x * bound("rate"),
    "inherited": lambda x: x * own(config, "rate"),
    "of a slot": lambda x: x * of_slot(slot),
    "descriptor of a slot": lambda x: x * described.__get__(slot),
    "attrgetter": lambda x: x * by_name(config),
    "methodcaller": lambda x: x * by_method(config),
    "getattr_static": lambda x: x * inspect.getattr_static(config, "rate"),
    "object.__setattr__": put_by_held,
}


@pytest.mark.parametrize("name", READS)
def test_what_they_read_is_read_anew_after_a_change(name: str) -> None:
    config.rate = slot.rate = 2
    read = READS[name]
    step = weft.compile(read)
    for at in range(4):
        before = config.rate
        ours = step(torch.ones(2))
        config.rate = before
        assert torch.equal(ours, read(torch.ones(2)))
        config.rate = slot.rate = 5 + 2 * at


def test_subclasses_that_are_made_between_calls_count() -> None:
    class Base:
        weight = 1

    made: list[type] = []
    held, unbound = Base.__subclasses__, type.__subclasses__
    steps: list[Callable[[Tensor], Tensor]] = [
        lambda x: x * len(Base.__subclasses__()),
        lambda x: x * sum(each.weight for each in Base.__subclasses__()),
        lambda x: x * sum(each.weight for each in held()),
        lambda x: x * sum(each.weight for each in unbound(Base)),
    ]
    compiled = [weft.compile(step) for step in steps]
    for at in range(4):
        for ours, step in zip(compiled, steps, strict=True):
            assert torch.equal(ours(torch.ones(2)), step(torch.ones(2)))
        if at % 2:
            made[-1].weight = 7 + at  # type: ignore[attr-defined]
        else:
            made.append(type(f"Derived{at}", (Base,), {}))


@pytest.fixture
def precision() -> Any:
    with decimal.localcontext() as context:
        yield context


def test_the_context_of_decimals_counts(precision: decimal.Context) -> None:
    third = Decimal(1)
    current = decimal.getcontext
    steps: list[Callable[[Tensor], Any]] = [
        lambda x: x * decimal.getcontext().prec,
        lambda x: x * current().prec,
        lambda x: (x, Decimal(1) / Decimal(3)),
        lambda x: (x, third / 3),
    ]
    compiled = [weft.compile(step) for step in steps]
    for at in range(3):
        for ours, step in zip(compiled, steps, strict=True):
            assert str(ours(torch.ones(2))) == str(step(torch.ones(2)))
        precision.prec = 3 + at
        precision.rounding = decimal.ROUND_UP


def test_a_step_changes_the_context_of_decimals(precision: decimal.Context) -> None:
    def step(x: Tensor) -> Any:
        decimal.getcontext().prec += 1
        with decimal.localcontext() as inner:
            inner.prec = 4
            short = Decimal(2) / 3
        return x, short, Decimal(2) / 3

    compiled, found = weft.compile(step), []
    for run in (compiled, step):
        precision.prec = 10
        found.append([(str(run(torch.ones(2))), precision.prec) for _ in range(4)])
    assert found[0] == found[1]
