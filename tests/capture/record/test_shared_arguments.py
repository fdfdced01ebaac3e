"""One object that is passed twice, or that the Python state holds: a step sees the same sharing as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft.errors import PythonStateChanged

CALLS = 6


class Batch:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class State:
    def __init__(self) -> None:
        self.last: Any = None
        self.entries: dict[str, Any] = {"x": torch.ones(2), "n": 0, "inner": {"x": torch.ones(2)}}
        self.items: list[Any] = []


def tensor(at: float = 1) -> torch.Tensor:
    return torch.full((2,), float(at))


KINDS: dict[str, Callable[[], Any]] = {
    "tensor": tensor,
    "list": lambda: [tensor()],
    "dictionary": lambda: {"a": tensor()},
    "object": lambda: Batch(tensor()),
    "slots": lambda: Slotted(tensor()),
    "empty list": list,
    "list of numbers": lambda: [1, 2],
    "set": lambda: {1, 2},
    "array": lambda: np.ones(2),
    "list in a tuple": lambda: ([tensor()],),
    "list in a dictionary": lambda: {"a": [tensor()]},
}


def shown(value: Any) -> Any:
    """A value as plain data."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, shown(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [shown(each) for each in value]
    return [(name, shown(each)) for name, each in vars(value).items()] if isinstance(value, Batch) else repr(value)


def assert_as_in_eager(of_run: Callable[[Callable[[Any], Any]], list[Any]], most: int = 3) -> None:
    """Compare what a run, which compiles its step by the function that it gets, finds with and without weft."""
    made: list[Any] = []

    def compiled(step: Any) -> Any:
        made.append(weft.compile(step))
        return made[-1]

    assert of_run(compiled) == of_run(lambda step: step)
    assert len(made[0].captures) <= most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False], ids=["one object first", "two objects first"])
def test_whether_two_arguments_are_one_object(kind: str, first: bool) -> None:
    def run(wrap: Any) -> list[Any]:
        step = wrap(lambda a, b: (a is b, torch.ones(2) + 1))
        found = []
        for at in range(CALLS):
            one, other = KINDS[kind](), KINDS[kind]()
            found.append(shown(step(one, one if (at % 2 == 0) is first else other)))
        return found

    assert_as_in_eager(run, most=5)  # sets and arrays are captured by value first


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "array"])
@pytest.mark.parametrize("first", [True, False], ids=["of the state first", "another object first"])
def test_whether_an_argument_is_an_object_of_the_state(kind: str, first: bool) -> None:
    def run(wrap: Any) -> list[Any]:
        s = State()
        s.last = KINDS[kind]()
        step = wrap(lambda a: (a is s.last, torch.ones(2) + 1))
        return [shown(step(s.last if (at % 2 == 0) is first else KINDS[kind]())) for at in range(CALLS)]

    assert_as_in_eager(run)


@pytest.mark.parametrize("kind", ["tensor", "list", "dictionary", "object"])
def test_whether_an_argument_is_what_the_call_before_got(kind: str) -> None:
    def run(wrap: Any) -> list[Any]:
        s = State()

        def step(x: Any) -> Any:
            known, s.last = x is s.last, x
            return known, torch.ones(2) + 1

        compiled, found, x = wrap(step), [], None
        for at in range(3 * CALLS):
            x = KINDS[kind]() if at % 3 == 0 else x
            found += [shown(compiled(x)), s.last is x]
        return found

    assert_as_in_eager(run, most=5)


def test_another_tensor_in_the_same_memory_is_another_object() -> None:
    def run(wrap: Any) -> list[Any]:
        step = wrap(lambda a, b: (a is b, a.add_(1) * 2 + b))
        found = []
        for at in range(8):
            x = tensor(at)
            found += [shown(step(x, [x, x.detach(), x[:], tensor(7)][at % 4])), shown(x)]
        return found

    assert_as_in_eager(run)


def test_sizes_that_change_and_sharing_that_changes() -> None:
    def run(wrap: Any) -> list[Any]:
        s = State()
        s.last = torch.ones(3)
        step = wrap(lambda a, b: (a is b, a is s.last, (a * 2 + b * 3).sum()))
        found = []
        for at in range(12):
            x, y = torch.full((2 + at % 4,), float(at)), torch.full((2 + at % 4,), 2.0)
            found.append(shown(step(*[(x, x), (x, y), (s.last, s.last), (x, x.detach())][at % 4])))
        return found

    assert_as_in_eager(run, most=5)


def test_lists_of_numbers_whose_length_changes() -> None:
    def run(wrap: Any) -> list[Any]:
        s = State()
        s.last = [1, 2, 3]
        step = wrap(lambda a, b: (a is b, a is s.last, sum(a) + sum(b) + torch.ones(2)))
        found = []
        for at in range(8):
            x, y = list(range(2 + at % 3)), list(range(1 + at % 3))
            found.append(shown(step(*[(x, x), (x, y), (s.last, s.last), (x, list(x))][at % 4])))
        return found

    assert_as_in_eager(run, most=8)


def test_a_change_of_one_is_seen_in_the_other() -> None:
    def run(wrap: Any) -> list[Any]:
        def step(a: Any, b: Any) -> Any:
            a["items"].append(a["x"] * 2)
            return b.x is a, len(b.x["items"]), b.x["items"] is a["items"], a

        compiled, found = wrap(step), []
        for at in range(CALLS):
            a, other = ({"x": tensor(at), "items": list[Any]()} for _ in range(2))
            batch = Batch(a if at % 2 else other)
            *returned, same = compiled(a, batch)
            found += [shown(returned), shown(a), shown(batch), same is a]
        return found

    assert_as_in_eager(run)


@pytest.mark.parametrize("first", [True, False], ids=["of the state first", "another object first"])
@pytest.mark.parametrize("through", ["argument", "state"])
def test_a_change_of_an_object_of_the_state(first: bool, through: str) -> None:
    def run(wrap: Any) -> list[Any]:
        s = State()

        def step(passed: Any, inner: Any) -> Any:
            changed = passed if through == "argument" else s.entries
            changed["n"] = changed["n"] + 1
            changed["x"] = changed["x"] * 2
            changed["inner"]["x"] = changed["x"] + 1
            return s.entries["n"], passed["x"] + s.entries["x"], inner is s.entries["inner"], inner["x"] + 1

        compiled, found = wrap(step), []
        for at in range(CALLS):
            other = {"x": tensor(at), "n": 0, "inner": {"x": tensor(at)}}
            passed = s.entries if (at < 3) is first else other
            found += [shown(compiled(passed, passed["inner"])), shown(s.entries), shown(other)]
        return found

    assert_as_in_eager(run, most=4)


def test_parameters_in_a_list_of_the_state_and_in_another_list() -> None:
    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        s = State()
        s.items = list(model.parameters())

        def step(params: Any, x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            model(x).sum().backward()
            for each in params:
                each.grad.mul_(2)
            optimizer.step()
            return params is s.items, params[0] is model.weight, model.weight.detach() * 1

        compiled = wrap(step)
        return [shown(compiled(s.items if at % 2 else list(s.items), tensor(at))) for at in range(CALLS)]

    assert_as_in_eager(run)


def test_a_list_to_which_the_step_appends_is_also_an_argument() -> None:
    s = State()

    def step(passed: list[Any], x: torch.Tensor) -> Any:
        s.items.append(x * 2)
        return len(passed), x + 1

    compiled = weft.compile(step)
    for at in range(3):
        assert compiled([], tensor(at))[0] == 0
    with pytest.raises(PythonStateChanged, match=r"s\.items"):  # it is read now, at another length at each call
        compiled(s.items, tensor())


@pytest.mark.parametrize("size", [0, 2])
def test_a_tensor_of_the_state_as_an_argument_with_or_without_elements(size: int) -> None:
    first, second = torch.empty(size).zero_(), torch.empty(size).zero_()

    def run(wrap: Any) -> list[Any]:
        state = {"last": None}

        def step(x: torch.Tensor) -> torch.Tensor:
            value = 1.0 if x is state["last"] else 2.0 if x is first else 3.0
            state["last"] = x
            return torch.full((2,), value)

        compiled = wrap(step)
        other = torch.empty(size).zero_()
        passed = (first, first, second, second, first, other, other, second, first, second)
        return [compiled(each).tolist() for each in passed]

    assert run(weft.compile) == run(lambda step: step)
