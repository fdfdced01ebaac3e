"""Objects that hold each other in long chains or in circles, and functions that are bound to what a step makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.errors import EscapedTensor

CALLS = 4


class Node:
    def __init__(self, value: Any, after: Any = None) -> None:
        self.value, self.after = value, after


class Keyed:
    def __init__(self, name: str) -> None:
        self.name = name
        self.inside: Any = None

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self.name == other.name


class Meter:
    def __init__(self) -> None:
        self.count = 0

    def update(self, by: int = 1) -> int:
        self.count += by
        return self.count


class State:
    last: Any = None


def chain(length: int) -> Any:
    return functools.reduce(lambda after, at: Node(at, after), range(length), None)


def lists(length: int) -> Any:
    return functools.reduce(lambda after, at: [at, after], range(length), None)


def all_values(node: Any) -> int:
    total = 0
    while node is not None:
        total, node = total + node.value, node.after
    return total


@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (chain, lambda node: node.value + node.after.value, lambda node: setattr(node.after, "value", 7)),
        (chain, all_values, lambda node: setattr(node.after.after, "value", 7)),
        (lists, lambda items: items[0] + items[1][0], lambda items: items[1].__setitem__(0, 7)),
    ],
)
def test_a_long_chain_in_the_state(make: Any, read: Callable[[Any], int], change: Callable[[Any], None]) -> None:
    def run(wrap: Any) -> list[Any]:
        s = State()
        s.last = make(1000)
        step = wrap(lambda x: x + read(s.last))
        found = [step(torch.ones(2)).tolist() for _ in range(CALLS)]
        change(s.last)
        return [*found, step(torch.ones(2)).tolist()]

    assert run(weft.compile) == run(lambda step: step)


@pytest.mark.parametrize("inside", [lambda key: {key: 1}, lambda key: {key}, lambda key: {(key, 1): 2}])
def test_a_key_with_a_hash_of_its_own_that_holds_itself_is_refused(inside: Callable[[Any], Any]) -> None:
    def step(x: torch.Tensor) -> Any:
        made = Keyed("a")
        made.inside = [inside(made), x * 2]
        return made

    with pytest.raises(EscapedTensor, match=r"Keyed.*`__hash__` of its own.*put it in a list"):
        weft.compile(step)(torch.ones(2))


def bound_method(x: torch.Tensor) -> Any:
    meter = Meter()
    return meter.update, meter, x + 1


def method_alone(x: torch.Tensor) -> Any:
    return Meter().update, None, x + 1


def partial(x: torch.Tensor) -> Any:
    meter = Meter()
    return functools.partial(Meter.update, meter, by=2), meter, x + 1


def of_a_computed_value(x: torch.Tensor) -> Any:
    node = Node(x * 2)
    return functools.partial(getattr, node, "value"), node, x + 1


@pytest.mark.parametrize("step", [bound_method, method_alone, partial, of_a_computed_value])
def test_a_function_bound_to_what_the_step_makes_is_another_one_at_each_call(step: Callable[[Any], Any]) -> None:
    def run(step: Callable[[Any], Any]) -> list[Any]:
        returned = [step(torch.full((2,), float(at))) for at in range(CALLS)]
        called = [function() for function, _, _ in returned]
        owners = [getattr(function, "__self__", None) or function.args[:1][0] for function, _, _ in returned]
        same = [owner is made for owner, (_, made, _) in zip(owners, returned, strict=True)]
        plain = [each.tolist() if isinstance(each, torch.Tensor) else each for each in called]
        return [plain, len(set(map(id, owners))), same, [result.tolist() for _, _, result in returned]]

    assert run(weft.compile(step)) == run(step)


def test_a_function_bound_to_an_object_of_the_state_is_bound_to_that_object() -> None:
    s = State()
    s.last = Meter()
    compiled = weft.compile(lambda x: (s.last.update, functools.partial(Meter.update, s.last), x + 1))
    for at in range(CALLS):
        method, made, _ = compiled(torch.ones(2))
        assert method.__self__ is s.last
        assert made.args[0] is s.last
        assert made() == at + 1


def test_values_in_a_partial_are_those_of_each_call() -> None:
    step = lambda x: {"a": functools.partial(list, [x * 2]), "b": functools.partial(float, x.sum().item())}
    compiled = weft.compile(step)
    for at in range(CALLS):
        x = torch.full((2,), float(at))
        found, expected = compiled(x), step(x)
        assert found["a"]()[0].tolist() == expected["a"]()[0].tolist()
        assert found["b"]() == expected["b"]()
