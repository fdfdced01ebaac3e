"""Functions and methods of libraries that a program replaces between two calls are followed, as eager follows them."""

from __future__ import annotations

import abc
import builtins
import functools
import math
import sys
import threading
from collections.abc import Callable
from math import exp
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft import thread_patches

X = torch.linspace(-1, 1, 12).reshape(3, 4)
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4, elementwise_affine=False))
PLAIN = nn.Linear(4, 4)


class Holder:
    functions = F


def imports_inside(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import silu

    return silu(x)


def trained(x: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(PLAIN.parameters(), lr=0.0)
    PLAIN(x).sum().backward()
    optimizer.step()
    found = PLAIN.weight.grad.clone()
    optimizer.zero_grad()
    return found


def tripled(*args: Any, **kwargs: Any) -> Any:
    return args[0] * 3


def doubled_gradients(optimizer: Any, closure: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(2)


# The step, whose attribute is replaced, its name, and what takes its place.
REPLACED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any, str, Any]] = {
    "a function that the step names": (lambda x: torch.nn.functional.relu(x), F, "relu", tripled),
    "a function by another name of its module": (lambda x: F.relu(x), F, "relu", tripled),
    "a function of a module in an attribute": (lambda x: Holder.functions.relu(x), F, "relu", tripled),
    "a function that a module's forward calls": (lambda x: MODEL(x), F, "relu", tripled),
    "a function of torch's that a function of torch's calls": (lambda x: MODEL(x), torch, "relu", tripled),
    "a function that the step imports": (imports_inside, F, "silu", tripled),
    "a function of torch's C++": (lambda x: torch.sin(x), torch, "sin", tripled),
    "forward of a class of modules": (lambda x: MODEL(x), nn.Linear, "forward", lambda self, x: x * 3),
    "the call of all modules": (lambda x: MODEL(x), nn.Module, "__call__", lambda self, x: x * 3),
    "a method of tensors": (lambda x: x.relu(), torch.Tensor, "relu", tripled),
    "an operator of tensors": (lambda x: x + x, torch.Tensor, "__add__", tripled),
    "a method of optimizers": (trained, torch.optim.SGD, "step", doubled_gradients),
    "a function of Python's": (lambda x: x * math.exp(1.0), math, "exp", lambda value: 7.0),
    "a number of Python's": (lambda x: x * math.pi, math, "pi", 3.0),
    "a built-in function": (lambda x: x * divmod(7, 2)[0], builtins, "divmod", lambda a, b: (5, 0)),
    "a function of numpy's": (lambda x: x * float(np.cbrt(8.0)), np, "cbrt", lambda value: 7.0),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_replaced_function_is_followed_and_its_return_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, owner, attribute, replacement = REPLACED[name]
    compiled = weft.compile(step)
    for _ in range(2):
        assert torch.equal(compiled(X), step(X))
    assert len(compiled.captures) == 1
    with monkeypatch.context() as patched:
        patched.setattr(owner, attribute, replacement)
        expected = step(X)
        for _ in range(2):
            assert torch.equal(compiled(X), expected)
    assert not torch.equal(step(X), expected)
    assert torch.equal(compiled(X), step(X))
    assert len(compiled.captures) == 2
    change = "has got an attribute {}" if owner is torch.Tensor else "{} was replaced or changed"
    assert change.format(attribute) in compiled.captures[1]


def test_a_replaced_module_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        import cmath

        return x * cmath.exp(1).real

    other = ModuleType("cmath")
    vars(other)["exp"] = lambda value: 5j + 2
    compiled = weft.compile(step)
    assert torch.equal(compiled(X), step(X))
    monkeypatch.setitem(sys.modules, "cmath", other)
    assert torch.equal(compiled(X), X * 2)


def test_what_the_step_does_not_go_by_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = weft.compile(lambda x: MODEL(x) * exp(1.0))
    compiled(X)
    monkeypatch.setattr(F, "gelu", tripled)
    monkeypatch.setattr(torch.Tensor, "median", tripled)
    monkeypatch.setattr(nn.Linear, "extra_repr", lambda self: "")
    monkeypatch.setattr(math, "exp", lambda value: 7.0)  # the step's module has the function by a name of its own
    compiled(X)
    assert len(compiled.captures) == 1


def test_a_number_of_the_users_that_changes_is_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"torch": torch, "count": 0, "__name__": "made"}
    exec("def step(x):\n    global count\n    count += 1\n    return torch.relu(x) * count", namespace)
    compiled = weft.compile(namespace["step"])
    for count in range(1, 7):
        assert torch.equal(compiled(X), torch.relu(X) * count)
    assert len(compiled.captures) <= 2


def test_a_function_that_another_thread_replaces_for_itself_is_the_same() -> None:
    compiled = weft.compile(lambda x: F.relu(x))
    assert torch.equal(compiled(X), F.relu(X))
    replaces, ends = threading.Event(), threading.Event()

    def replace() -> None:
        with thread_patches.replaced(F, "relu", tripled):
            replaces.set()
            ends.wait(30)

    thread = threading.Thread(target=replace)
    thread.start()
    assert replaces.wait(30)
    found = compiled(X)
    ends.set()
    thread.join()
    assert torch.equal(found, F.relu(X))
    assert len(compiled.captures) == 1


class Shape(abc.ABC):
    """Others register with it, and with what derives from it."""

    @abc.abstractmethod
    def area(self) -> float: ...


class Elsewhere(abc.ABC):
    """Has nothing to do with a step."""

    @abc.abstractmethod
    def area(self) -> float: ...


class Round(Shape):
    """Derives from it."""


@pytest.mark.parametrize("registers_with", [Shape, Round])
def test_a_class_registered_with_an_abstract_one_is_followed(registers_with: type[Shape]) -> None:
    class Ball:
        """Is a shape once it is registered."""

    class Other:
        """Is registered with another class."""

    ball = Ball()
    compiled = weft.compile(lambda x: x * (2 if isinstance(ball, Shape) else 3))
    assert torch.equal(compiled(X), X * 3)
    registers_with.register(Ball)
    assert torch.equal(compiled(X), X * 2)
    assert "Ball was registered with Shape" in compiled.captures[1]

    Elsewhere.register(Other)
    assert torch.equal(compiled(X), X * 2)
    assert len(compiled.captures) == 2


def test_an_implementation_registered_with_a_generic_function_is_followed() -> None:
    class Token:
        """Has no implementation of its own at first."""

    @functools.singledispatch
    def factor(value: Any) -> float:
        return 2.0

    token = Token()
    compiled = weft.compile(lambda x: x * factor(token))
    assert torch.equal(compiled(X), X * 2)
    factor.register(Token, lambda value: 5.0)
    assert torch.equal(compiled(X), X * 5)
