"""Numbers of numpy's that a step keeps in its state from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft

CALLS = 20
State = dict[str, Any]


def _begin() -> State:
    return {
        "best": np.inf,
        "last": np.float32(0),
        "count": np.int64(3),
        "mean": np.float64(0.5),
        "any": np.bool_(False),
    }


def _keeps(state: State, x: torch.Tensor) -> Any:
    state["last"] = np.float32(x.sum().item())


def _best(state: State, x: torch.Tensor) -> Any:
    state["best"] = np.minimum(state["best"], x.sum().item())
    return state["best"]


def _averages(state: State, x: torch.Tensor) -> Any:
    state["mean"] = 0.9 * state["mean"] + 0.1 * x.sum().item()
    state["last"] = np.float32(0.9) * state["last"] + np.float32(0.1) * np.float32(x.mean().item())
    return x * state["mean"], torch.tensor(state["last"]), type(state["last"]), state["mean"] - state["last"]


def _counts(state: State, x: torch.Tensor) -> Any:
    state["count"] += (x > 1).sum().item()
    state["any"] = state["any"] | np.bool_((x > 3).any().item())
    return state["count"] % 4, state["any"]


def _branches(state: State, x: torch.Tensor) -> Any:
    loss = np.float32(x.sum().item())
    if loss < state["last"]:
        state["count"] = state["count"] + 1
    state["last"] = loss
    return f"{state['last']:.3f} after {state['count']}"


def _first_reads(state: State, x: torch.Tensor) -> Any:
    before = state["last"] * 2
    state["last"] = np.float32(x.sum().item())
    return before, state["last"] > before


STEPS: dict[str, tuple[Callable[[State, torch.Tensor], Any], int]] = {
    "kept": (_keeps, 1),
    "best": (_best, 2),  # the first one is a float of Python's
    "averages": (_averages, 1),
    "counts": (_counts, 1),
    "branches": (_branches, 8),  # once more for each number that one path alone is found to change
    "reads what was there": (_first_reads, 1),
}


def _run(step: Callable[[State, torch.Tensor], Any], wrap: Callable[..., Any], between: Callable[..., Any]) -> Any:
    state = _begin()
    wrapped, seen = wrap(lambda x: step(state, x)), []
    for at in range(CALLS):
        between(at, state)
        seen.append(repr((wrapped(torch.tensor([(at * 7) % 11 / 3, at / 5])), state)))
    return seen, wrapped


@pytest.mark.parametrize("name", STEPS)
def test_numbers_of_numpys_that_change_are_read_by_each_call(name: str) -> None:
    step, captures = STEPS[name]
    compiled, wrapped = _run(step, weft.compile, lambda at, state: None)
    assert compiled == _run(step, lambda step: step, lambda at, state: None)[0]
    assert len(wrapped.captures) <= captures, wrapped.captures


@pytest.mark.parametrize("name", STEPS)
def test_a_number_of_another_type_or_value_between_calls(name: str) -> None:
    def replace(at: int, state: State) -> None:
        if at == 5:
            state.update(last=np.float64(7.5), count=np.int32(1), mean=np.float32(2), best=5.0)
        elif at == 9:
            state.update(last=np.float32("nan"), mean=np.float64(-0.0), best=np.float64("inf"))
        elif at == 13:
            state.update(last=1.5, count=2)

    step = STEPS[name][0]
    assert _run(step, weft.compile, replace)[0] == _run(step, lambda step: step, replace)[0]


def test_a_number_of_numpys_that_changes_between_calls_alone() -> None:
    def change(at: int, state: State) -> None:
        state["last"] = np.float32(at)

    step = lambda state, x: x * state["last"]
    compiled, wrapped = _run(step, weft.compile, change)
    assert compiled == _run(step, lambda step: step, change)[0]
    assert len(wrapped.captures) == 2, wrapped.captures


class OwnAdamW(torch.optim.AdamW):
    """A class of the user's."""


SMALL = np.float32(0.01)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=SMALL),  # type: ignore[arg-type]
    "a class of the user's": lambda p: OwnAdamW(p, lr=SMALL),  # type: ignore[arg-type]
    "one group": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": SMALL}, {"params": p[1:]}]),
    "weight decay": lambda p: torch.optim.AdamW(p, weight_decay=np.float32(0.1), eps=np.float16(1e-3)),  # type: ignore
    "half": lambda p: torch.optim.NAdam(p, lr=np.float16(0.01)),  # type: ignore[arg-type]
    "foreach": lambda p: torch.optim.AdamW(p, lr=SMALL, foreach=True),  # type: ignore[arg-type]
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=SMALL, alpha=np.float32(0.9)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("changes", [False, True])
def test_small_numbers_of_numpy_in_optimizers(name: str, *, changes: bool) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = OPTIMIZERS[name](list(model.parameters()))

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step, losses = wrap(step), list[float]()
        for at in range(4):
            losses.append(step(torch.ones(2, 3) + at).item())
            if changes:
                optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * np.float32(0.9)
        return [losses, [p.tolist() for p in model.parameters()], repr(optimizer.param_groups[0]["lr"])]

    assert run(weft.compile) == run(lambda step: step)
