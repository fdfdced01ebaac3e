"""Numbers that the data decides as sizes, positions and operands of ``max`` and ``min``: one path for usual values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from both_ways import assert_equal, sgd, snapshot


def _trained(count: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, count)
    return model, sgd(model.parameters())


def _both_ways(make: Callable[[], Callable[..., Any]], calls: list[Any]) -> list[str]:
    """Compare all calls with eager, bit for bit; returns the reasons of the captures."""
    eager, step = make(), weft.compile(make())
    for call in calls:
        torch.manual_seed(5), np.random.seed(5)
        expected = eager(*call)
        torch.manual_seed(5), np.random.seed(5)
        assert_equal(expected, step(*call))
    return step.captures


def _lengths() -> Callable[..., Any]:
    model, optimizer = _trained()

    def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        losses = [model(rows[None, : max(2, int(n))]).pow(2).mean() for rows, n in zip(x, lengths, strict=True)]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), [p.detach().clone() for p in model.parameters()]

    return step


def test_rows_that_are_cut_to_lengths_of_the_data_are_captured_twice_at_most() -> None:
    x = torch.randn(2, 9, 6)
    calls = [(x, torch.tensor(n)) for n in ([3, 5], [9, 2], [6, 6], [1, 4])]
    assert len(_both_ways(_lengths, calls)) <= 2


def _pairs() -> Callable[..., Any]:
    def step(x: torch.Tensor, length: torch.Tensor) -> Any:
        cut = x[: int(length)]
        return F.cross_entropy(cut[:-1], cut[1:].argmax(1), reduction="none").sum()

    return step


def test_lengths_for_which_torch_takes_another_path_are_captured_then() -> None:
    x = torch.randn(9, 6)
    assert len(_both_ways(_pairs, [(x, torch.tensor(n)) for n in (5, 7, 2, 3, 2)])) <= 3


def _box() -> Callable[..., Any]:
    def step(x: torch.Tensor) -> Any:
        size, share = x.shape[2], np.sqrt(1.0 - np.random.beta(1.0, 1.0))
        middle, half = np.random.randint(size), int(size * share) // 2
        a, b = np.clip(middle - half, 0, size), np.clip(middle + half, 0, size)
        x = x.clone()
        x[:, :, a:b] = x.flip(0)[:, :, a:b]
        return x

    return step


def test_a_box_drawn_by_numpy_is_cut_out_in_one_capture() -> None:
    eager, step = _box(), weft.compile(_box())
    for seed in range(8):
        x = torch.randn(2, 3, 16)
        np.random.seed(seed)
        expected = eager(x)
        np.random.seed(seed)
        assert_equal(expected, step(x))
    assert len(step.captures) <= 2


def _queue() -> Callable[..., Any]:
    torch.manual_seed(0)
    queue, pointer = torch.randn(4, 16), torch.zeros(1, dtype=torch.long)

    def step(x: torch.Tensor) -> Any:
        similar = x @ queue.clone()
        at = int(pointer)
        queue[:, at : at + len(x)] = x.T
        pointer[0] = (at + len(x)) % 16
        return similar, queue.clone(), pointer.clone()

    return step


def test_a_queue_that_is_written_at_a_position_in_a_tensor_goes_around() -> None:
    assert len(_both_ways(_queue, [(torch.randn(4, 4),) for _ in range(6)])) <= 4


@pytest.mark.parametrize(
    "of",
    [
        lambda a, b: max(a, b),
        lambda a, b: min(b, a),
        lambda a, b: max(a, b, 0.5),
        lambda a, b: min(int(a), int(b), 3),
        lambda a, b: max(int(a), b),
        lambda a, b: min(a, 2),
        lambda a, b: max([a, b]),
    ],
)
def test_the_larger_of_two_numbers_is_the_one_that_python_takes(of: Callable[[Any, Any], Any]) -> None:
    def eager(x: torch.Tensor) -> Any:
        a, b = x.tolist()
        return of(a, b)

    step = weft.compile(eager)
    for numbers in [(1.5, 2.0), (2.0, 1.5), (0.0, -0.0), (-0.0, 0.0), (float("nan"), 1.0), (1.0, float("nan"))]:
        try:
            expected = repr(eager(torch.tensor(numbers)))
        except ValueError:  # int(nan)
            continue
        assert repr(step(torch.tensor(numbers))) == expected


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float))


def _scheduled() -> Callable[..., Any]:
    model, optimizer = _trained()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        returned = float(loss), optimizer.param_groups[0]["lr"], scheduler.num_bad_epochs, scheduler.best
        return *returned, snapshot(model)

    return step


def test_a_schedule_that_looks_at_the_loss_lowers_the_rate_as_in_eager() -> None:
    _both_ways(_scheduled, [(torch.randn(3, 6) * scale,) for scale in (1.0, 0.5, 3.0, 4.0, 0.1, 0.2)])


def _made_of_numbers() -> Callable[..., Any]:
    def step(x: torch.Tensor) -> Any:
        number, count = x.sum().item(), int(x.abs().sum())
        made = torch.tensor(number), torch.as_tensor(count), torch.tensor(count, dtype=torch.float64)
        return *made, torch.tensor(number > 0)

    return step


def test_tensors_are_made_of_numbers_of_the_data() -> None:
    assert len(_both_ways(_made_of_numbers, [(torch.randn(3),) for _ in range(4)])) == 1


def _dispatch() -> Callable[..., Any]:
    """Tokens sorted by expert, as a mixture of experts cuts them: how many each expert gets is one list."""
    model, optimizer = _trained()

    def step(x: torch.Tensor, experts: torch.Tensor) -> Any:
        counts = torch.bincount(experts, minlength=3)
        parts = x[experts.argsort(stable=True)].split(counts.tolist())
        loss = torch.stack([model(part).square().sum() * (at + 1) for at, part in enumerate(parts)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), counts, [p.detach().clone() for p in model.parameters()]

    return step


def test_a_list_of_as_many_numbers_as_the_data_says_has_a_path_for_each_length() -> None:
    x = torch.randn(8, 6)
    usual = [(x, torch.randint(3, (8,), generator=torch.Generator().manual_seed(at))) for at in range(4)]
    captures = _both_ways(_dispatch, [*usual, (x, torch.tensor([0, 4, 1, 1, 2, 0, 3, 2])), usual[0]])
    assert len(captures) == 3  # the first call, and the two lengths


@pytest.mark.parametrize("of", [lambda kept: [2 * row for row in kept.unbind()], lambda kept: kept.tolist()])
def test_rows_that_a_mask_keeps_are_taken_one_by_one(of: Callable[[torch.Tensor], Any]) -> None:
    calls = [(torch.tensor(values),) for values in ([1.0, -1.0, 2.0], [3.0, 4.0, -1.0], [-1.0, 5.0, -2.0])]
    assert len(_both_ways(lambda: lambda x: of(x[x > 0]), calls)) == 3
