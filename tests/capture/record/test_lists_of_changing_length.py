"""Lists among the arguments whose length changes: one capture for each length, and one more at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from twenty_calls import twenty_calls

LENGTHS = (2, 4, 3, 5)
Values = Callable[[int, int], Any]


def tensors(at: int, count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(at)
    return [torch.randn(2 + at * (each + 1) % 5, 6, generator=draw) for each in range(count)]


def _trained(loss_of: Callable[..., torch.Tensor]) -> Callable[[], Callable[..., Any]]:
    def make() -> Callable[..., Any]:
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(values: Any) -> Any:
            loss = loss_of(model, values)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), model.weight.detach().clone()

        return step

    return make


CASES: dict[str, tuple[Callable[..., torch.Tensor], Values]] = {
    "padded": (lambda m, xs: m(rnn.pad_sequence(xs)).square().mean(), tensors),
    "concatenated": (lambda m, xs: m(torch.cat(xs)).square().mean(), tensors),
    "stacked": (lambda m, xs: m(torch.stack(xs)).square().mean(), lambda at, n: [torch.ones(6) * at for _ in range(n)]),
    "looped over": (lambda m, xs: sum(m(x).square().mean() for x in xs), tensors),
    "numbers": (lambda m, ns: m(torch.ones(6)).sum() * sum(ns) / len(ns), lambda at, n: [at / 3 + k for k in range(n)]),
    "tensor of numbers": (
        lambda m, ns: m(torch.ones(6)).sum() * torch.tensor(ns).float().mean(),
        lambda at, n: [at + k for k in range(n)],
    ),
    "in dictionaries": (
        lambda m, bs: sum(m(b["x"]).mean() * b["w"] for b in bs),
        lambda at, n: [{"x": x, "w": at / 2, "id": f"{at}"} for x in tensors(at, n)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_length_is_captured_once(name: str) -> None:
    loss_of, values = CASES[name]
    twenty_calls(_trained(loss_of), lambda at: (values(at, LENGTHS[at % 4]),), len(LENGTHS) + 2)


def test_microbatches_of_a_range_are_captured_for_their_number() -> None:
    def step(x: torch.Tensor) -> Any:
        return [x[at : at + 4].sum() for at in range(0, len(x), 4)], list(range(0, 8, 3))

    # By their number, and by whether the last one has one row, four or another number.
    twenty_calls(lambda: step, lambda at: (torch.arange(5.0 + at * 5 % 12),), 10)


def test_ranges_of_sizes_are_ranges() -> None:
    def step(x: torch.Tensor) -> Any:
        found = range(1, x.shape[0], 3)
        return x + 1, isinstance(found, range), len(found), list(found), range(3), range(2, 5)

    twenty_calls(lambda: step, lambda at: (torch.ones(4 + at % 6),), 7)
