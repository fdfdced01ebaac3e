"""What a program puts in an object in place of what its class gives it, between calls: the next call follows."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft

X = torch.ones(1)


class Scaled(nn.Module):
    factor = 2.0

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x)


class Plain:
    factor = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class FallsBack(Plain):
    def __getattr__(self, name: str) -> float:
        return 4.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.anything


def linear() -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    nn.init.ones_(made.weight)
    return made


def method(obj: Any, factor: float) -> Any:
    return types.MethodType(lambda self, x: x * factor, obj)


SHADOWS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], None]]] = {
    "forward of a module": (Scaled, lambda m: setattr(m, "forward", method(m, 5)), lambda m: delattr(m, "forward")),
    "forward of a library's module": (
        linear,
        lambda m: setattr(m, "forward", lambda x: x * 7),
        lambda m: delattr(m, "forward"),
    ),
    "forward of a module inside": (
        lambda: nn.Sequential(linear(), Scaled()),
        lambda m: setattr(m[0], "forward", lambda x: x * 7),
        lambda m: delattr(m[0], "forward"),
    ),
    "a method of a module": (Scaled, lambda m: setattr(m, "helper", method(m, 5)), lambda m: delattr(m, "helper")),
    "a value of a module's class": (Scaled, lambda m: setattr(m, "factor", 3.0), lambda m: delattr(m, "factor")),
    "a method of an object": (Plain, lambda o: setattr(o, "scaled", method(o, 5)), lambda o: delattr(o, "scaled")),
    "a value of an object's class": (Plain, lambda o: setattr(o, "factor", 3.0), lambda o: delattr(o, "factor")),
    "what __getattr__ gives": (FallsBack, lambda o: setattr(o, "anything", 3.0), lambda o: delattr(o, "anything")),
}


@pytest.mark.parametrize("name", SHADOWS)
def test_an_attribute_in_place_of_one_of_the_class_is_followed_and_its_removal_too(name: str) -> None:
    make, shadow, remove = SHADOWS[name]
    obj = make()
    compiled = weft.compile(lambda x: obj(x))
    for change in (None, None, shadow, None, remove, None, shadow):
        if change is not None:
            change(obj)
        assert torch.equal(compiled(X), obj(X))
    assert len(compiled.captures) <= 4


class Tripled(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def test_another_class_of_a_module_is_followed() -> None:
    model = nn.Sequential(linear(), Scaled())
    compiled = weft.compile(lambda x: model(x))
    for kind in (Scaled, Scaled, Tripled, Tripled, Scaled):
        model[1].__class__ = kind
        assert torch.equal(compiled(X), model(X))
    assert len(compiled.captures) == 2
    assert "class of model.1 is Tripled, was Scaled" in compiled.captures[1]


def test_another_forward_of_a_librarys_class_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(linear(), linear())
    compiled = weft.compile(lambda x: model(x))
    assert torch.equal(compiled(X), model(X))
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", lambda self, x: x * 3)
        assert torch.equal(compiled(X), X * 9)
    assert torch.equal(compiled(X), model(X))
    assert "Linear.forward was replaced or changed" in compiled.captures[1]
