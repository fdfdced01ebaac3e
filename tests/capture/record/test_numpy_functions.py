"""Functions, operators and types of numpy's on numbers of a step: the result is numpy's, as in eager."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import WeftError

CALLS = 4


def loss(x: Tensor) -> float:
    """A number that only the step's data decides."""
    return x.sum().item()


def kinds(*values: Any) -> list[Any]:
    """What code can ask of the type of numbers."""
    return [
        (type(n).__name__, isinstance(n, np.floating), isinstance(n, float), isinstance(n, int), type(n) is float)
        for n in values
    ]


NUMBERS: dict[str, Callable[[Tensor, int], Any]] = {
    "types": lambda x, at: kinds(np.sqrt(loss(x)), np.maximum(at, 3), loss(x) * np.float64(2), np.float32(2) * at),
    "tensors": lambda x, at: (torch.tensor(np.sqrt(loss(x))), torch.as_tensor(np.exp(at)), x * np.sqrt(loss(x))),
    "tensors of lists": lambda x, at: (
        torch.tensor([np.sqrt(loss(x)), 1.0]),
        torch.tensor([[at, 2], [np.maximum(at, 3), 1]]),
        torch.Tensor([np.sqrt(loss(x))]),
        torch.FloatTensor([np.sqrt(loss(x)), at]),
    ),
    "methods": lambda x, at: (
        np.sqrt(loss(x)).round(),
        np.sqrt(loss(x)).round(2),
        np.sqrt(loss(x)).item(),
        np.sqrt(loss(x)).astype(int),
        np.sqrt(loss(x)).clip(0, 1),
        np.sqrt(at).mean(),
    ),
    "operators": lambda x, at: (
        loss(x) * np.float64(2),
        np.float64(2) * loss(x),
        loss(x) - np.int64(3),
        loss(x) // np.float64(0.3),
        at * np.float64(2),
        at % np.int64(2),
        np.int64(3) ** at,
        np.float32(2) * loss(x),
    ),
    "division by zero": lambda x, at: (loss(x) / np.float64(0), at / np.float64(0), np.sqrt(loss(x)) / 0),
    "comparisons": lambda x, at: (loss(x) < np.float64(4), at < np.float64(2), np.sqrt(loss(x)) == 1),
    "divmod": lambda x, at: (divmod(loss(x), 0.3), divmod(at, 2), divmod(7, at + 1), np.divmod(loss(x), 2)),
    "parts": lambda x, at: (loss(x).real, loss(x).imag, at.real, (at * 0.5).real),
    "conversions": lambda x, at: (
        int(np.sqrt(loss(x))),
        float(np.sqrt(loss(x))),
        round(np.sqrt(loss(x)), 1),
        math.sqrt(np.sqrt(loss(x))),
    ),
    "branches": lambda x, at: x * 2 if np.isfinite(loss(x)) and np.sqrt(loss(x)) > 1.5 else x * 3,
    "largest": lambda x, at: (max(1, np.sqrt(loss(x)).round()), min(2.0, np.sqrt(loss(x))), max(loss(x), np.exp(1))),
    "sums": lambda x, at: (sum([np.sqrt(loss(x)), 1.0]), sum([np.float64(1), at]), sum([np.float64(1), loss(x)])),
    "functions": lambda x, at: (
        np.round(loss(x), 1),
        np.clip(loss(x), None, 1.0),
        np.clip(at, 0, 2),
        np.interp(loss(x), [0, 10], [0.1, 1.0]),
        torch.as_tensor(np.interp(at, [0, 10], [0.1, 1.0])),
        np.where(loss(x) > 2, 1, 2),
        np.hypot(loss(x), at),
    ),
    "arrays": lambda x, at: (
        np.full(2, at),
        np.ravel(at),
        np.cumsum(at),
        np.array(at),
        np.arange(at),
        np.ravel(loss(x)),
    ),
    "with arrays": lambda x, at: (np.ones(3) * loss(x), np.ones(3) * at, at * np.ones(3), loss(x) + np.ones(3)),
    "reduced lists": lambda x, at: (np.mean([loss(x), at]), np.std([loss(x), 2.0]), np.median([loss(x), 1, 2])),
    "functions of torch": lambda x, at: (
        torch.full((2,), np.int64(at)),
        torch.full((2,), np.maximum(x.long().sum().item(), 3)),
        torch.clamp(x, max=np.sqrt(loss(x))),
        torch.add(x, x, alpha=np.sqrt(loss(x))),
    ),
    "truth values": lambda x, at: (
        x.long() + np.isnan(loss(x)),
        (x > 1) * np.isfinite(loss(x)),
        x.long() * (np.sqrt(loss(x)) > 1),
        torch.full((2,), np.isnan(loss(x))),
        torch.tensor(np.isnan(loss(x))),
        x.masked_fill(x > 1, np.isnan(loss(x))),
    ),
    "classes of tensors": lambda x, at: torch.LongTensor([np.maximum(at, 2), np.maximum(x.argmax().item(), 1)]),
    "with constants": lambda x, at: (
        at * np.float64(2) + 1,
        {"half": (at * 0.1) * np.float64(0.5)},
        kinds(at * np.float64(2)),
        at * np.float64(2) / 3,
        3 / (at * np.float64(2) + 1),
        x * (at * np.float64(2)),
        f"{at * np.float64(2)!r}",
    ),
    "results of operators": lambda x, at: (
        (loss(x) * np.float64(2)).round(1),
        torch.tensor(np.float64(2) - loss(x)),
        kinds(loss(x) + np.float64(2), np.int64(3) * loss(x)),
        (loss(x) * np.float64(2)) < 3,
        (loss(x) - np.float64(1)) / 0,
        (at * np.float64(2) * loss(x)).round(1),
        2 ** (loss(x) * np.float64(0.5)),
        max(loss(x) * np.float64(2), 1.0),
    ),
    "overflow": lambda x, at: at * np.float64(2) * 1e308 * 1e10,
    "texts": lambda x, at: f"{np.sqrt(loss(x)):.3f}",
    "texts of percent": lambda x, at: ["%.2f" % np.sqrt(loss(x)), "%s" % np.sqrt(loss(x)), "%r" % np.sqrt(at)],  # noqa: UP031
    "copies": lambda x, at: copy.deepcopy({"at": at, "loss": [loss(x)], "root": np.sqrt(loss(x))}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_those_of_eager(name: str) -> None:
    step = NUMBERS[name]
    compiled = weft.compile(step)
    with np.errstate(divide="ignore", invalid="ignore"):
        for at in range(CALLS):
            x = torch.rand(3, generator=torch.Generator().manual_seed(at)) + at
            assert repr(compiled(x, at)) == repr(step(x, at))


def test_an_integer_that_a_generator_draws_is_numpys() -> None:
    def step(x: Tensor) -> Any:
        draw = np.random.default_rng(3)
        found = draw.integers(10)
        return kinds(found), found + 1, torch.tensor(found), x * found, int(draw.integers(3)), x[draw.integers(3)]

    compiled = weft.compile(step)
    for _ in range(2):
        assert repr(compiled(torch.rand(3))[:3]) == repr(step(torch.rand(3))[:3])


def test_a_number_that_a_generator_draws_is_a_seed() -> None:
    def step(x: Tensor) -> Tensor:
        torch.manual_seed(np.random.default_rng(1).integers(5))
        return torch.rand(3)

    compiled = weft.compile(step)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), step(torch.ones(2)))


single = np.float32

CLASSES: dict[str, Callable[[Tensor], Any]] = {
    "of a number": lambda x: (np.float32(loss(x)), np.float64(loss(x)), np.half(loss(x)), np.int64(loss(x))),
    "of a count": lambda x: (np.int32(x.argmax().item()), np.uint8((x > 0).sum().item()), np.bool_(loss(x) > 0)),
    "of a tensor, an array and a list": lambda x: (np.float32(x.sum()), np.float32(np.asarray(x)), np.int64([loss(x)])),
    "under another name": lambda x: single(loss(x)),
    "plain": lambda x: (np.float32(), np.float64(1.5), np.int64("3"), np.float32([1, 2])),
    "types": lambda x: kinds(np.float32(loss(x)), np.float32(loss(x)) * np.float32(2), np.float32(1) + loss(x)),
    "asked for": lambda x: (
        isinstance(np.float32(loss(x)), np.float32),
        isinstance(np.float64(loss(x)), float),
        issubclass(np.float32, np.floating),
        np.float32(loss(x)).dtype == np.float32,
        type(np.float32(1)) in {np.float32, np.int64},
    ),
    "as dtypes": lambda x: (
        np.zeros(3, dtype=np.float32) + np.float32(loss(x)),
        np.asarray([loss(x)], dtype=np.float32),
        np.asarray(x).astype(np.float64),
        np.finfo(np.float32).eps,
    ),
    "tensors": lambda x: (torch.tensor(np.float32(loss(x))), x * np.float32(loss(x)), x * np.float64(loss(x))),
    "texts": lambda x: f"{np.float32(loss(x)):.3f}",
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_numpy_make_numbers(name: str) -> None:
    step = CLASSES[name]
    compiled = weft.compile(step)
    for at in range(CALLS):
        x = torch.tensor([at, at / 7])
        assert repr(compiled(x)) == repr(step(x))
    assert len(compiled.captures) == 1, compiled.captures


def test_a_class_of_numpys_that_a_step_returns_and_keeps_is_the_class() -> None:
    state: dict[str, Any] = {"kind": np.float32}

    def step(x: Tensor) -> Any:
        state["other"] = np.float32
        return np.float32, state["kind"](loss(x))

    assert weft.compile(step)(torch.ones(2))[0] is np.float32
    assert state["kind"] is state["other"] is np.float32


def test_a_counter_becomes_a_number_of_numpys() -> None:
    state = {"calls": 0}

    def step(x: Tensor) -> Any:
        state["calls"] += 1
        return np.float32(state["calls"]) * x

    compiled = weft.compile(step)
    for at in range(CALLS):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), at + 1.0))
    assert len(compiled.captures) == 1, compiled.captures


def test_a_conversion_where_the_step_asks_for_the_class_is_refused_with_a_remedy_that_works() -> None:
    step = lambda x: type(np.float32(loss(x))) is np.float32
    with pytest.raises(WeftError, match=r"numpy\.asarray\(x, dtype=numpy\.float32\)\[\(\)\]"):
        weft.compile(step)(torch.ones(2))
    remedy = lambda x: np.asarray(loss(x), dtype=np.float32)[()]
    assert repr(weft.compile(remedy)(torch.ones(2))) == repr(remedy(torch.ones(2)))


RATES: dict[str, Callable[[Any, Tensor], Any]] = {
    "types": lambda rate, x: kinds(rate, rate * 2),
    "returned": lambda rate, x: [rate, {"lr": rate}],
    "operators": lambda rate, x: (rate * 2, 2 * rate, rate / np.float64(0), -rate, abs(rate), rate**2, 2**rate),
    "division": lambda rate, x: (rate // 0.03, divmod(rate, 0.03), rate % 0.03),
    "with data": lambda rate, x: (x.sum() * rate, loss(x) * rate, rate * loss(x), rate > loss(x)),
    "results with data": lambda rate, x: (
        (loss(x) * rate).round(2),
        torch.tensor(rate - loss(x)),
        kinds(rate / (loss(x) + 1)),
        (loss(x) + rate) > 1,
        rate ** loss(x),
        loss(x) // rate,
        -(rate * loss(x)),
    ),
    "tensors": lambda rate, x: (torch.tensor(rate), torch.tensor([rate, 1.0]), torch.full((2,), rate)),
    "methods": lambda rate, x: (rate.item(), rate.round(2), rate.dtype),
    "largest": lambda rate, x: (max(rate, 0.05), min(rate, 0.05), max([rate])),
    "texts": lambda rate, x: f"{rate:.3f}",
    "functions": lambda rate, x: (np.sqrt(rate), np.round(rate, 2), math.sqrt(rate)),
    "conversions": lambda rate, x: (float(rate), int(rate), round(rate, 1), bool(rate)),
    "keys": lambda rate, x: {rate: 1},
}


@pytest.mark.parametrize("name", RATES)
def test_a_learning_rate_of_numpys_is_numpys_to_the_users_code(name: str) -> None:
    rates = np.linspace(0.1, 0.01, CALLS)

    def trained(wrap: Callable[..., Any]) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rates[0])

        def step(x: Tensor) -> Any:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return RATES[name](optimizer.param_groups[0]["lr"], x)

        step, found = wrap(step), []
        for at, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            found.append(repr(step(torch.full((2, 3), at / 2))))
        return [*found, repr((list(model.parameters()), optimizer.state_dict()))]

    with np.errstate(divide="ignore"):
        assert trained(weft.compile) == trained(lambda step: step)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's, which computes with its rates in Python."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing": lambda group, x: None,
    "products": lambda group, x: (x * group["lr"], group["lr"] * x, group["lr"] - x, x.clamp(group["lr"], 1)),
    "numbers": lambda group, x: (group["lr"] * 0.5, 1 - group["lr"], +group["lr"], group["lr"] / 2, -group["lr"]),
    "data": lambda group, x: loss(x) * group["lr"],
    "branches": lambda group, x: x * 2 if group["lr"] > 0.07 and group["lr"] != 0 else x * 3,
    "largest": lambda group, x: max(group["lr"] * 0.9, 1e-3),
    "a decay": lambda group, x: group.__setitem__("decay", group["lr"] * 0.1),
}


@pytest.mark.parametrize("name", READS)
def test_an_optimizer_of_the_users_takes_rates_of_numpys_in_two_captures(name: str) -> None:
    def trained(wrap: Callable[..., Any]) -> tuple[list[str], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = Lion(model.parameters(), np.float64(0.05))

        def step(x: Tensor) -> Any:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return READS[name](optimizer.param_groups[0], x)

        compiled, found = wrap(step), []
        for at in range(8):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + np.cos(at / 60))
            found.append(repr(compiled(torch.full((2, 3), at / 2))))
        return [*found, repr((list(model.parameters()), optimizer.state_dict()["param_groups"]))], compiled

    ours, compiled = trained(weft.compile)
    assert ours == trained(lambda step: step)[0]
    assert len(compiled.captures) <= 2


def test_rates_of_numpys_that_only_torch_reads_are_one_capture() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(0.1), weight_decay=np.float64(0.1))

    def step(x: Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = weft.compile(step)
    for at in range(6):
        optimizer.param_groups[0].update(lr=np.float64(0.1 - at / 100), weight_decay=np.float64(0.1 - at / 200))
        compiled(torch.ones(2, 3))
    assert len(compiled.captures) <= 2
