"""The checks of a step whose state has not changed for some calls are joined, and notice all that the parts notice."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from guard_library import compile_checks
from torch import nn

import weft
from weft.capture.guards import steady_checks
from weft.capture.record.data_arguments import flat_arguments

CALLS = 50


@pytest.fixture(autouse=True)
def _compiled() -> None:
    compile_checks()


def _is_joined(step: Any) -> bool:
    return bool(step.entries[0].guards._steady._joined)


def _join(step: Any, *args: Any) -> None:
    """Call a step until its checks are joined."""
    for _ in range(CALLS):
        step(*args)
        if step.entries and _is_joined(step):
            return
    parts = step.entries[0].guards.checks.items()
    steady = step.entries[0].guards._steady
    unready = [name for name, part in parts if part.steady is not None and part.steady() is None]
    raise AssertionError(f"not joined, {steady._calm} of {steady._wait} calls; not ready: {unready}")


class Trained:
    """A model, its optimizer and a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.x = torch.randn(3, 4)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_checks_are_joined_after_some_calls_and_parted_by_a_change() -> None:
    trained = Trained()
    step = weft.compile(trained.step)
    assert not any(_is_joined(step) for _ in range(2) if step() is not None)
    _join(step)
    assert type(step.entries[0].guards._steady._joined[0]).__name__ == "Check"
    trained.model[0].train(False)
    step()
    trained.model[0].train(True)
    step()
    assert len(step.captures) == 3  # without gradients, with gradients, and another attribute
    _join(step)
    assert len(step.captures) == 3


def test_a_learning_rate_that_changes_at_each_call_leaves_the_others_joined() -> None:
    losses = []
    for compiled in (True, False):
        trained = Trained()
        step: Any = weft.compile(trained.step) if compiled else trained.step
        found = []
        for at in range(CALLS):
            trained.optimizer.param_groups[0]["lr"] = 0.1 / (at + 1)
            found.append(step())
        losses.append(found)
        if compiled:
            assert _is_joined(step)
            assert len(step.captures) == 2
    assert all(map(torch.equal, *losses))


@pytest.mark.parametrize("number", [0.0, float("nan"), 1, "text"])
def test_a_number_of_another_kind_is_noticed(number: Any) -> None:
    results = []
    for compiled in (True, False):
        options: dict[str, Any] = {"by": 1.0}

        def step(x: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
            return x * options["by"] if isinstance(options["by"], float) else x - 1

        called: Any = weft.compile(step) if compiled else step
        for by in range(3):  # a number that changes is an input
            options["by"] = float(by + 1)
            called(torch.ones(2))
        if compiled:
            _join(called, torch.ones(2))
        options["by"] = number
        results.append(called(torch.ones(2)))
    assert torch.equal(results[0].nan_to_num(7.0), results[1].nan_to_num(7.0))


@pytest.mark.parametrize("changes", [False, True], ids=["a dictionary at rest", "one that changes at each call"])
@pytest.mark.parametrize("shares", [False, True])
def test_a_tensor_that_comes_to_share_memory_is_noticed(
    monkeypatch: pytest.MonkeyPatch, changes: bool, shares: bool
) -> None:
    """It looks like the one before, so that the dictionary still matches."""
    monkeypatch.setattr(steady_checks, "_CALM", 1)
    results = []
    for compiled in (True, False):
        table: dict[str, Any] = {"count": 0, "running": torch.zeros(4), "other": torch.zeros(4)}

        def step(x: torch.Tensor, table: dict[str, Any] = table) -> torch.Tensor:
            before = table["other"].sin()
            table["running"].add_(x)
            return before + 10 * table["other"].sin() + table["running"]

        called: Any = weft.compile(step) if compiled else step
        for at in range(CALLS):
            table["count"] = at if changes else 0
            called(torch.ones(4))
        assert not compiled or _is_joined(called)
        table["count"] = -1 if changes else 0
        table["running"] = table["other"] if shares else torch.full((4,), 5.0)
        results += [called(torch.ones(4)).clone() for _ in range(3)]
    for one, other in zip(results[:3], results[3:], strict=True):
        assert torch.equal(one, other)


def test_a_hook_and_a_setting_of_torch_are_noticed() -> None:
    trained = Trained()
    step = weft.compile(trained.step)
    _join(step)
    seen: list[int] = []
    handle = trained.model[0].weight.register_hook(lambda grad: seen.append(1))
    with torch.autocast("cpu"):
        step()
    step()
    handle.remove()
    step()
    assert len(step.captures) >= 3


ARGUMENTS: dict[str, Any] = {
    "another shape": lambda x, y, weight: (x.reshape(2, 8), y),
    "another dtype": lambda x, y, weight: (x.double(), y),
    "other strides": lambda x, y, weight: (x.t(), y),
    "one that requires grad": lambda x, y, weight: (x.clone().requires_grad_(), y),
    "a parameter": lambda x, y, weight: (nn.Parameter(x.clone()), y),
    "a part of a weight": lambda x, y, weight: (weight.detach()[:4], y),
    "one memory": lambda x, y, weight: (x, x.view(4, 4)),
    "parts of one storage": lambda x, y, weight: torch.zeros(8, 4).split(4),
    "a conjugate": lambda x, y, weight: (torch.ones(4, 4, dtype=torch.complex64).conj(), y),
    "no tensor": lambda x, y, weight: (x.numpy(), y),
    "on another device": lambda x, y, weight: (x.to("meta"), y),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_another_kind_are_noticed(name: str) -> None:
    weight = nn.Parameter(torch.ones(8, 4))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).sum() * weight.sum()

    compiled = weft.compile(step)
    _join(compiled, torch.ones(4, 4), torch.ones(4, 4))
    guards = compiled.entries[0].guards
    call = lambda x, y: guards.unchanged(*flat_arguments(((x, y), {})))
    assert call(torch.zeros(4, 4), torch.zeros(4, 4))
    assert call(torch.zeros(4, 4).view(2, 8).view(4, 4), torch.zeros(4, 4))
    assert _is_joined(compiled)
    assert not call(*ARGUMENTS[name](torch.zeros(4, 4), torch.zeros(4, 4), weight))


def test_no_argument_is_held() -> None:
    compiled = weft.compile(lambda x: x * 2)
    _join(compiled, torch.ones(2))
    x = torch.ones(2)
    compiled(x)
    alive = weakref.ref(x)
    compiled(torch.ones(2))
    del x
    assert alive() is None
