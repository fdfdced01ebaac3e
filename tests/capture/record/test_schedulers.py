"""Learning-rate schedulers inside and around a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import weft
from both_ways import assert_equal, batches, snapshot
from weft.errors import PythonStateChanged

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [3, 6]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.3, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 3), schedulers.StepLR(o, 2)], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.StepLR(o, 3), schedulers.StepLR(o, 4)]),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 0.05),
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
            seen.append([at, loss.detach(), rates, self.scheduler.last_epoch, snapshot(self.model)])
        return [*seen, snapshot(self.optimizer), self.scheduler.get_last_lr()]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_step_that_steps_its_scheduler_is_refused_and_changes_nothing(name: str) -> None:
    training = _Training(SCHEDULERS[name], inside=True)
    before = str(training.scheduler.state_dict()), snapshot(training.optimizer)
    with pytest.raises(PythonStateChanged, match=r"(last_epoch|'lr'\]).*scheduler outside the step"):
        weft.compile(training.step)(*batches()[0])
    assert str(training.scheduler.state_dict()) == before[0]
    assert_equal(snapshot(training.optimizer), before[1])


@pytest.mark.parametrize("name", ["StepLR", "SequentialLR", "CyclicLR"])
def test_a_scheduler_stepped_inside_trains_as_eager_with_fallback(name: str) -> None:
    eager, ours = (_Training(SCHEDULERS[name], inside=True) for _ in range(2))
    assert_equal(ours.run(weft.compile(ours.step, fallback="eager")), eager.run(eager.step))


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_a_scheduler_stepped_after_the_step_trains_as_eager(name: str) -> None:
    eager, ours = (_Training(SCHEDULERS[name], inside=False) for _ in range(2))
    compiled = weft.compile(ours.step)
    assert_equal(ours.run(compiled), eager.run(eager.step))
    # Momentum that the scheduler cycles is a guard; the learning rate is an input.
    assert len(compiled.captures) == (1 if name != "OneCycleLR" else 12)


def test_a_rate_that_the_step_reads_from_its_scheduler_is_the_present_one() -> None:
    training = _Training(SCHEDULERS["StepLR"], inside=False)
    compiled = weft.compile(lambda x: x * training.scheduler.get_last_lr()[0])
    for _ in range(7):
        assert compiled(torch.ones(())) == torch.ones(()) * training.scheduler.get_last_lr()[0]
        training.move()


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
def test_a_step_that_changes_a_setting_of_its_optimizer_is_refused(setting: str) -> None:
    training = _Training(SCHEDULERS["StepLR"], inside=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = training.step(x)
        for group in training.optimizer.param_groups:
            group[setting] = group[setting] * 0.9 + 0.01
        return loss

    with pytest.raises(PythonStateChanged, match=setting):
        weft.compile(step)(*batches()[0])


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
