"""Lists among the arguments whose length changes: one capture for each length, and one more at most."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


def _of_range(x: torch.Tensor) -> Any:
    return [x[at : at + 4].sum() for at in range(0, len(x), 4)], list(range(0, 8, 3))


def _while(x: torch.Tensor) -> Any:
    found, at = [], 0
    while at < len(x):
        found.append(x[at : at + 4] * 2)
        at += 4
    return found


def _trained_on_parts(x: torch.Tensor) -> Any:
    weight = torch.ones(6, 2, requires_grad=True)
    for at in range(0, x.shape[0], 4):
        part = x[at : at + 4, None].expand(-1, 6) * torch.arange(6.0)
        ((part @ weight).square().mean() * len(part) / len(x)).backward()
    return weight.grad


PIECES: dict[str, Callable[[torch.Tensor], Any]] = {
    "range": _of_range,
    "while": _while,
    "trained": _trained_on_parts,
    "split": lambda x: [part * 2 for part in x.split(4)],
    "written": lambda x: [x[at : at + 4].mul_(at) for at in range(0, len(x), 4)],
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_captured_for_their_number_and_for_a_last_one_of_one_row(name: str) -> None:
    # 5 to 16 rows: two, three or four pieces.
    twenty_calls(lambda: PIECES[name], lambda at: (torch.arange(5.0 + at * 5 % 12),), 2 * 3 + 1)


def _pad_by_hand(model: nn.Module, xs: list[torch.Tensor]) -> torch.Tensor:
    longest = max(len(x) for x in xs)
    return model(torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x in xs])).square().mean()


def _pad_in_place(model: nn.Module, xs: list[torch.Tensor]) -> torch.Tensor:
    padded = torch.zeros(len(xs), max([x.shape[0] for x in xs], default=0), 6)
    for row, x in zip(padded, xs, strict=True):
        row[: len(x)] = x
    return model(padded).square().mean() * min(map(len, xs))


@pytest.mark.parametrize("loss_of", [_pad_by_hand, _pad_in_place])
def test_whichever_sequence_is_the_longest(loss_of: Callable[..., torch.Tensor]) -> None:
    twenty_calls(_trained(loss_of), lambda at: (tensors(at, 3),), 2)


def test_largest_and_smallest_of_one_collection() -> None:
    def step(xs: list[torch.Tensor], scale: float, count: int) -> Any:
        lengths = [len(x) for x in xs]
        empty: list[int] = []
        with pytest.raises(ValueError, match="empty"):
            max(empty)
        return (
            *(max(iter([scale, 0.25, -scale])), min((count, 3)), max([count, scale, 2]), max([len(xs[0])])),
            *(max(empty, default=count), min((x.sum().item() for x in xs), default=None), max(lengths, default=0)),
            *(max("weft"), max([xs[0]], key=len).sum(), min([True, False]), max({1: 2, 3: 4})),
            *(math.isnan(max([math.nan, scale])), max([scale, math.nan]), min([[2], [1, 3]])),
        )

    calls = [([torch.ones(2 + at % 4), torch.ones(6)], 0.5 - at / 20, at % 7) for at in range(20)]
    twenty_calls(lambda: step, lambda at: calls[at], 6)


def test_ranges_of_sizes_are_ranges() -> None:
    def step(x: torch.Tensor) -> Any:
        found = range(1, x.shape[0], 3)
        return x + 1, isinstance(found, range), len(found), list(found), range(3), range(2, 5)

    twenty_calls(lambda: step, lambda at: (torch.ones(4 + at % 6),), 7)
