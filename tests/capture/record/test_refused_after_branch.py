"""A call that is refused after a branch on a value leaves the state as it was, or says what exactly has changed."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.errors import CannotCapture, NumpyOnTensor

SMALL, LARGE = torch.full((2, 4), 0.1), torch.full((2, 4), 1e3)


class Training:
    """Branches after an update on whether the loss is large; what follows there cannot be captured."""

    def __init__(self, *, updates: bool, logs: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.updates, self.logs = updates, logs
        self.calls = 0
        self.last = torch.zeros(())
        self.logged: list[float] = []
        if not updates:
            self.model[2] = nn.Identity()

    def step(self, x: torch.Tensor) -> Any:
        self.calls += 1
        loss = (self.model(x) * x.mean()).square().mean()
        if self.updates:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.logs:
                log(self.logged, loss.detach())
        self.last = loss.detach()
        if loss > 1e3:
            return np.linalg.norm(loss.detach())
        return loss.detach()

    def state(self) -> dict[str, Any]:
        momentum = {
            f"momentum of {at}": value
            for at, state in enumerate(self.optimizer.state.values())
            for value in state.values()
        }
        tensors = {**self.model.state_dict(), **momentum}
        plain = {"calls": self.calls, "last": self.last.item(), "random state": torch.get_rng_state().tolist()}
        return {**{name: tensor.tolist() for name, tensor in tensors.items()}, **plain, "logged": list(self.logged)}


@weft.opaque
def log(logged: list[float], loss: torch.Tensor) -> None:
    logged.append(loss.item())


def changed(training: Training, before: dict[str, Any]) -> set[str]:
    now = training.state()
    return {name for name in before if now[name] != before[name]}


def refused(training: Training) -> tuple[set[str], list[str]]:
    """What a refused call has changed, and the notes of its error."""
    step = weft.compile(training.step)
    step(SMALL)
    step(SMALL)
    before = training.state()
    with pytest.raises(NumpyOnTensor) as caught:
        step(LARGE)
    after = changed(training, before)
    return after, getattr(caught.value, "__notes__", [])


def test_without_updates_the_state_is_as_before() -> None:
    assert refused(Training(updates=False)) == (set(), [])


def test_what_a_refused_call_has_changed_is_said() -> None:
    training = Training(updates=True)
    after, (note,) = refused(training)
    names = {name for name, _ in training.model.named_parameters()}
    statistics = {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    momentum = {f"momentum of {at}" for at in range(len(names))}
    assert after == {*names, *statistics, *momentum, "logged", "random state"}
    (updated,) = re.findall(r"updated in place ([^;]+); ", note)
    assert updated.endswith(" and 5 more")  # ten of fifteen are named
    assert all(f"self.model.{name}" in updated for name in names | statistics)
    assert "called log" in note
    assert "drawn random numbers by" in note
    assert "test_refused_after_branch.py:" in note
    assert "if loss > 1e3:" in note


def test_a_fallback_takes_updates_back_and_says_what_is_called_again(caplog: pytest.LogCaptureFixture) -> None:
    compiled, eager = Training(updates=True), Training(updates=True)
    step = weft.compile(compiled.step, fallback="eager")
    with caplog.at_level(logging.WARNING):
        for training, run in ((compiled, step), (eager, eager.step)):
            torch.manual_seed(1)
            run(SMALL)
            run(LARGE)
            training.random = torch.get_rng_state()
    assert "has called log, and calls them again uncompiled" in caplog.text
    assert compiled.logged == [eager.logged[0], eager.logged[1], eager.logged[1]]
    compiled.logged, eager.logged = [], []
    assert compiled.state() == eager.state()


@pytest.mark.parametrize("draws", [False, True])
def test_a_path_that_needs_a_plain_size_is_captured_with_sizes_as_numbers(draws: bool) -> None:
    """The operations before the branch were captured with a symbolic size, which is no number to the code after it. A
    check before the branch (here of a size that is in a tensor) leaves nothing behind."""

    def make() -> tuple[Any, nn.Linear]:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)

        def step(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            y = model(x[..., None]).squeeze(-1).roll(x.shape[1] // 2, 1)
            y = nn.functional.dropout(y, 0.5) if draws else y
            y = nn.functional.interpolate(y[None, None], size=(rows, x.shape[1]))
            if x.sum() > 10:
                try:
                    text = json.dumps(y.shape[3])
                except TypeError:
                    text = ""
                y = y * (1 + len(text))
            loss = y.square().sum()
            model.zero_grad()
            loss.backward()
            return loss.detach()

        return step, model

    (plain, theirs), (step, ours) = make(), make()
    compiled = weft.compile(step)
    for at, (size, value) in enumerate([(4, 0.1), (5, 0.1), (6, 4.0), (6, 0.1), (7, 4.0), (6, 5.0)]):
        x, rows = torch.full((2, size), value), torch.tensor(2 + at % 3)
        torch.manual_seed(at)
        expected = plain(x, rows)
        torch.manual_seed(at)
        assert torch.equal(compiled(x, rows), expected)
        assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_sizes_that_are_marked_dynamic_stay_symbols() -> None:
    @weft.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.roll(x.shape[1] // 2, 1)
        if x.sum() > 10:
            try:
                y = y * len(json.dumps(y.shape[1]))
            except TypeError:
                y = y + 1
        return y

    x, large = torch.full((2, 5), 0.1), torch.full((2, 6), 4.0)
    for each in (x, large):
        weft.mark_dynamic(each, 1)
    step(x)
    with pytest.raises(CannotCapture):
        step(large)
