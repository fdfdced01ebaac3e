"""What an object is may change between two calls: its class, the bases of the class, the dictionary of attributes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import weft

X = torch.linspace(-1, 1, 4)


class Doubles:
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Triples:
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class WithSlots:
    __slots__ = ("by",)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class OthersSlots:
    __slots__ = ("by",)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by + 1


class Settings:
    by = 2.0

    def __init__(self) -> None:
        self.by = 3.0

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Answers(Settings):
    """Overrides how attributes are read."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


@dataclass
class Plain:
    by: float = 2.0

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 2.0
        self.register_buffer("shift", torch.ones(4))
        self.inner = nn.Identity()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.by + self.shift


class Base:
    by = 2.0


class Other:
    by = 3.0


def with_slots() -> WithSlots:
    made = WithSlots()
    made.by = 2.0
    return made


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "class": (Doubles, lambda obj: setattr(obj, "__class__", Triples)),
    "class of an object with slots": (with_slots, lambda obj: setattr(obj, "__class__", OthersSlots)),
    "attributes": (Settings, lambda obj: setattr(obj, "__dict__", {"by": 5.0})),
    "attributes, to none": (Settings, lambda obj: setattr(obj, "__dict__", {})),
    "attributes of a class that reads them itself": (Answers, lambda obj: setattr(obj, "__dict__", {"by": 5.0})),
    "attributes of a dataclass": (Plain, lambda obj: setattr(obj, "__dict__", {"by": 5.0})),
    "attributes of a module": (Scaled, lambda obj: setattr(obj, "__dict__", {**vars(obj), "by": 5.0})),
    "buffers of a module": (Scaled, lambda obj: setattr(obj, "_buffers", {"shift": torch.zeros(4)})),
    "modules of a module": (Scaled, lambda obj: setattr(obj, "_modules", {"inner": nn.ReLU()})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_object_that_becomes_another_one_is_followed(name: str) -> None:
    make, change = CHANGES[name]
    obj = make()
    compiled = weft.compile(lambda x: obj.of(x))
    before = obj.of(X)
    for _ in range(2):
        assert torch.equal(compiled(X), before)
    change(obj)
    assert not torch.equal(obj.of(X), before)
    for _ in range(2):
        assert torch.equal(compiled(X), obj.of(X))
    assert len(compiled.captures) == 2


def test_an_equal_dictionary_with_other_entries_later_is_followed() -> None:
    obj = Settings()
    compiled = weft.compile(lambda x: obj.of(x))
    compiled(X)
    obj.__dict__ = dict(vars(obj))
    assert torch.equal(compiled(X), X * 3)
    obj.by = 7.0
    assert torch.equal(compiled(X), X * 7)


@pytest.mark.parametrize("by_object", [True, False])
def test_other_bases_of_a_class_are_followed(by_object: bool) -> None:
    class Derived(Base):
        """Has what its bases have."""

    subject = Derived() if by_object else Derived
    compiled = weft.compile(lambda x: x * subject.by)
    assert torch.equal(compiled(X), X * 2)
    Derived.__bases__ = (Other,)
    assert torch.equal(compiled(X), X * 3)
    assert "bases of" in compiled.captures[1]


def test_another_class_of_a_parameter_is_followed() -> None:
    class Halved(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = super().__torch_function__(func, types, args, kwargs or {})
            return found / 2 if func is torch.Tensor.mul else found

    weight = nn.Parameter(torch.ones(4))
    compiled = weft.compile(lambda x: weight.mul(x).detach())
    assert torch.equal(compiled(X), X)
    weight.__class__ = Halved
    assert torch.equal(compiled(X), weight.mul(X))
    assert "the class of weight is" in compiled.captures[1]


def test_the_guards_keep_no_object_alive() -> None:
    obj = Settings()
    held = [obj]
    compiled = weft.compile(lambda x: held[0].of(x) if held else x)
    compiled(X)
    reference = weakref.ref(obj)
    held[0] = copy.copy(obj)
    del obj
    compiled(X)
    compiled.entries.clear()
    gc.collect()
    assert reference() is None
