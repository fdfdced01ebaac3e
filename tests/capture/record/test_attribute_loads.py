"""``obj.__dict__`` and its like: what a step reads and writes by them is followed, for each object that it asks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.capture.record.attribute_loads import loads_replaced
from weft.capture.state.reachable_state import ReachableState
from weft.errors import UncapturableDraw

CALLS = 5
ONE = 1
Made = tuple[Callable[[torch.Tensor], Any], Callable[[int], Any]]


class State:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __repr__(self) -> str:
        return repr(vars(self))


class Counting:
    def __init__(self) -> None:
        self.at, self.x0, self.x1 = 0, 1, 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        value = self.__dict__.get(f"x{self.at}", 7)
        self.__dict__[f"y{self.at}"] = value
        self.at += 1
        return x * value


def changed(obj: Any, name: str = "x1") -> Callable[[int], Any]:
    """What increments an attribute after each call."""

    def after(at: int) -> Any:
        setattr(obj, name, getattr(obj, name) + 1)

    return after


def comes_and_goes(obj: Any) -> Callable[[int], Any]:
    """What gives an object an attribute after the second call, and takes it away after the fourth."""

    def after(at: int) -> Any:
        if at == 1:
            obj.x1 = 5
        if at == 3:
            del obj.x1

    return after


def _read(obj: Any, name: str) -> Any:
    return obj.__dict__[name]


def subscript() -> Made:
    s = State(x0=1, x1=2)
    return lambda x: functools.reduce(lambda y, at: y * s.__dict__[f"x{at}"], range(2), x), changed(s)


def in_a_function_of_its_own() -> Made:
    s = State(x0=1, x1=2)
    return lambda x: x * _read(s, f"x{ONE}"), changed(s)


def as_a_computed_name() -> Made:
    s = State(x0=1, x1=2)
    return lambda x: x * getattr(s, "_".join(["", "", "dict", "", ""]))[f"x{ONE}"], changed(s)


def absent() -> Made:
    s = State(x0=1)
    return lambda x: x * s.__dict__.get(f"x{ONE}", 1) if f"x{ONE}" in s.__dict__ else x * 3, comes_and_goes(s)


def absent_in_a_module() -> Made:
    module = nn.Linear(2, 2)
    return lambda x: x * module.__dict__.get(f"x{ONE}", 1), comes_and_goes(module)


def written() -> Made:
    s = State(x0=torch.zeros(2))

    def step(x: torch.Tensor) -> Any:
        s.__dict__[f"x{0}"] = s.__dict__[f"x{0}"] + x
        s.__dict__.update({f"n{at}": s.__dict__.get(f"n{at}", 0) + 1 for at in range(2)})
        return x * s.__dict__[f"n{ONE}"]

    return step, lambda at: dict(vars(s))


def written_in_a_method() -> Made:
    s = Counting()
    return s, lambda at: dict(vars(s))


def all_at_once() -> Made:
    s = State(x0=1, x1=2)

    def after(at: int) -> Any:
        s.x1 += 1
        setattr(s, f"y{at}", at)

    return lambda x: x * sum(s.__dict__.values()) * len(vars(s)), after


def in_other_order() -> Made:
    s = State(a=1, b=2)

    def after(at: int) -> Any:
        s.a = vars(s).pop("a")

    return lambda x: x * int("".join(map(str, vars(s).values()))), after


def of_an_object_inside() -> Made:
    s = State(a0=State(x1=2))
    return lambda x: x * s.__dict__[f"a{0}"].__dict__[f"x{ONE}"], changed(s.a0)


def of_a_function() -> Made:
    def f() -> None: ...

    f.x1 = 2  # type: ignore[attr-defined]
    return lambda x: x * f.__dict__[f"x{ONE}"], changed(f)


def of_a_tensor() -> Made:
    weight: Any = nn.Parameter(torch.ones(2))
    weight.x1 = 2
    return lambda x: x * weight.__dict__[f"x{ONE}"], changed(weight)


def of_a_class() -> Made:
    class Base:
        x1 = 2

    class Derived(Base): ...

    def look(name: str) -> Any:
        return next((kind.__dict__[name] for kind in Derived.__mro__ if name in kind.__dict__), 1)

    def after(at: int) -> Any:
        Base.x1 += 1
        comes_and_goes(Derived)(at)

    return lambda x: x * look(f"x{ONE}"), after


def assigned() -> Made:
    s = State(x0=torch.zeros(2), x1=2)

    def step(x: torch.Tensor) -> Any:
        s.__dict__ = {"x0": s.x0 + x, "x1": s.x1 + 1}
        return x * s.x1

    return step, lambda at: dict(vars(s))


def method_of_every_object() -> Made:
    s = State(x0=1, x1=2)

    def step(x: torch.Tensor) -> Any:
        s.__setattr__(f"y{ONE}", s.__getattribute__(f"x{ONE}") + object.__getattribute__(s, f"x{0}"))
        return x * object.__getattribute__(s, f"y{ONE}")

    def after(at: int) -> Any:
        s.x1 += 1
        return dict(vars(s))

    return step, after


def copied_by_its_methods() -> Made:
    s = State(x0=1, x1=2)
    state_of = lambda: s.__reduce_ex__(2)[2][f"x{ONE}"] + s.__getstate__()[f"x{ONE}"]  # type: ignore[attr-defined]
    return lambda x: x * state_of(), changed(s)


CASES = [
    subscript,
    in_a_function_of_its_own,
    as_a_computed_name,
    absent,
    absent_in_a_module,
    written,
    written_in_a_method,
    all_at_once,
    in_other_order,
    of_an_object_inside,
    of_a_function,
    of_a_tensor,
    of_a_class,
    assigned,
    method_of_every_object,
    copied_by_its_methods,
]


@pytest.mark.parametrize("case", CASES)
def test_each_call_does_as_eager_does(case: Callable[[], Made]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[str]:
        step, after = case()
        step = wrap(step)
        return [str((step(torch.full((2,), float(at + 1))), after(at))) for at in range(CALLS)]

    assert run(weft.compile) == run(lambda step: step)


def test_attributes_that_no_code_asks_for_do_not_count() -> None:
    s, other = State(x1=2), State(x1=0)

    @weft.compile
    def step(x: torch.Tensor) -> Any:
        return x * s.__dict__[f"x{ONE}"] * len([other])

    step(torch.ones(2))
    other.x1 += 1
    step(torch.ones(2))
    assert len(step.captures) == 1


def test_code_with_many_constants_and_names_gets_the_same_values() -> None:
    many = "\n".join(f"    y = {at}.5 + s.name{at} if s is None else s.__dict__" for at in range(300))
    scope: dict[str, Any] = {}
    exec(
        f"def f(s):\n{many}\n    try:\n        return (s or y).__dict__, s.__getattribute__('a')\n    finally: pass",
        scope,
    )
    asked: list[Any] = []
    function, s = scope["f"], State(a=1)
    code = function.__code__
    given = {
        "__dict__": lambda obj: asked.append(obj) or vars(obj),
        "__getattribute__": lambda obj: lambda name: getattr(obj, name) + 1,
    }
    with loads_replaced([function], given):
        assert function(s) == (vars(s), 2)
    assert asked == [s] * 301
    assert function.__code__ is code


def test_code_with_more_constants_than_a_load_can_name_is_refused() -> None:
    many = "\n".join(f"    y = {at}" for at in range(1000, 1000 + (1 << 16)))
    scope: dict[str, Any] = {}
    exec(f"def f(s):\n{many}\n    return s.__dict__", scope)
    refused = pytest.raises(UncapturableDraw, match=r"a load of __dict__ at .* in f: the function has more than 65,535")
    with refused, loads_replaced([scope["f"]], {"__dict__": vars}):
        pass


def test_asking_many_objects_for_all_their_attributes_does_not_follow_all_objects_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, followed = ReachableState._object, Counter[int]()

    def follow(self: ReachableState, obj: Any, *args: Any) -> None:
        followed[id(obj)] += 1
        original(self, obj, *args)

    monkeypatch.setattr(ReachableState, "_object", follow)
    objects = [State(x1=at) for at in range(30)]
    assert weft.compile(lambda x: x * sum(vars(each)["x1"] for each in objects))(torch.ones(1)).item() == sum(range(30))
    assert max(followed[id(each)] for each in objects) < 10


def by_class_of_a_number() -> Made:
    s = State(x1=2)
    known = {int: 2, float: 3}
    return lambda x: x * known[s.x1.__class__] * s.x1, changed(s)


def by_single_dispatch() -> Made:
    @functools.singledispatch
    def scaled(by: Any, x: torch.Tensor) -> Any:
        return x

    scaled.register(int, lambda by, x: x * by)
    scaled.register(float, lambda by, x: x * by * 3)
    s = State(x1=2)

    def after(at: int) -> Any:
        s.x1 += 1 if at < 2 else 0.5

    return lambda x: scaled(s.x1, x) + scaled(x.sum().item(), x), after


def by_a_method_with_single_dispatch() -> Made:
    class Scaled:
        @functools.singledispatchmethod
        def of(self, by: Any, x: torch.Tensor) -> Any:
            return x

        @of.register
        def _(self, by: int, x: Any) -> Any:
            return x * by

    scaled, s = Scaled(), State(x1=2)
    return lambda x: scaled.of(s.x1, x), changed(s)


@pytest.mark.parametrize("case", [by_class_of_a_number, by_single_dispatch, by_a_method_with_single_dispatch])
def test_numbers_that_change_have_the_class_of_eager(case: Callable[[], Made]) -> None:
    test_each_call_does_as_eager_does(case)
