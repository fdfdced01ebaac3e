"""Tables of numbers in the Python state, indexed with numbers that change: eager's bits, and few captures."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twenty_calls import CALLS, twenty_calls

import weft

RATES = [0.1 * 0.9**at for at in range(CALLS)]
SCALES = (1.0, 0.5, 0.25)


def batch(at: int) -> torch.Tensor:
    return torch.full((4, 8), at / 7)


def training(rates: Any) -> Callable[..., Any]:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)

    def step(x: torch.Tensor, it: int) -> Any:
        optimizer.param_groups[0]["lr"] = rates[it]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, rates[it], model.weight.detach().clone()

    return step


class Curriculum:
    """A table in an attribute of a class and in one of the object, and a counter."""

    widths = (1, 2, 3, 4, 5)

    def __init__(self) -> None:
        self.temperatures = [1.0 - 0.04 * at for at in range(CALLS)]
        self.calls = 0

    def __call__(self, x: torch.Tensor, at: int) -> Any:
        self.calls += 1
        part = x.sum(0) * self.widths[at % 5]
        return part / self.temperatures[self.calls - 1], self.calls, self.temperatures[-self.calls]


def sized(x: torch.Tensor, at: int) -> Any:
    return x.sum() * SCALES[at % 3], f"{SCALES[at % 3]:.3f}"


@pytest.mark.parametrize("make", [lambda: training(RATES), lambda: training(tuple(RATES)), Curriculum, lambda: sized])
def test_an_index_that_changes_needs_two_captures(make: Callable[[], Any]) -> None:
    twenty_calls(make, lambda at: (batch(at), at), 2)


def test_an_array_of_rates_is_read_by_each_call() -> None:
    twenty_calls(lambda: training(np.array(RATES)), lambda at: (batch(at), at), 4)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [(adam, "weight_decay"), (adam, "eps"), (adam, "betas"), (momentum, "momentum"), (momentum, "weight_decay")],
)
@pytest.mark.parametrize("inside", [False, True])
def test_settings_from_arrays_of_numpy(kind: Callable[..., Any], setting: str, inside: bool) -> None:
    """As in the training of DINO, where both a rate and another setting come from tables."""
    rates, others = np.cos(np.linspace(0, 1, CALLS)) / 10, np.linspace(0.05, 0.2, CALLS)

    def make() -> Callable[..., Any]:
        model = nn.Linear(8, 4)
        optimizer = kind(model.parameters())

        def set_all(at: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = rates[at]
                group[setting] = (others[at], 0.9) if setting == "betas" else others[at]

        def step(x: torch.Tensor, at: int) -> Any:
            if inside:
                set_all(at)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, model.weight.detach().clone()

        before.append(set_all)
        return step

    before: list[Callable[[int], None]] = []

    def call(at: int) -> tuple[torch.Tensor, int]:
        if not inside:
            before[-1](at)
        return batch(at), at

    twenty_calls(make, call, 4)


def test_an_index_that_the_step_draws() -> None:
    def make() -> Callable[..., Any]:
        random.seed(3)
        return lambda x: x.sum() * RATES[random.randrange(CALLS)]

    twenty_calls(make, lambda at: (batch(at),), 1)


def test_a_table_that_leaves_the_step_is_the_list_itself() -> None:
    table, left = [1.0, 2.0, 3.0], {}

    def step(x: torch.Tensor, at: int) -> Any:
        left["table"] = table
        whole = (type(table) is list, table == [1.0, 2.0, 3.0], max(table), table[1:], sorted(table, reverse=True))
        return x.sum() * table[at], table, whole, torch.tensor(table)

    compiled = twenty_calls(lambda: step, lambda at: (batch(at), at % 3), 2)
    assert compiled(batch(1), 2)[1] is table
    assert left["table"] is table


def test_new_contents_are_read() -> None:
    def calls(wrap: Callable[..., Any]) -> list[torch.Tensor]:
        table = [1.0, 2.0, 3.0, 4.0]
        step = wrap(lambda x, at: x.sum() * table[at])
        found = []
        for at in range(CALLS):
            if at == 10:
                table[:] = [5.0, 6.0, 7.0, 8.0]
            found.append(step(batch(at), at % 4))
        return found

    torch.testing.assert_close(calls(weft.compile), calls(lambda step: step), rtol=0, atol=0)


def test_a_list_that_the_step_writes_to_is_plain() -> None:
    def make() -> Callable[..., Any]:
        counts = [0, 0, 0]

        def step(x: torch.Tensor, at: int) -> Any:
            counts[at] += 1
            return x.sum() * counts[at], counts[at], list(counts)

        return step

    twenty_calls(make, lambda at: (batch(at), at % 3), 8)


def test_an_index_out_of_range_raises_what_eager_raises() -> None:
    table = [1.0, 2.0, 3.0]
    step = weft.compile(lambda x, at: x.sum() * table[at])
    assert [step(batch(1), at) for at in (0, 1, 2, -1, -3)] == [batch(1).sum() * table[at] for at in (0, 1, 2, -1, -3)]
    for at in (3, -4):
        with pytest.raises(IndexError, match="list index out of range"):
            step(batch(1), at)
    assert step(batch(1), 1) == batch(1).sum() * 2.0
