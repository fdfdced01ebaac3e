"""`verify=True`: the first call runs both ways, and a difference is an error that names the tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from both_ways import assert_equal, batches, mlp, snapshot, training
from weft.errors import VerifyFailed
from weft.inductor.runtime import aten


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def _with_everything() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.BatchNorm1d(8))


def test_a_right_step_trains_on_as_if_it_had_not_been_verified() -> None:
    results = []
    for wrap in (lambda step: step, lambda step: weft.compile(step, verify=True)):
        torch.manual_seed(0)
        step, changed = training(_loss, _with_everything, _adamw)()
        step = wrap(step)
        losses = [step(x).detach() for (x,) in batches()]
        results.append([losses, [snapshot(thing) for thing in changed], torch.get_rng_state()])
    assert_equal(results[1], results[0])


@pytest.fixture
def perturbed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes compiled programs return a wrong value of the output of that number."""

    def plant(at: int) -> None:
        run = aten.AtenProgram.boxed

        def wrong(self: aten.AtenProgram, inputs: list[Any]) -> list[Any]:
            outputs = run(self, inputs)
            with torch.no_grad():
                outputs[at].add_(0.25)
            return outputs

        monkeypatch.setattr(aten.AtenProgram, "boxed", wrong)

    return plant


def test_a_wrong_return_value_is_found(perturbed: Callable[[int], None]) -> None:
    model = mlp()
    step = weft.compile(lambda x: _loss(model, x), verify=True)
    perturbed(0)
    with pytest.raises(VerifyFailed, match=r"return value\[0\]: largest difference 0\.25"):
        step(*batches()[0])


def test_a_wrong_gradient_is_found(perturbed: Callable[[int], None]) -> None:
    model = mlp()

    def step(x: torch.Tensor) -> None:
        _loss(model, x).backward()

    perturbed(0)
    with pytest.raises(VerifyFailed, match=r"model\.0\.weight\.grad: largest difference 0\.25"):
        weft.compile(step, verify=True)(*batches()[0])


def test_a_wrong_parameter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step, (model, _) = training(_loss, optimizer=_adamw)()
    run = aten.AtenProgram.boxed

    def wrong(self: aten.AtenProgram, inputs: list[Any]) -> list[Any]:
        outputs = run(self, inputs)
        with torch.no_grad():
            model[2].bias[3] += 1
        return outputs

    monkeypatch.setattr(aten.AtenProgram, "boxed", wrong)
    with pytest.raises(VerifyFailed, match=r"2\.bias: largest difference 1"):
        weft.compile(step, verify=True)(*batches()[0])


def test_an_update_that_was_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled step returns the right loss and trains nothing."""
    step, _ = training(_loss)()
    run = aten.AtenProgram.boxed

    def forgetful(self: aten.AtenProgram, inputs: list[Any]) -> list[Any]:
        return run(self, [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs])

    monkeypatch.setattr(aten.AtenProgram, "boxed", forgetful)
    with pytest.raises(VerifyFailed, match=r"differs from the eager one in 4 tensors"):
        weft.compile(step, verify=True)(*batches()[0])


def test_a_step_that_is_not_deterministic_is_told_apart() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.double() + time.perf_counter()

    with pytest.raises(VerifyFailed, match=r"return value.*\n.*not deterministic"):
        weft.compile(step, verify=True)(torch.ones(2))


def test_only_the_first_call_is_verified(perturbed: Callable[[int], None]) -> None:
    step = weft.compile(lambda x: x * 2, verify=True)
    step(torch.ones(2))
    perturbed(0)
    assert step(torch.ones(2)).tolist() == [2.25, 2.25]
