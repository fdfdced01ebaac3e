"""``weft.compile(step, fallback="eager")``: what weft cannot capture, and where the capture itself fails."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.capture.record import recorder

compile_module = importlib.import_module("weft.compile")
program_form = importlib.import_module("weft.program_form")


class Planted(Exception):
    """What the planted faults raise."""


class Training:
    """A step that changes Python state, an optimizer and torch's generator; where it ``counts`` its calls, no capture
    can follow."""

    def __init__(self, counts: bool = True) -> None:
        self.counts = counts
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.calls = 0
        self.losses: list[Tensor] = []
        self.seen: dict[str, Any] = {}

    def step(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
            self.seen["drawn"] = random.random()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.counts:
            self.losses.append(loss.detach())
        return loss.detach()

    def outcome(self) -> list[Any]:
        tensors = [*self.model.state_dict().values(), *self.losses, torch.get_rng_state()]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [self.calls, self.seen, random.getstate(), *(tensor.tolist() for tensor in (*tensors, *states))]


def run(wrap: Callable[[Any], Any], counts: bool) -> list[Any]:
    training = Training(counts)
    step = wrap(training.step)
    for _ in range(3):
        step(torch.ones(4, 4))
    return training.outcome()


def after(calls: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, which fails from one of its calls on."""
    count = 0

    def failing(*args: Any, **how: Any) -> Any:
        nonlocal count
        count += 1
        if count >= calls:  # also where the step is captured once more, for a module that it imported
            raise Planted("planted by this test")
        return original(*args, **how)

    return failing


PLANTS: dict[str, tuple[Any, str, int]] = {
    "the first operation": (recorder.OpRecorder, "emit", 1),
    "an operation of forward": (recorder.OpRecorder, "emit", 5),
    "an operation of the optimizer": (recorder.OpRecorder, "emit", 60),
    "guards": (compile_module, "Guards", 1),
    "signature": (compile_module, "signature", 1),
    "compilation": (program_form, "compile_graph", 1),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_crash_of_the_capture_leaves_the_step_to_eager(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, attribute, calls = PLANTS[name]
    counts = attribute == "emit"
    expected = run(lambda step: step, counts)
    monkeypatch.setattr(module, attribute, after(calls, getattr(module, attribute)))
    with caplog.at_level(logging.WARNING, "weft"):
        assert run(lambda step: weft.compile(step, fallback="eager"), counts) == expected
    (text,) = [record.getMessage() for record in caplog.records if "uncompiled" in record.getMessage()]
    assert "Planted: planted by this test" in text
    assert "please report it" in text


def test_without_fallback_a_crash_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "facts_of", None)
    training = Training()
    before = training.outcome()
    with pytest.raises(TypeError):
        weft.compile(training.step)(torch.ones(4, 4))
    assert training.outcome() == before


def test_an_error_of_the_step_is_raised_once_and_does_not_end_compilation(caplog: pytest.LogCaptureFixture) -> None:
    calls = []
    broken = True

    def step(x: Tensor) -> Tensor:
        if broken:
            calls.append(x.shape)
            raise ValueError("the step's own")
        return x * 2

    compiled = weft.compile(step, fallback="eager")
    with pytest.raises(ValueError, match="the step's own"):
        compiled(torch.ones(2))
    assert len(calls) == 1  # the capture took its own call back
    assert not [record for record in caplog.records if "uncompiled" in record.getMessage()]
    broken = False
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(compiled.entries) == 1
