"""Attributes in slots, and of classes, that a step changes, where the class decides what an assignment does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft


class Counts:
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        vars(self)["count"] = vars(self).get("count", 0) + 1

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        vars(self)["count"] += 100


class Counted(Counts):
    __slots__ = ("deleted", "value")


class Renamed:
    __slots__ = ("_value",)
    _value: float

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, f"_{name}", value * 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: float = 1.0


class Meta(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value * 2)


def counted() -> tuple[Callable[[], float], Callable[[], Any]]:
    obj = Counted()
    obj.value = 2.0  # type: ignore[missing-attribute]

    def change() -> float:
        obj.value += 1
        obj.deleted = 1
        del obj.deleted
        return obj.value

    return change, lambda: (obj.value, vars(obj))


def renamed() -> tuple[Callable[[], float], Callable[[], Any]]:
    obj = Renamed()
    obj.value = 1.0  # type: ignore[missing-attribute]

    def change() -> float:
        obj.value = obj._value + 1
        return obj._value

    return change, lambda: obj._value


def frozen() -> tuple[Callable[[], float], Callable[[], Any]]:
    obj = Frozen()

    def change() -> float:
        object.__setattr__(obj, "value", obj.value + 1)
        return obj.value

    return change, lambda: obj


def of_class() -> tuple[Callable[[], float], Callable[[], Any]]:
    class Setting(metaclass=Meta):
        value = 1.0

    def change() -> float:
        Setting.value = Setting.value + 1
        return Setting.value

    return change, lambda: Setting.value


@pytest.mark.parametrize("make", [counted, renamed, frozen, of_class])
def test_what_an_assignment_does_is_done_once(make: Callable[[], Any]) -> None:
    def run(*, compile_it: bool) -> list[tuple[float, str]]:
        change, seen = make()
        step = lambda x: x * change()
        called = weft.compile(step) if compile_it else step
        return [(called(torch.ones(())).item(), repr(seen())) for _ in range(4)]

    assert run(compile_it=True) == run(compile_it=False)
