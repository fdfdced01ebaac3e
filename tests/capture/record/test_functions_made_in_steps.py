"""Functions that a step makes and leaves: each call makes its own, over its own variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft import errors

CALLS = 4
State = dict[str, Any]


def over_a_tensor(s: State, x: torch.Tensor) -> Any:
    y = x * 2
    return lambda: y


def over_a_number(s: State, x: torch.Tensor) -> Any:
    s["n"] += 1
    n = s["n"]
    return lambda: (n, x)


def over_a_number_of_the_data(s: State, x: torch.Tensor) -> Any:
    mean = x.mean().item()
    return lambda: mean


def over_a_list(s: State, x: torch.Tensor) -> Any:
    items: list[Any] = []

    def add() -> Any:
        items.append(len(items))
        return list(items)

    return add


def over_what_is_in_a_list(s: State, x: torch.Tensor) -> Any:
    items = ({"x": x * 3},)
    return lambda: items[0]["x"]


def with_defaults(s: State, x: torch.Tensor) -> Any:
    s["n"] += 1

    def made(y: Any = x * 2, *, n: Any = s["n"], items: Any = []) -> Any:  # noqa: B006
        items.append(n)
        return y, n, list(items)

    return made


def two_over_one_variable(s: State, x: torch.Tensor) -> Any:
    total: Any = x * 2

    def add() -> Any:
        nonlocal total
        total = total + 1
        return total

    def get() -> Any:
        return add(), total

    s["add"] = add
    return get


def over_itself(s: State, x: torch.Tensor) -> Any:
    y = x * 2

    def countdown(n: int = 3) -> Any:
        return y if n == 0 else countdown(n - 1) + 1

    return countdown


def over_a_variable_without_a_value(s: State, x: torch.Tensor) -> Any:
    y = x * 2
    late: Any
    if s["n"] > 100:
        late = 1

    def made() -> Any:
        try:
            return late
        except NameError:
            return y

    return made


def over_a_function(s: State, x: torch.Tensor) -> Any:
    y = x * 2
    inner = lambda: y
    return lambda: inner() + 1


def over_the_users_own(s: State, x: torch.Tensor) -> Any:
    own, y = s["own"], x * 2

    def made() -> Any:
        own.append(1)
        return len(own), y

    return made


def called_by_the_next_call(s: State, x: torch.Tensor) -> Any:
    before = x if s["last"] is None else s["last"]()
    kept = {"x": x * 2}
    s["last"] = lambda: kept["x"] + 1
    return lambda: before


STEPS = (
    over_a_tensor,
    over_a_number,
    over_a_number_of_the_data,
    over_a_list,
    over_what_is_in_a_list,
    with_defaults,
    two_over_one_variable,
    over_itself,
    over_a_variable_without_a_value,
    over_a_function,
    over_the_users_own,
    called_by_the_next_call,
)


@pytest.mark.parametrize("what", STEPS, ids=lambda what: what.__name__)
def test_each_call_makes_its_own(what: Callable[..., Any]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        s: State = {"n": 0, "own": [], "last": None}
        step, kept, found = wrap(lambda x: what(s, x)), list[Any](), list[Any]()
        for at in range(CALLS):
            kept.append(step(torch.full((2,), float(at))))
            found += [str([each() for each in kept]), len(set(map(id, kept))), len(s["own"])]
            found += [kept[-1].__name__, kept[-1].__qualname__, kept[-1].__module__]
            if "add" in s:
                found += [str(s["add"]()), str([each() for each in kept])]
        return found

    assert run(weft.compile) == run(lambda step: step)


def test_a_function_over_parameters_has_those_of_the_user() -> None:
    model = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> Any:
        weight, y = model.weight, model(x)
        return lambda: (weight, y)

    weight, y = weft.compile(step)(torch.ones(2))()
    assert weight is model.weight
    assert torch.equal(y, model(torch.ones(2)))


def test_a_class_over_a_tensor_is_refused() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x * 2

        class Made:
            def get(self) -> Any:
                return y

        return Made()

    with pytest.raises(errors.EscapedTensor, match="define the class outside the step"):
        weft.compile(step)(torch.ones(2))


def test_a_class_over_a_number_of_the_call_has_that_number() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        s = {"n": 0}

        def step(x: torch.Tensor) -> Any:
            s["n"] += 1
            n = s["n"]

            class Made:
                def get(self) -> Any:
                    return n

            return Made()

        compiled = wrap(step)
        return [compiled(torch.ones(2)).get() for _ in range(CALLS)]

    assert [*map(str, run(weft.compile))] == [*map(str, run(lambda step: step))]
