"""``id()`` in a step: of tensors of the user's it is what it is, that of others must not be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
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
