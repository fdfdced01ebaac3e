"""``sum`` of floats that a step reads from tensors or keeps in its state: Python's bits, whatever names the function.

Python 3.12 and later keep the rounding errors of a sum apart. Eager is the oracle on every version.
"""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

import weft
from both_ways import both_ways

# One addition after the other loses what stands between the large numbers.
LARGE = 1e16


def make(add: Any) -> Any:
    def made() -> tuple[Any, list[Any]]:
        state = {"level": 0.1}

        def step(x: torch.Tensor) -> tuple[Any, ...]:
            state["level"] += 0.1
            read = x.tolist()
            return (
                add(read),
                add([read[0], LARGE, 0.1, -LARGE]),
                add([state["level"], LARGE, 0.1, -LARGE]),
                add([True, read[0], 3, LARGE, read[0] > 0, -LARGE], 0.3),
                x * add(value.item() for value in x),
                x * add([0.1] * 10),
            )

        return step, [state]

    return made


def by_builtins(*numbers: Any) -> Any:
    return builtins.sum(*numbers)


def as_value(*numbers: Any) -> Any:
    function = sum
    return function(*numbers)


held_sum = sum


def under_a_name_of_its_own(*numbers: Any) -> Any:
    return held_sum(*numbers)


def as_default(*numbers: Any, function: Any = sum) -> Any:
    return function(*numbers)


CALLS = [(torch.tensor([0.1 * at + 0.1, LARGE, -LARGE, 0.3 * at, 0.7], dtype=torch.float64),) for at in range(4)]


@pytest.mark.parametrize("add", [by_builtins, as_value, under_a_name_of_its_own, as_default])
def test_sums_of_floats_are_pythons(add: Any) -> None:
    both_ways(make(add), CALLS, captures=None)


def test_a_step_may_keep_and_return_the_function() -> None:
    kept: dict[str, Any] = {"add": None}

    def make() -> Any:
        def step(x: torch.Tensor) -> Any:
            kept["add"] = sum
            return x + 1, sum

        return step, []

    both_ways(make, CALLS)
    assert kept["add"] is sum


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), (([1], 2, 3), {}), (([1],), {"begin": 2}), (([1], 2), {"start": 3})]
)
def test_wrong_arguments_of_sum_are_refused_in_pythons_words(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError) as expected:
        sum(*args, **kwargs)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        try:
            return x, str(sum(*args, **kwargs))
        except TypeError as error:
            return x + 1, str(error)

    assert weft.compile(step)(torch.ones(2))[1] == str(expected.value)
