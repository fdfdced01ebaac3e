"""``id()`` in a step: of objects of the user's it is what it is, that of others must not be kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.capture.record.escapes import EscapeCheck
from weft.errors import UncapturableDraw


class State:
    def __init__(self) -> None:
        self.last: Any = None
        self.known: dict[Any, Any] = {}
        self.ids: set[int] = set()


def of_an_argument(s: State, x: torch.Tensor) -> Any:
    same = id(x) == s.last
    s.last = id(x)
    return x + same


def as_a_key(s: State, x: torch.Tensor) -> Any:
    s.known[id(x)] = 1
    return x * len(s.known)


def in_a_key(s: State, x: torch.Tensor) -> Any:
    s.known[id(x), 0] = 1
    return x * len(s.known)


def in_a_set(s: State, x: torch.Tensor) -> Any:
    made = x * 2
    s.ids.add(id(made))
    return made


def returned(s: State, x: torch.Tensor) -> Any:
    return {"id": id(x)}


@pytest.mark.parametrize("what", [of_an_argument, as_a_key, in_a_key, in_a_set, returned])
def test_an_id_that_a_step_keeps_is_refused(what: Callable[..., Any]) -> None:
    s = State()
    with pytest.raises(UncapturableDraw, match=r"id\(\) of a tensor at .*test_object_ids.py:\d+.*compare with `is`"):
        weft.compile(lambda x: what(s, x))(torch.ones(2))


def test_ids_tell_tensors_apart_and_find_parameters() -> None:
    model, s = nn.Linear(2, 2), State()
    s.known = {id(each): name for name, each in model.named_parameters()}

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        distinct = len({id(each) for each in (x, y, x)})
        s.known[id(model.weight)] += "."
        return x * distinct + sum(id(each) in s.known for each in model.parameters()) + (id(y) in s.known)

    compiled = weft.compile(step)
    x, y = torch.ones(2), torch.ones(2)
    assert compiled(x, y).tolist() == [4.0, 4.0]
    assert compiled(x, x).tolist() == [3.0, 3.0]
    assert s.known == {id(model.weight): "weight..", id(model.bias): "bias"}


class Made:
    pass


def of_a_list(s: State, x: torch.Tensor) -> Any:
    made = [x]
    s.last = id(made)
    return made


def of_a_dict_of_numbers(s: State, x: torch.Tensor) -> Any:
    made = {"n": 1}
    s.known[id(made)] = made
    return x


def of_an_object(s: State, x: torch.Tensor) -> Any:
    made = Made()
    s.ids.add(id(made))
    return x, made


def of_a_function(s: State, x: torch.Tensor) -> Any:
    return {"id": id(lambda: x)}


def in_a_text(s: State, x: torch.Tensor) -> Any:
    made = [x]
    s.known[f"{id(made):x}"] = made
    return x


def computed_from(s: State, x: torch.Tensor) -> Any:
    made = {"n": 1}
    s.ids.add(1 + id(made) // 16)
    return x, made


MADE = [
    *((of_a_list, "list"), (of_a_dict_of_numbers, "dict"), (of_an_object, "Made"), (of_a_function, "function")),
    *((in_a_text, "list"), (computed_from, "dict")),
]


@pytest.mark.parametrize(("what", "kind"), MADE)
def test_so_is_that_of_an_object_that_the_step_makes(what: Callable[..., Any], kind: str) -> None:
    s = State()
    match = rf"id\(\) of a {kind} at .*test_object_ids.py:\d+.*compare with `is`"
    with pytest.raises(UncapturableDraw, match=match):
        weft.compile(lambda x: what(s, x))(torch.ones(2))


@pytest.mark.parametrize("argument", [[torch.ones(2)], {0: torch.ones(2)}])
def test_so_is_that_of_a_list_or_dict_among_the_arguments(argument: Any) -> None:
    s = State()

    def step(given: Any) -> Any:
        same, s.last = s.last == id(given), id(given)
        return given[0] + same

    with pytest.raises(UncapturableDraw, match=rf"id\(\) of a {type(argument).__name__} .*test_object_ids.py"):
        weft.compile(step)(argument)


def test_ids_find_lists_dicts_and_modules_of_the_state() -> None:
    def run(wrap: Callable[[Any], Any]) -> Any:
        s, model = State(), nn.Linear(2, 2)
        entries, names = [1, 2], {"a": 1}
        s.known = {id(entries): 0, id(names): 0, id(model): 0}

        def step(x: torch.Tensor) -> Any:
            local = [x, x * 2]
            memo = {id(each): each for each in local}
            for each in (entries, names, model):
                s.known[id(each)] += 1
            return memo[id(local[1])] + len({id([x]) for _ in range(1)})

        step = wrap(step)
        return [step(torch.ones(2)).tolist() for _ in range(3)], list(s.known.values())

    assert run(weft.compile) == run(lambda step: step)


def compared_with_one_from_outside(s: State, x: torch.Tensor) -> Any:
    return x * 2 if id(x) == s.last else x


@pytest.mark.parametrize("argument", [torch.ones(2), [torch.ones(2)]])
def test_an_argument_is_not_compared_by_an_id_from_outside(argument: Any) -> None:
    s = State()
    compiled = weft.compile(lambda x: compared_with_one_from_outside(s, x))
    compiled(argument)
    s.last = id(argument)
    with pytest.raises(UncapturableDraw, match=r"id\(\) of a .*it is compared with a number that was made outside"):
        compiled(argument)


ADDRESSES: dict[str, Callable[[Any], Any]] = {
    "method": lambda made: made.__hash__(),
    "repr": repr,
    "format": lambda made: f"{made}",
    "percent": lambda made: "%s" % made,  # noqa: UP031
    "hex": lambda made: hex(id(made)),
    "in a list": lambda made: str([made]),
    "of an exception": lambda made: str(ValueError(made)),
    "in a tuple": lambda made: {"now": (1, made.__hash__())},
}


@pytest.mark.parametrize("name", ADDRESSES)
@pytest.mark.parametrize("as_key", [False, True])
def test_the_address_of_an_object_that_the_step_makes_is_not_kept(name: str, *, as_key: bool) -> None:
    s = State()

    def step(x: torch.Tensor) -> Any:
        made = Made()
        address = ADDRESSES[name](made)
        if as_key and name != "in a tuple":
            s.known[address] = made
        else:
            s.known["made"], s.last = made, address
        return x

    with pytest.raises(UncapturableDraw, match=r"the address of a Made .* at s\.(known|last)"):
        weft.compile(step)(torch.ones(2))


@dataclasses.dataclass(frozen=True)
class Around:
    inner: Any


class HashedById:
    def __hash__(self) -> int:
        return id(self) // 16


class WithMethod:
    def method(self) -> None: ...


HASHES: dict[str, Callable[[], Any]] = {
    "Made": Made,
    "Made in a tuple": lambda: (Made(), 1),
    "Made in tuples": lambda: ("a", ((Made(),), 2)),
    "Made in a frozenset": lambda: frozenset({Made()}),
    "Made of a dataclass": lambda: Around(Made()),
    "Made in a tuple of a dataclass": lambda: (Around((1, Made())), 2),
    "HashedById": HashedById,
    "HashedById in a tuple": lambda: (HashedById(), 1),
    "WithMethod": lambda: WithMethod().method,
    "tensor": lambda: (torch.ones(2), 1),
}


@pytest.mark.parametrize("kind", HASHES)
@pytest.mark.parametrize("kept", [lambda number: number, lambda number: {number % 97: 1}, lambda number: (number, 1)])
def test_so_is_a_hash_that_the_identity_of_such_an_object_decides(kind: str, kept: Callable[[int], Any]) -> None:
    s, make = State(), HASHES[kind]

    def step(x: torch.Tensor) -> Any:
        made = make()
        s.last = made, kept(hash(made))  # the line
        return x

    match = rf"hash\(\) of a {kind.split()[0]} at .*test_object_ids.py:\d+ in step"
    with pytest.raises(UncapturableDraw, match=match):
        weft.compile(step)(torch.ones(2))


def test_hashes_of_plain_values_and_of_the_users_objects_are_kept() -> None:
    s, own = State(), Made()
    values = [1, "a", (1, ("b", 2.5)), frozenset({"c", 1}), own, (own, 1), Around(own), Around(3), Made, print]

    def step(x: torch.Tensor) -> Any:
        made = Made()
        s.last = (
            [hash(each) for each in values],
            hash((made, 1)) == hash((made, 1)),
            hash((made, 1)) == hash((Made(), 1)),
        )
        return x

    weft.compile(step)(torch.ones(2))
    assert s.last == ([hash(each) for each in values], True, False)


def test_addresses_of_the_users_objects_are_kept() -> None:
    s, own = State(), Made()

    def step(x: torch.Tensor) -> Any:
        s.known[repr(own)] = hash(own), hash(x) != hash(x * 2), f"{Made()}"[:5]
        return x

    weft.compile(step)(torch.ones(2))
    assert s.known == {repr(own): (hash(own), True, f"{Made()}"[:5])}


def test_asking_for_ids_of_many_objects_does_not_list_all_objects_each_time() -> None:
    s = State()
    listed: list[int] = []

    def step(x: torch.Tensor) -> Any:
        made = [Made() for _ in range(5)]
        memo = {id(each): at for at, each in enumerate(made)}
        return x * sum(memo[id(each)] for each in made)

    original = EscapeCheck.made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EscapeCheck, "made", lambda self, kind: listed.append(1) or original(self, kind))
        assert weft.compile(step)(torch.ones(1)).item() == sum(range(5))
    assert s.last is None
    assert not listed
