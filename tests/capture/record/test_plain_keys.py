"""Numbers that change from call to call as keys of dictionaries."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import weft
from weft.capture.record import plain_keys
from weft.errors import WeftError

CALLS = 5


class Pair(NamedTuple):
    """What a step may return."""

    losses: dict[Any, Any]
    x: Tensor


@dataclass
class Result:
    """The same."""

    losses: dict[Any, Any]
    x: Tensor


RETURNED: dict[str, Callable[[Tensor, int], Any]] = {
    "an integer": lambda x, at: {at: x.sum()},
    "a float": lambda x, at: {at * 0.5: x * 2},
    "in a tuple": lambda x, at: {("loss", at): x.sum()},
    "nested": lambda x, at: [{"epoch": {at: {at + 1: x.sum()}}}],
    "ordered": lambda x, at: OrderedDict([(at, 1), (at + 1, x.sum())]),
    "with a default": lambda x, at: defaultdict(list, {at: [x.sum()]}),
    "in a named tuple": lambda x, at: Pair({at: x.sum().item()}, x),
    "in a dataclass": lambda x, at: Result({at: x.sum().item()}, x),
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


def test_a_set_with_such_a_number() -> None:
    compiled = weft.compile(lambda x, at: {at, 7})
    assert [compiled(torch.ones(2), at) for at in range(4)] == [{at, 7} for at in range(4)]


def test_what_the_step_does_not_add_is_not_searched() -> None:
    """The globals of a module may hold a dataset. A container knows only those keys that the code names."""
    obj = {"data": [1, 2], "named": 3}
    container = SimpleNamespace(obj=obj, before={"named": 3})
    searched: list[Any] = []
    with (
        mock.patch.object(plain_keys, "make_keys_plain", lambda value, is_own: searched.append(value)),
        plain_keys.plain_keys_in_state([container]),  # type: ignore[list-item]
    ):
        obj["added"] = added = [{}]
    assert len(searched) == 1
    assert searched[0] is added
