"""Dictionaries whose keys a step puts into another order are left in eager's order."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft


def _first_to_the_end(d: Any) -> None:
    key = next(iter(d))
    d[key] = d.pop(key)


def _middle_to_the_end(d: Any) -> None:
    d["b"] = d.pop("b")


def _removed_and_added(d: Any) -> None:
    d.pop("a", None)
    d["z"] = 1
    d["a"] = 2


def _reversed(d: Any) -> None:
    items = list(d.items())
    d.clear()
    d.update(reversed(items))


def _two_moved(d: Any) -> None:
    d.pop("c", None)
    d["c"] = len(d)
    d["b"] = d.pop("b")


CHANGES = [_first_to_the_end, _middle_to_the_end, _removed_and_added, _reversed, _two_moved]


def orders(
    compiled: bool, kind: Callable[..., Any], change: Callable[[Any], None], make: Any
) -> list[list[tuple[str, int]]]:
    holder, weight = kind(a=1, b=2, c=3), torch.nn.Parameter(torch.ones(2))
    optimizer = make([weight], lr=0.1)

    def step(x: torch.Tensor) -> None:
        change(holder)
        (weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = weft.compile(step) if compiled else step
    found = []
    for _ in range(5):
        run(torch.ones(2))
        found.append(list(holder.items()))
    return found


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RAdam], ids=["one part", "branches"])
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.Counter])
@pytest.mark.parametrize("change", CHANGES)
def test_keys_come_in_the_order_of_eager(change: Callable[[Any], None], kind: Callable[..., Any], make: Any) -> None:
    assert orders(True, kind, change, make) == orders(False, kind, change, make)


def test_a_default_argument_that_grows_is_refused_where_it_is_read_whole() -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def counted(calls: list[int] = []) -> list[int]:  # noqa: B006 - that it is kept is the point
        calls.append(1)
        return sorted(calls)

    @weft.compile
    def step(x: torch.Tensor) -> list[int]:
        (weight * x).sum().backward()
        weight.grad = None
        return counted()

    assert step(torch.ones(2)) == [1]
    with pytest.raises(weft.errors.PythonStateChanged, match=r"counted.__defaults__\[0\]"):
        step(torch.ones(2))
