"""Operations of custom libraries that return numbers or nothing, or have no fake; assertions on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from both_ways import both_ways
from weft.errors import CannotCapture

_logged: list[float] = []


@torch.library.custom_op("weft_numbers::positive", mutates_args=())
def positive(x: torch.Tensor) -> bool:
    return bool(x.sum() > 0)


@torch.library.custom_op("weft_numbers::stated_positive", mutates_args=())
def stated_positive(x: torch.Tensor) -> bool:
    return bool(x.sum() > 0)


@torch.library.custom_op("weft_numbers::count", mutates_args=())
def count(x: torch.Tensor) -> int:
    return int((x > 0).sum())


@torch.library.custom_op("weft_numbers::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    return x * 2, int((x > 0).sum()), bool(x[0] > 0)


@torch.library.custom_op("weft_numbers::raised", mutates_args=("x",))
def raised(x: torch.Tensor) -> int:
    x += 1
    return int((x > 0).sum())


@torch.library.custom_op("weft_numbers::total", mutates_args=())
def total(x: torch.Tensor) -> float:
    return float(x.sum())


@torch.library.custom_op("weft_numbers::logged", mutates_args=())
def logged(x: torch.Tensor) -> None:
    _logged.append(float(x.sum()))


@torch.library.custom_op("weft_numbers::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


stated_positive.register_fake(lambda x: True)
count.register_fake(lambda x: 0)
doubled.register_fake(lambda x: (x * 2, 0, True))
raised.register_fake(lambda x: 0)
total.register_fake(lambda x: 0.0)
logged.register_fake(lambda x: None)

_library = torch.library.Library("weft_numbers", "FRAGMENT")
_library.define("whole(Tensor x) -> int")
_library.impl("whole", lambda x: int((x > 0).sum()), "CPU")

_CALLS = [(torch.tensor(values),) for values in ([1.0, 2, 3], [-1.0, -2, 3], [1.0, -2, 3], [-1.0, -2, -3], [4.0, 5, 6])]


def scaled_by(number: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda x: (x * number(x * 2 - 1), number(x))


def chosen_by(number: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda x: x + 1 if number(x) else x - 1


_NUMBERS = [positive, stated_positive, count, torch.ops.weft_numbers.whole]


@pytest.mark.parametrize("use", [scaled_by, chosen_by])
@pytest.mark.parametrize("number", _NUMBERS, ids=lambda each: str(each))
def test_a_number_that_an_operation_returns_is_that_of_each_call(use: Callable[..., Any], number: Any) -> None:
    both_ways(lambda: (use(number), []), _CALLS, captures=None)


def test_a_number_of_a_fake_implementation_is_none_of_the_step() -> None:
    both_ways(lambda: (lambda x: x * count(x), []), _CALLS)


def test_numbers_beside_tensors_and_of_operations_that_write() -> None:
    both_ways(lambda: (lambda x: (doubled(x), raised(x) * x), []), _CALLS, captures=None)


def test_a_float_that_an_operation_returns_is_refused() -> None:
    with pytest.raises(CannotCapture, match=r"test_number_results\.py:\d+(.|\n)*returns a float(.|\n)*\.item\(\)"):
        weft.compile(lambda x: x * total(x))(torch.ones(3))


def test_an_operation_that_returns_nothing_runs_at_each_call() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[float]:
        _logged.clear()

        def step(x: torch.Tensor) -> torch.Tensor:
            logged(x * 2)
            return x + 1

        step = wrap(step)
        for (x,) in _CALLS:
            step(x)
        return list(_logged)

    assert run(weft.compile) == run(lambda step: step)


def test_an_operation_without_a_fake_implementation_is_refused() -> None:
    with pytest.raises(CannotCapture, match=r"test_number_results\.py:\d+(.|\n)*torch\.library\.register_fake"):
        weft.compile(lambda x: without_fake(x) + 1)(torch.ones(3))


def _caught(step: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    try:
        return step(x).tolist()
    except RuntimeError as error:
        return type(error), str(error)


@pytest.mark.parametrize("message", [(), ("not positive",)])
def test_assertions_on_tensors_raise_as_eager(message: tuple[str, ...]) -> None:
    def make() -> Callable[[torch.Tensor], Any]:
        done = torch.zeros(3)

        def step(x: torch.Tensor) -> torch.Tensor:
            done.add_(1)
            torch._assert_async(x.sum() > 0, *message)
            return done.add_(x).clone()

        return step

    eager, compiled = make(), weft.compile(make())
    for (x,) in _CALLS:
        assert _caught(compiled, x) == _caught(eager, x)
