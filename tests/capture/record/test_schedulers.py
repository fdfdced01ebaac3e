"""Learning-rate schedulers inside and around a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import weft
from both_ways import assert_equal, batches, snapshot

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 3), schedulers.StepLR(o, 2)], [4]
    ),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
}


class _Training:
    """A step with a scheduler that it steps, or that is stepped after it."""

    def __init__(self, make: Make, *, inside: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = make(self.optimizer)
        self.inside = inside

    def move(self) -> None:
        """Step the scheduler."""
        self.scheduler.step(*([1.0] if isinstance(self.scheduler, schedulers.ReduceLROnPlateau) else []))

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """One step of training."""
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.inside:
            self.move()
        return loss

    def run(self, step: Callable[..., Any]) -> list[Any]:
        """12 calls; what each of them leaves behind."""
        seen: list[Any] = []
        for at, (x,) in enumerate(batches(12)):
            loss = step(x)
            if not self.inside:
                self.move()
            rates = [dict(group, params=None) for group in self.optimizer.param_groups]
            seen.append([at, loss.detach(), rates, vars(self.scheduler).get("last_epoch"), snapshot(self.model)])
        return [*seen, snapshot(self.optimizer), self.scheduler.get_last_lr()]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_stepped_inside_trains_as_eager(name: str) -> None:
    eager, ours = (_Training(SCHEDULERS[name], inside=True) for _ in range(2))
    compiled = weft.compile(ours.step)
    assert_equal(ours.run(compiled), eager.run(eager.step))
    # Each phase of a schedule is a capture; that of StepLR in which the rate falls is one.
    phases = {"StepLR": 2, "CosineAnnealingLR": 2, "SequentialLR": 5, "OneCycleLR": 2, "ReduceLROnPlateau": 12}
    assert len(compiled.captures) <= phases[name], compiled.captures


class Counting(schedulers.LRScheduler):
    """Goes by how often it was stepped, which torch counts."""

    def get_lr(self) -> Any:
        return [rate / (1 + self._step_count) for rate in self.base_lrs]


class Noticing(schedulers.StepLR):
    """Notices each time that its counter is written."""

    written = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_step_count":
            vars(self)["written"] = self.written + 1
        super().__setattr__(name, value)


class Overridden(schedulers.StepLR):
    """Asks whether it is the first call itself."""

    def step(self, epoch: Any = None) -> None:
        self.first = self._step_count == 1
        super().step(epoch)


FIRST_CALLS: dict[str, Callable[[Any], Any]] = {
    "by the count": lambda t: Counting(t.optimizer),
    "written to": lambda t: Noticing(t.optimizer, 3),
    "overridden": lambda t: Overridden(t.optimizer, 3),
    "in order": lambda t: schedulers.StepLR(t.optimizer, 3),
}


def _warned(name: str, order: str, wrap: Callable[[Any], Any]) -> list[Any]:
    """What each of five calls warns of and leaves behind."""
    training = _Training(lambda o: None, inside=False)
    training.scheduler = FIRST_CALLS[name](training)
    if order == "replaced":
        original = type(training.optimizer).step
        training.optimizer.step = lambda *args: original(training.optimizer, *args)  # type: ignore[method-assign]

    def step(x: torch.Tensor) -> torch.Tensor:
        if order == "scheduler first":
            training.scheduler.step()
        loss = training.step(x)
        if order != "scheduler first":
            training.scheduler.step()
        return loss

    step, seen = wrap(step), []
    for (x,) in batches(5):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loss = step(x)
        # Each attempt at a capture warns.
        told = sorted(
            {f"{each.filename}:{each.lineno} {each.message}" for each in found if "lr_sch" in str(each.message)}
        )
        state = {key: value for key, value in vars(training.scheduler).items() if isinstance(value, (int, list))}
        seen.append([loss.detach(), told, state, training.optimizer.param_groups[0]["lr"]])
    return [*seen, snapshot(training.model)]


@pytest.mark.parametrize("name", FIRST_CALLS)
@pytest.mark.parametrize("order", ["optimizer first", "scheduler first", "replaced"])
def test_the_first_step_of_a_scheduler_warns_as_in_eager(name: str, order: str) -> None:
    expected = _warned(name, order, lambda step: step)
    assert bool(expected[0][1]) == (order != "optimizer first")
    assert not any(each[1] for each in expected[1:5])
    assert_equal(_warned(name, order, weft.compile), expected)


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_a_scheduler_stepped_after_the_step_trains_as_eager(name: str) -> None:
    eager, ours = (_Training(SCHEDULERS[name], inside=False) for _ in range(2))
    compiled = weft.compile(ours.step)
    assert_equal(ours.run(compiled), eager.run(eager.step))
    # The learning rate is an input at once, momentum when the scheduler has changed it.
    assert len(compiled.captures) == (1 if name != "OneCycleLR" else 2)


def test_a_rate_that_the_step_reads_from_its_scheduler_is_the_present_one() -> None:
    training = _Training(SCHEDULERS["StepLR"], inside=False)
    compiled = weft.compile(lambda x: x * training.scheduler.get_last_lr()[0])
    for _ in range(7):
        assert compiled(torch.ones(())) == torch.ones(()) * training.scheduler.get_last_lr()[0]
        training.move()


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
def test_a_step_that_changes_a_setting_of_its_optimizer_trains_as_eager(setting: str) -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        training = _Training(SCHEDULERS["StepLR"], inside=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = training.step(x)
            for group in training.optimizer.param_groups:
                group[setting] = group[setting] * 0.5 + 0.01
            return loss

        return training.run(wrap(step))

    assert_equal(run(weft.compile), run(lambda step: step))


def test_a_step_that_changes_betas_trains_as_eager() -> None:
    def run(wrap: Callable[..., Any]) -> list[Any]:
        training = _Training(SCHEDULERS["StepLR"], inside=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = training.step(x)
            group = training.optimizer.param_groups[0]
            group["betas"] = group["betas"][0] * 0.9, 0.99
            return loss

        return training.run(wrap(step))

    assert_equal(run(weft.compile), run(lambda step: step))


class _Halving(schedulers.LRScheduler):
    """One of the user's own, with a method that reads an attribute and one that a class default serves."""

    floor = 0.5

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 2.0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [rate / self.factor**self.last_epoch for rate in self.base_lrs]

    def bounds(self) -> tuple[float, float]:
        return self.factor, self.floor


class _Decay:
    """A function of epochs with a setting, and with an attribute that no code names."""

    def __init__(self) -> None:
        self.rate = 0.9

    def __call__(self, epoch: int) -> float:
        self.rate *= 0.99
        setattr(self, f"{type(self).__name__}_epoch", epoch)
        return self.rate**epoch


READS: dict[str, tuple[Make, Callable[[Any], Any], int]] = {
    "state_dict": (SCHEDULERS["StepLR"], lambda s: s.state_dict(), 3),
    "state_dict of a plateau": (SCHEDULERS["ReduceLROnPlateau"], lambda s: s.state_dict(), 5),
    "state_dict of a sequence": (SCHEDULERS["SequentialLR"], lambda s: s.state_dict(), 6),
    "state_dict of a chain": (
        lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)]),
        lambda s: s.state_dict(),
        4,
    ),
    "state_dict with functions": (lambda o: schedulers.LambdaLR(o, _Decay()), lambda s: s.state_dict(), 3),
    "vars": (SCHEDULERS["StepLR"], lambda s: {**vars(s), "optimizer": None}, 3),
    "get_last_lr": (SCHEDULERS["StepLR"], lambda s: s.get_last_lr()[0], 3),
    "a method of the user's": (_Halving, lambda s: s.bounds(), 3),
    "nothing": (SCHEDULERS["StepLR"], lambda s: None, 1),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_step_reads_of_its_scheduler_is_as_in_eager(name: str) -> None:
    make, read, captures = READS[name]

    def run(wrap: Callable[..., Any]) -> list[Any]:
        training = _Training(make, inside=False)
        step = wrap(lambda x: (training.step(x), read(training.scheduler)))
        seen: list[Any] = []
        for at, (x,) in enumerate(batches(20)):
            seen.append(repr(step(x)[1]))
            training.move()
            if at == 6 and isinstance(training.scheduler, _Halving):
                training.scheduler.factor = 3.0
                training.scheduler.floor = 0.25
        return [*seen, len(getattr(step, "captures", ()))]

    *eager, _ = run(lambda step: step)
    *ours, made = run(weft.compile)
    assert ours == eager
    assert made <= captures


TABLE = np.linspace(1, 0.1, 30)
OF_NUMPY: dict[str, Callable[[int], Any]] = {
    "power": lambda epoch: np.float64(0.9) ** epoch,
    "function for a power": lambda epoch: np.power(0.9, epoch),
    "cosine": lambda epoch: 0.5 * (1 + np.cos(np.pi * epoch / 20)),
    "table": lambda epoch: TABLE[epoch],
    "least": lambda epoch: np.minimum((epoch + 1) / 5, 1.0),
    "root": lambda epoch: 1 / np.sqrt(epoch + 1),
    "product": lambda epoch: epoch * np.float64(0.9),
    "float32": lambda epoch: np.float32(0.9) ** epoch,
}


@pytest.mark.parametrize("name", OF_NUMPY)
def test_rates_that_numpy_computes_are_those_of_eager(name: str) -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = schedulers.LambdaLR(optimizer, OF_NUMPY[name])

        def step(x: torch.Tensor) -> Any:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            last = scheduler.get_last_lr()[0]
            scheduler.step()
            return last, scheduler.get_last_lr()

        called, found = wrap(step), []
        for at in range(20):
            if at == 15:
                scheduler._last_lr = [np.float64(0.3)]
            found.append((repr(called(torch.ones(1, 2))), repr(optimizer.param_groups[0]["lr"]), model.weight.tolist()))
        return found, called

    eager, (compiled, step) = run(lambda step: step)[0], run(weft.compile)
    assert compiled == eager
    assert len(step.captures) <= 2 or name == "float32"
