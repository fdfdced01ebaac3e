"""Numbers that change from call to call as keys of dictionaries and members of sets, and sets that a step makes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.errors import WeftError

CALLS = 5
RETURNED: dict[str, Callable[[Tensor, int], Any]] = {
    "an integer": lambda x, at: {at: x.sum()},
    "a float": lambda x, at: {at * 0.5: x * 2},
    "in a tuple": lambda x, at: {("loss", at): x.sum()},
    "nested": lambda x, at: [{"epoch": {at: {at + 1: x.sum()}}}],
    "ordered": lambda x, at: OrderedDict([(at, 1), (at + 1, x.sum())]),
    "with a default": lambda x, at: defaultdict(list, {at: [x.sum()]}),
    "a set": lambda x, at: {at, 7},
    "a frozen set": lambda x, at: frozenset([at, at + 1]),
}


@pytest.mark.parametrize("name", RETURNED)
def test_keys_of_what_is_returned_are_plain_numbers(name: str) -> None:
    step = RETURNED[name]
    compiled = weft.compile(step)
    for at in range(CALLS):
        x = torch.full((2,), at / 2)
        assert repr(compiled(x, at)) == repr(step(x, at))


class Log:
    """What a loop keeps."""

    def __init__(self) -> None:
        self.losses: dict[Any, Any] = {}


STORED: dict[str, Callable[[Log, Tensor, int], Any]] = {
    "a number": lambda log, x, at: log.losses.__setitem__(at, x.sum().item()),
    "a tensor": lambda log, x, at: log.losses.__setitem__(at, x.sum()),
    "counted": lambda log, x, at: log.losses.__setitem__(at, len(log.losses)),
    "nested": lambda log, x, at: log.losses.__setitem__(at, {at: x.sum().item()}),
    "updated": lambda log, x, at: log.losses.update({at % 2: at, "loss": x.sum().item()}),
}


@pytest.mark.parametrize("name", STORED)
def test_keys_of_the_state_are_plain_numbers(name: str) -> None:
    ours, theirs, store = Log(), Log(), STORED[name]

    def step(log: Log, x: Tensor, at: int) -> Tensor:
        store(log, x, at)
        return x * 2

    compiled = weft.compile(lambda x, at: step(ours, x, at))
    for at in range(CALLS):
        x = torch.full((2,), at / 2)
        assert torch.equal(compiled(x, at), step(theirs, x, at))
        assert repr(ours.losses) == repr(theirs.losses)


def test_a_number_that_only_the_data_decides_is_no_key() -> None:
    with pytest.raises(WeftError, match=r"x\.sum\(\)\.item\(\)"):
        weft.compile(lambda x: {x.sum().item(): 1})(torch.ones(2))


def test_a_set_that_the_step_makes_is_another_one_at_each_call() -> None:
    compiled = weft.compile(lambda x: ({"seen"}, bytearray(b"a"), {"in": {1, (2, 3)}}))
    first = compiled(torch.ones(2))
    first[0].add("more")
    first[1].append(3)
    first[2]["in"].clear()
    assert compiled(torch.ones(2)) == ({"seen"}, bytearray(b"a"), {"in": {1, (2, 3)}})


def test_one_set_at_two_places_is_one_set() -> None:
    log = Log()

    def step(x: Tensor) -> Any:
        log.losses = made = {1}  # type: ignore[assignment]
        return made, made

    compiled = weft.compile(step)
    for _ in range(2):
        first, second = compiled(torch.ones(2))
        assert first is second is log.losses


def test_the_users_own_set_stays_the_same_object() -> None:
    seen = {1}

    def step(x: Tensor, given: Any) -> Any:
        return seen, given

    compiled, given = weft.compile(step), {2}
    for _ in range(2):
        found = compiled(torch.ones(2), given)
        assert found[0] is seen
        assert found[1] is given


def test_a_set_of_tensors_is_refused() -> None:
    with pytest.raises(WeftError, match="set"):
        weft.compile(lambda x: {x * 2})(torch.ones(2))
