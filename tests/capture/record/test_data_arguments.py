"""Objects of the user's classes as arguments: each call brings another one, read and changed as in eager."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import weft
from weft import torch_adapter
from weft.capture.record.data_arguments import flat_arguments
from weft.errors import UnregisteredType

CALLS = 5


class Batch:
    def __init__(self, x: Any, y: Any = None) -> None:
        self.x, self.y = x, y


class WithSlots:
    __slots__ = ("n", "x")

    def __init__(self, x: Any, n: Any) -> None:
        self.x, self.n = x, n


@dataclasses.dataclass(slots=True)
class DataWithSlots:
    x: Any
    n: Any


@dataclasses.dataclass
class Data:
    x: Any
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1
        self.not_a_field = 3


class Entries(dict[str, Any]):
    pass


class Named(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Items(list[Any]):
    pass


def tensor(at: int) -> torch.Tensor:
    return torch.full((2 + at % 2,), float(at))


def assigned(name: str) -> Callable[[Any], Any]:
    return lambda b: (setattr(b, name, b.x * 2), b.x * 1)[1]


CASES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "attributes": (lambda at: Batch(tensor(at), at), lambda b: b.x * b.y),
    "an attribute is changed": (lambda at: Batch(tensor(at), at), assigned("y")),
    "a new attribute": (lambda at: Batch(tensor(at), at), assigned("z")),
    "in place": (lambda at: Batch(tensor(at)), lambda b: b.x.add_(1) * 2),
    "returned": (lambda at: Batch(tensor(at)), lambda b: b),
    "in each other": (
        lambda at: Batch(Batch(tensor(at), 3), [Batch(tensor(at), {"k": tensor(at)})]),
        lambda b: b.x.x * b.x.y + b.y[0].x + b.y[0].y["k"],
    ),
    "slots": (lambda at: WithSlots(tensor(at), 2), lambda b: b.x * b.n),
    "a slot is changed": (lambda at: WithSlots(tensor(at), 2), assigned("n")),
    "a list in a slot is changed": (lambda at: WithSlots(tensor(at), [1]), lambda b: b.n.append(b.x * 2)),
    "a slot of data is changed": (lambda at: DataWithSlots(tensor(at), 2), assigned("n")),
    "an attribute that is no field": (lambda at: Data(tensor(at)), lambda b: b.x * b.not_a_field * b.made),
    "what is no field is changed": (lambda at: Data(tensor(at)), assigned("not_a_field")),
    "a class of dictionaries": (lambda at: Entries(x=tensor(at)), lambda b: b["x"] * 2),
    "an entry is taken out": (lambda at: Entries(x=tensor(at)), lambda b: b.pop("x") * 2),
    "an entry is added": (lambda at: Entries(x=tensor(at)), lambda b: b.update(y=b["x"] + 1)),
    "entries are attributes": (lambda at: Named(x=tensor(at)), assigned("y")),
    "a class of lists": (lambda at: Items([tensor(at)]), lambda b: b.append(b[0] * 2)),
    "a namespace": (lambda at: types.SimpleNamespace(x=tensor(at), n=at), lambda b: b.x * b.n),
    "an array": (lambda at: Batch(np.ones(3) * at), lambda b: torch.from_numpy(b.x) * 2),
}


def shown(value: Any) -> Any:
    """A value as plain data."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    slots = [(name, shown(getattr(value, name))) for name in getattr(type(value), "__slots__", ())]
    attributes = [(name, shown(each)) for name, each in getattr(value, "__dict__", {}).items()]
    if isinstance(value, dict):
        return type(value), [(key, shown(each)) for key, each in value.items()], attributes
    if isinstance(value, (list, tuple)):
        return type(value), [shown(each) for each in value], attributes
    return (type(value), attributes, slots) if attributes or slots else (type(value), repr(value))


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_does_with_it_is_as_in_eager(name: str) -> None:
    make, use = CASES[name]

    def run(step: Callable[[Any], Any]) -> list[Any]:
        found = []
        for at in range(CALLS):
            passed = make(at)
            returned = step(passed)
            found.append((shown(returned), shown(passed), returned is passed))
        return found

    compiled = weft.compile(lambda b: use(b))
    assert run(compiled) == run(use)
    assert len(compiled.captures) <= 2


def test_an_object_with_a_model_is_state() -> None:
    trainer = Batch(torch.ones(2), nn.Linear(2, 2))
    compiled = weft.compile(lambda trainer: trainer.y(trainer.x))
    for _ in range(2):
        assert torch.equal(compiled(trainer), trainer.y(trainer.x))
        trainer.y.weight.data.add_(1)
    assert len(compiled.captures) == 1


def test_what_is_an_argument_and_state_is_read_both_ways() -> None:
    known = {"x": torch.zeros(2)}

    def step(x: torch.Tensor, passed: Any) -> torch.Tensor:
        passed["x"].add_(x)
        return known["x"] * 2

    compiled = weft.compile(step)
    for at in range(1, 4):
        assert torch.equal(compiled(torch.ones(2), known), torch.full((2,), 2.0 * at))


def test_the_users_own_code_sees_no_more_pytrees_than_in_eager() -> None:
    class Own(Batch):
        pass

    step = lambda b: tree_map(lambda each: each * 2 if isinstance(each, torch.Tensor) else each, b).x * 1
    for called in (step, weft.compile(step), step):
        assert torch.equal(called(Own(torch.ones(2))), torch.ones(2))


def test_an_argument_that_holds_itself_is_refused() -> None:
    node = Batch(torch.ones(2))
    node.y = [node]
    with pytest.raises(UnregisteredType, match="it holds itself"):
        weft.compile(lambda b: b.y[0].x * 2)(node)


@pytest.mark.parametrize(
    "call",
    [
        ((), {}),
        ((1, 2.5, "text", True, torch.ones(2)), {}),
        ((None, torch.ones(2)), {}),
        ((nn.Parameter(torch.ones(2)), torch.Size([2])), {}),
        (([torch.ones(2)], (1, 2)), {}),
        ((torch.ones(2),), {"by": 1}),
        ([torch.ones(2)], []),
        ([1], {}),
        ((1,), OrderedDict()),
    ],
)
def test_structures_of_all_kinds_of_arguments_are_those_of_pytrees(call: Any) -> None:
    leaves, spec = flat_arguments(call)
    expected, expected_spec = torch_adapter.flatten(call)
    assert list(map(id, leaves)) == list(map(id, expected))
    assert spec == expected_spec
    made = torch_adapter.unflatten(leaves, spec)
    assert [type(each) for each in (made, *made)] == [type(each) for each in (call, *call)]
