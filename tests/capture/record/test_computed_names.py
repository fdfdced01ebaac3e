"""Attributes by names that stand in no code: a step computes them, or reads all attributes of an object."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
import random
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.capture.record import tracer

CALLS = 5


class State:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Callback:
    def __init__(self) -> None:
        self.steps, self.total = 0, torch.zeros(())

    def on_batch_end(self, loss: torch.Tensor) -> None:
        self.steps += 1
        self.total += loss.detach() * self.steps


class History:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_loss(self, loss: float) -> None:
        self.seen.append(loss)


class Stored:
    """A descriptor that keeps its value under a name of its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, obj: Any, kind: Any) -> Any:
        return getattr(obj, self.name)

    def __set__(self, obj: Any, value: Any) -> None:
        setattr(obj, self.name, value)
        obj.count += 1


class Described:
    value: Any = Stored()

    def __init__(self) -> None:
        self.count, self._value = 0, 0


@dataclasses.dataclass
class Settings:
    a: int = 1
    left: int = 0


class Saved:
    def __init__(self) -> None:
        self.count, self.best = 0, 1.0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


Made = tuple[Callable[[torch.Tensor], Any], Callable[[], Any]]


def numbers_read() -> Made:
    s = State(x0=1, x1=2)

    def after() -> Any:
        s.x1 += 1

    return lambda x: functools.reduce(lambda y, at: y * getattr(s, f"x{at}"), range(2), x), after


def numbers_written() -> Made:
    s = State(x0=1, x1=2)

    def step(x: torch.Tensor) -> Any:
        for at in range(2):
            setattr(s, f"x{at}", getattr(s, f"x{at}") + 1)
            x = x * getattr(s, f"x{at}")
        return x

    return step, lambda: dict(vars(s))


def tensors_written() -> Made:
    s = State(x0=torch.zeros(2))

    def step(x: torch.Tensor) -> Any:
        for at in range(1):
            setattr(s, f"x{at}", getattr(s, f"x{at}") + x)
        return x

    return step, lambda: dict(vars(s))


def new_attributes_of_a_module() -> Made:
    module = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> Any:
        for at in range(2):
            setattr(module, f"x{at}", getattr(module, f"x{at}", 0) + 1)
            x = x * getattr(module, f"x{at}")
        return x

    return step, lambda: [vars(module)[name] for name in ("x0", "x1")]


def attributes_that_come_and_go() -> Made:
    s = State()

    def step(x: torch.Tensor) -> Any:
        name = "_".join(["is", "set"])
        if hasattr(s, name):
            delattr(s, name)
            return x
        setattr(s, name, 1)
        return x * 2

    return step, lambda: dict(vars(s))


def methods_of_callbacks() -> Made:
    callbacks = [Callback(), Callback()]

    def notify(event: str, *arguments: Any) -> None:
        for each in callbacks:
            getattr(each, f"on_{event}")(*arguments)

    def step(x: torch.Tensor) -> Any:
        loss = (x * 2).sum()
        notify("batch_end", loss)
        return loss

    return step, lambda: [(each.steps, each.total.clone()) for each in callbacks]


def lists_of_callbacks_that_train() -> Made:
    """The lists are found with the names, and the optimizer's state is made in between."""
    callbacks = [History(), History()]
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    def step(x: torch.Tensor) -> Any:
        loss = (x * weight).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for each in callbacks:
            getattr(each, "_".join(["on", "loss"]))(loss.item())
        return loss.detach()

    return step, lambda: [list(each.seen) for each in callbacks] + [weight.detach().clone()]


def descriptors() -> Made:
    described = Described()

    def step(x: torch.Tensor) -> Any:
        described.value = described.value + 1
        return x * described.value

    return step, lambda: (described.count, described.value)


def all_variables() -> Made:
    s = State(a=1, b=2)

    def after() -> None:
        s.b += 1

    return lambda x: functools.reduce(lambda y, value: y * value, vars(s).values(), x), after


def copied(copying: Callable[[Any], Any], make: Callable[..., Any]) -> Made:
    s = State(config=make(a=1, left=0), snapshot=None)

    def step(x: torch.Tensor) -> Any:
        s.snapshot = copying(s.config)
        return x * s.snapshot.a

    def after() -> Any:
        s.config.left += 1
        return dict(vars(s.snapshot))

    return step, after


def inside_of_a_copy() -> Made:
    s = State(config=State(a=1, items=[1], settings={"a": 1}), snapshot=None)

    def step(x: torch.Tensor) -> Any:
        s.snapshot = copy.copy(s.config)
        return x

    def after() -> Any:
        s.snapshot.items.append(2)
        s.snapshot.settings["a"] += 1
        return list(s.config.items), dict(s.config.settings)

    return step, after


def own_dictionary() -> Made:
    saved, s = Saved(), State(last=None)

    def step(x: torch.Tensor) -> Any:
        s.last = saved.state_dict()
        return x

    def after() -> Any:
        saved.count += 1
        return dict(s.last)

    return step, after


def new_attributes_of_a_function() -> Made:
    def count() -> None: ...

    def step(x: torch.Tensor) -> Any:
        for name in ("x0", f"x{1}"):
            setattr(count, name, getattr(count, name, 0) + 1)
            x = x * getattr(count, name)
        return x

    return step, lambda: dict(vars(count))


class Slotted:
    __slots__ = ("x0", "x1")

    def __init__(self) -> None:
        self.x0 = 1


def slots_that_are_empty() -> Made:
    s: Any = Slotted()

    def step(x: torch.Tensor) -> Any:
        setattr(s, f"x{1}", getattr(s, f"x{1}", 0) + s.x0)
        s.x0 = s.x1
        return x * s.x1

    return step, lambda: (s.x0, s.x1)


def incremented(obj: Any) -> Callable[[], Any]:
    """What increments an attribute between calls."""

    def after() -> Any:
        obj.x1 += 1

    return after


def getters_from_outside() -> Made:
    s = State(a=State(x1=2), get=operator.attrgetter(f"a.x{1}"))
    return lambda x: x * s.get(s), incremented(s.a)


def getters_of_the_step() -> Made:
    states = [State(x0=0, x1=2, value=3), State(x0=0, x1=3, value=5)]

    def step(x: torch.Tensor) -> Any:
        first = sorted(states, key=operator.attrgetter(f"x{1}"))[0]
        return x * first.value * sum(operator.attrgetter(*(f"x{at}" for at in range(2)))(first))

    return step, incremented(states[0])


def getter_of_a_property() -> Made:
    class Described:
        x = property(operator.attrgetter(f"x{1}"))

    described: Any = Described()
    described.x1 = 1
    return lambda x: x * described.x, incremented(described)


def callers_of_methods() -> Made:
    callback = Callback()
    end = operator.methodcaller(f"on_batch_{'end'}", torch.ones(()))

    def step(x: torch.Tensor) -> Any:
        end(callback)
        operator.methodcaller("_".join(["on", "batch", "end"]), loss=x.sum())(callback)
        return x * callback.steps

    return step, lambda: (callback.steps, callback.total.clone())


def static_attributes() -> Made:
    s = State(x1=2)

    def after() -> None:
        s.x1 += 1
        s.x2 = s.x1

    return lambda x: x * inspect.getattr_static(s, f"x{1}") * inspect.getattr_static(s, f"x{2}", 1), after


def listed_members() -> Made:
    s: Any = State(x1=2)

    def step(x: torch.Tensor) -> Any:
        members = [value for name, value in inspect.getmembers(s) if not name.startswith("__")]
        return x * sum(members) * sum(getattr(s, name) for name in dir(s) if not name.startswith("__"))

    def after() -> None:
        s.x1 += 1
        setattr(s, f"y{s.x1}", 1)

    return step, after


def patterns_and_formats() -> Made:
    point, settings = State(x1=2), Settings()

    def step(x: torch.Tensor) -> Any:
        match point, settings:
            case State(x1=found), Settings(a, _):
                return x * found * a * int("{.x1}".format(point))  # noqa: UP032
        return x

    def after() -> None:
        point.x1 += 1
        settings.a += 1

    return step, after


class Reading(State):
    def read(self, at: int) -> Any:
        return super().__getattribute__(f"x{at}")

    def write(self, at: int, value: Any) -> None:
        super().__setattr__(f"x{at}", value)

    def __getattr__(self, name: str) -> Any:
        return super(Reading, self).__getattribute__(f"_{name}")  # noqa: UP008 - with arguments, too


def methods_of_super() -> Made:
    s = Reading(x1=2, x2=3, _y1=4)

    def step(x: torch.Tensor) -> Any:
        s.write(2, s.read(2) + 1)
        return x * s.read(1) * s.read(2) * s.y1

    def after() -> Any:
        vars(s).update(x1=s.read(1) + 1, _y1=s.y1 + 1)
        return dict(vars(s))

    return step, after


CASES = {
    "methods of super()": methods_of_super,
    "getters from outside": getters_from_outside,
    "getters of the step": getters_of_the_step,
    "getter of a property": getter_of_a_property,
    "callers of methods": callers_of_methods,
    "static attributes": static_attributes,
    "listed members": listed_members,
    "patterns and formats": patterns_and_formats,
    "new attributes of a function": new_attributes_of_a_function,
    "slots that are empty": slots_that_are_empty,
    "numbers read": numbers_read,
    "numbers written": numbers_written,
    "tensors written": tensors_written,
    "new attributes of a module": new_attributes_of_a_module,
    "attributes that come and go": attributes_that_come_and_go,
    "methods of callbacks": methods_of_callbacks,
    "lists of callbacks, in training": lists_of_callbacks_that_train,
    "descriptors": descriptors,
    "all variables": all_variables,
    "copy": lambda: copied(copy.copy, State),
    "deepcopy": lambda: copied(copy.deepcopy, State),
    "replace": lambda: copied(lambda config: dataclasses.replace(config, a=3), Settings),
    "inside of a copy": inside_of_a_copy,
    "own dictionary": own_dictionary,
}


@pytest.mark.parametrize("name", CASES)
def test_each_call_does_as_eager_does(name: str) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        step, after = CASES[name]()
        step, found = wrap(step), list[Any]()
        for at in range(CALLS):
            found += [step(torch.full((2,), float(at + 1))), after()]
        return [str(each) for each in found]

    assert run(weft.compile) == run(lambda step: step)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The attempts at captures that were made so far."""
    made = list[Any]()
    run = tracer._StepCapture.run
    monkeypatch.setattr(tracer._StepCapture, "run", lambda self: made.append(1) or run(self))
    return made


def test_the_names_are_known_to_later_captures(attempts: list[Any]) -> None:
    s = State(x0=1)
    compiled = weft.compile(lambda x, flag: x * sum(getattr(s, f"x{at}") for at in range(1)) + flag)
    compiled(torch.ones(2), True)
    assert len(attempts) == 2
    compiled(torch.ones(2), False)
    assert len(attempts) == 3


def test_a_loop_over_the_layers_of_a_module_needs_no_second_attempt(attempts: list[Any]) -> None:
    model = nn.Module()
    for at in range(3):
        setattr(model, f"layer{at}", nn.Linear(2, 2))
    step = lambda x: functools.reduce(lambda y, at: getattr(model, f"layer{at}")(y), range(3), x)
    weft.compile(step)(torch.ones(2))
    assert len(attempts) == 1


def test_what_stands_for_getattr_is_not_seen() -> None:
    seen: list[Any] = []
    missing = "_".join(["main", "grad"])

    def step(x: torch.Tensor) -> Any:
        kinds = getattr(x, "__class__"), getattr(x * 2, f"__{'class'}__")  # noqa: B009
        return x if hasattr(x, missing) or kinds != (torch.Tensor, torch.Tensor) else x * 2

    compiled = weft.compile(step)
    x = torch.ones(2)
    seen.append(compiled(x).tolist())
    setattr(x, missing, 1)
    seen.append(compiled(x).tolist())
    assert seen == [[2.0, 2.0], [1.0, 1.0]]


def test_functions_among_all_attributes_have_the_types_of_eager() -> None:
    cached = functools.lru_cache(abs)
    s = State(draw=random.random, now=time.time, cached=cached, read=operator.attrgetter, number=1)

    def step(x: torch.Tensor) -> Any:
        kinds = [(name, type(value).__name__, isinstance(value, type)) for name, value in vars(s).items()]
        return kinds, isinstance(s.draw, (int, types.BuiltinMethodType)), s.draw is random.random

    assert weft.compile(step)(torch.ones(2)) == step(torch.ones(2))


def test_wrong_arguments_are_refused_in_the_words_of_python() -> None:
    def step(x: torch.Tensor) -> list[str]:
        calls: list[Callable[[], Any]] = [
            lambda: getattr(x),  # type: ignore[call-arg]
            lambda: getattr(x, 1),  # type: ignore[arg-type]
            lambda: setattr(x, "a"),  # type: ignore[call-arg]
            lambda: hasattr(x, 1),  # type: ignore[arg-type]
            lambda: vars(x, x),  # type: ignore[call-arg]
        ]
        found = []
        for call in calls:
            try:
                call()
            except TypeError as error:
                found.append(str(error))
        return found

    assert weft.compile(step)(torch.ones(2)) == step(torch.ones(2))
