"""What objects are made of: another object made of the same parts is equal, and no code of its class runs."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import random
import re
import threading
import time
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from weft.capture.state.object_parts import followed_items, is_replaceable, parts_of

T = TypeVar("T")


class Plain:
    def __init__(self) -> None:
        self.a, self._b = 1, [2]


class Derived(Plain, Generic[T]):
    __slots__ = ("x", "y")

    def __init__(self) -> None:
        super().__init__()
        self.x = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: Any


class Items(list[Any]):
    def append(self, value: Any) -> None:
        raise TypeError

    extend = __iter__ = __len__ = append  # type: ignore[assignment]


class Entries(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError

    items = keys = values = update = __setitem__  # type: ignore[assignment]


class Ordered(OrderedDict[str, Any]):
    pass


class Queue(deque[Any]):
    pass


class Some(frozenset[Any]):
    pass


class Pair(NamedTuple):
    a: int
    b: Any


class Color(enum.Enum):
    RED = 1


class OnlyOne:
    one: Any = None

    def __new__(cls) -> OnlyOne:
        cls.one = cls.one or object.__new__(cls)
        return cls.one


def items() -> Items:
    made = Items([1, 2])
    made.note = "a"  # type: ignore[attr-defined]
    return made


TAKEN_APART: list[Any] = [
    Plain(),
    Derived(),
    Slotted(1, [2]),
    items(),
    Entries(a=1),
    Ordered(b=1, a=2),
    Queue([1, 2], 5),
    Some({1}),
    Pair(1, [2]),
    [1, [2]],
    (1, 2),
    {"b": 1, "a": 2},
    {1, 2},
    frozenset({1}),
    deque([1, 2], 3),
    defaultdict(list, a=[1]),
    collections.Counter("aab"),
    collections.ChainMap({"a": 1}),
    collections.UserDict(a=1),  # type: ignore[arg-type]
    collections.UserList([1]),
    types.SimpleNamespace(a=1),
    torch.Size([1, 2]),
    torch.ones(2, 2).max(0),
    time.localtime(),
    torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
    nn.utils.rnn.pack_sequence([torch.ones(2, 1)]),
]
AS_A_WHOLE: list[Any] = [
    Color.RED,
    OnlyOne(),
    object(),
    random.Random(1),
    np.zeros(2),
    np.float64(1),
    np.random.default_rng(1),
    re.match("a", "a"),
    iter([]),
    functools.partial(print),
    nn.Linear(1, 1),
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1),
    ValueError(1),
    threading.Lock(),
    threading.local(),
    lambda: 1,
    Plain,
    torch.ones(1),
    torch.float32,
    range(3),
    types.MappingProxyType({}),
    1,
    "a",
]


def name_of(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", TAKEN_APART, ids=name_of)
def test_another_object_of_the_same_parts(value: Any) -> None:
    taken = parts_of(value)
    assert taken is not None
    if taken.form.is_fixed:
        made = taken.form.fixed(taken.parts)
    else:
        made = taken.form.empty()
        taken.form.put(made, taken.keys, taken.parts)
    assert made is not value
    assert type(made) is type(value)
    again = parts_of(made)
    assert again is not None
    assert again.form == taken.form
    assert len(again.parts) == len(taken.parts)
    assert all(mine is theirs for mine, theirs in zip(again.parts, taken.parts, strict=True))
    assert again.keys == taken.keys
    assert not taken.parts or any(part is not None for part in taken.parts)
    if isinstance(value, Derived):
        assert made.x == 3
        assert not hasattr(made, "y")


@pytest.mark.parametrize("value", AS_A_WHOLE, ids=name_of)
def test_what_is_taken_as_a_whole(value: Any) -> None:
    assert parts_of(value) is None
    assert not is_replaceable(value)


def test_which_objects_other_ones_may_replace() -> None:
    kinds = {type(value) for value in TAKEN_APART if is_replaceable(value)}
    expected = {Plain, Items, Entries, Ordered, list, dict, defaultdict, collections.Counter, collections.ChainMap}
    others = {collections.UserDict, collections.UserList, types.SimpleNamespace, torch.distributions.Normal}
    assert kinds == expected | others


def test_attributes_are_followed_after_items() -> None:
    value = items()
    assert followed_items(value) == [(0, 1), (1, 2), (vars, {"note": "a"})]
    assert followed_items([3]) == [(0, 3)]
    assert followed_items(Plain()) == [(vars, {"a": 1, "_b": [2]})]
