"""How often a step is captured over many calls with varying batches, lengths, schedules, arguments and state."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counted_captures import Cases, Encoding
from torch import nn

import weft
from both_ways import assert_equal, detached

CALLS = 8
Case = tuple[Callable[..., Any], list[tuple[Any, ...]], Callable[[], Any]]
CASES = Cases()
case = CASES.case


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _batch(at: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(at)
    return torch.randn(rows, 6, generator=draw), torch.randint(0, 4, (rows,), generator=draw)


def _step() -> tuple[Callable[..., torch.Tensor], nn.Module, torch.optim.Optimizer]:
    model, optimizer = _model()

    def step(x: torch.Tensor, y: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y) * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer


def _case(step: Callable[..., Any], calls: list[Any], between: Callable[[], Any] = lambda: None) -> Case:
    return step, calls, between


@case()
def rows_vary() -> Case:
    return _case(_step()[0], [_batch(at, 3 + at % 5) for at in range(CALLS)])


@case()
def lengths_of_a_mask_vary() -> Case:
    model, optimizer = _model()

    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss = (model(x).mean(-1) * mask).sum() / mask.sum(-1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    lengths = [4 + at % 5 for at in range(CALLS)]
    return _case(step, [(torch.randn(3, n, 6), (torch.rand(3, n) > 0.2).float()) for n in lengths])


@case(3)
def numbers_vary() -> Case:
    train = _step()[0]

    def step(x: torch.Tensor, y: torch.Tensor, epoch: int, temperature: float) -> torch.Tensor:
        return train(x, y, temperature * 0.9**epoch)

    return _case(step, [(*_batch(at), at // 3, 1.0 - at / 100) for at in range(CALLS)])


@case()
def schedule_of_rate_and_betas() -> Case:
    model, _ = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _case(step, [_batch(at) for at in range(CALLS)], schedule.step)


@case()
def norms_to_clip_to() -> Case:
    model, optimizer = _model()

    def step(x: torch.Tensor, y: torch.Tensor, most: float, value: float) -> Any:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), most)
        nn.utils.clip_grad_value_(model.parameters(), value)
        optimizer.step()
        return loss.detach(), norm

    return _case(step, [(*_batch(at), 0.2 - at / 50, 0.1 - at / 100) for at in range(CALLS)])


@case()
def batches_of_user_dicts() -> Case:
    train = _step()[0]

    def step(batch: Any) -> Any:
        loss = train(batch["x"], batch.y)
        batch["loss"] = loss
        return loss

    return _case(step, [(Encoding(zip("xy", _batch(at), strict=True)),) for at in range(CALLS)])


@case()
def lists_of_numbers() -> Case:
    train = _step()[0]
    step = lambda x, y: train(torch.tensor(x), torch.as_tensor(y))
    return _case(step, [tuple(each.tolist() for each in _batch(at)) for at in range(CALLS)])


@case()
def lists_of_ints_as_indices() -> Case:
    train = _step()[0]

    def step(x: torch.Tensor, y: torch.Tensor, rows: list[int], columns: list[int]) -> torch.Tensor:
        x = x.clone()
        x[:, columns] = 0.5
        x[columns] *= 2
        return train(x[rows], y[rows], 1.0 + sum(rows) / 10)

    drawn = [([at % 4, (3 * at + 1) % 4, at % 3], [at % 4, -1 - (5 * at) % 4]) for at in range(CALLS)]
    return _case(step, [(*_batch(at), *lists) for at, lists in enumerate(drawn)])


@case(3)
def gradient_scaler() -> Case:
    model, optimizer = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), scaler.get_scale(), scaler.state_dict()

    return _case(step, [_batch(at) for at in range(CALLS)])


@case(3)
def nan_guard() -> Case:
    model, optimizer = _model()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        return loss.detach()

    return _case(step, [_batch(at) for at in range(CALLS)])


@case(4)  # one for each length until it is full
def window_in_a_list() -> Case:
    train = _step()[0]
    state: dict[str, Any] = {"losses": []}

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        state["losses"].append(train(x, y))
        state["losses"] = state["losses"][-3:]
        return torch.stack(state["losses"]).mean(), len(state["losses"])

    return _case(step, [_batch(at) for at in range(CALLS)])


@case(4)
def window_in_a_deque() -> Case:
    train = _step()[0]
    losses: collections.deque[torch.Tensor] = collections.deque(maxlen=3)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        losses.append(train(x, y))
        return torch.stack(list(losses)).mean(), len(losses)

    return _case(step, [_batch(at) for at in range(CALLS)])


@case(3)
def averages_that_start_anew() -> Case:
    train = _step()[0]
    state: dict[str, Any] = {"sums": collections.defaultdict(float)}

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = train(x, y)
        state["sums"]["loss"] += loss.item()
        state["sums"]["rows"] += len(x)
        total = dict(state["sums"])
        state["sums"] = collections.defaultdict(float)
        return total

    return _case(step, [_batch(at) for at in range(CALLS)])


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_captured_a_few_times_whatever_varies(name: str) -> None:
    make, limit = CASES[name]
    results = []
    for wrap in (lambda step: step, weft.compile):
        torch.manual_seed(1)
        step, calls, between = make()
        step = wrap(step)
        results.append([])
        for call in calls:
            results[-1].append(detached(step(*call)))
            between()
        results[-1].append(detached([dict(each.data) for call in calls for each in call if isinstance(each, Encoding)]))
    assert_equal(results[1], results[0])
    assert len(step.captures) <= limit, step.captures


def test_a_list_that_is_changed_and_replaced_is_changed_for_all_who_hold_it() -> None:
    def run(wrap: Callable[[Any], Any]) -> Any:
        state: dict[str, Any] = {"items": [torch.zeros(2)]}
        held = [state["items"]]

        def step(x: torch.Tensor) -> None:
            state["items"].append(x + 1)
            state["items"] = [each * 2 for each in state["items"][-2:]]

        step = wrap(step)
        for at in range(5):
            step(torch.full((2,), float(at)))
            held.append(state["items"])
        return held

    assert_equal(run(weft.compile), run(lambda step: step))
