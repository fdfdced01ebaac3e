"""What a class gets and loses between calls, and what objects get that lack it: the next call sees it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft

Change = Callable[[], Any]
Step = Callable[[torch.Tensor], Any]


class Base:
    def __init__(self) -> None:
        self.value = 2


def classes(*bases: type) -> tuple[Any, Any]:
    """A class and one that derives from it."""
    outer = type("Outer", bases or (Base,), {})
    return outer, type("Inner", (outer,), {})


def put(owner: Any, name: str, value: Any) -> Change:
    return lambda: setattr(owner, name, value)


def remove(owner: Any, name: str) -> Change:
    return lambda: delattr(owner, name)


def by_name(obj: Any) -> Step:
    def step(x: torch.Tensor) -> Any:
        hook = getattr(obj, "_".join(["on", "end"]), None)
        return x if hook is None else hook(x)

    return step


def by_question(obj: Any) -> Step:
    return lambda x: obj.on_end(x) if hasattr(obj, "on_end") else x


def by_class(obj: Any) -> Step:
    return lambda x: obj.on_end(x) if hasattr(type(obj), "on_end") else x


def by_error(obj: Any) -> Step:
    def step(x: torch.Tensor) -> Any:
        try:
            hook = obj.on_end
        except AttributeError:
            return x
        return hook(x)

    return step


def times(factor: int) -> Callable[[Any, torch.Tensor], Any]:
    return lambda self, x: x * factor


def added(look: Callable[[Any], Step]) -> tuple[Step, list[Change]]:
    outer, inner = classes()
    return look(inner()), [put(outer, "on_end", times(3)), put(inner, "on_end", times(5)), remove(inner, "on_end")]


def removed(look: Callable[[Any], Step]) -> tuple[Step, list[Change]]:
    outer, inner = classes()
    outer.on_end, inner.on_end = times(3), times(5)
    back = put(outer, "on_end", times(7))
    return look(inner()), [remove(inner, "on_end"), remove(outer, "on_end"), back]


def of_a_library(look: Callable[[Any], Step]) -> tuple[Step, list[Change]]:
    return look(nn.Linear(2, 2)), [put(nn.Linear, "on_end", times(3)), remove(nn.Linear, "on_end")]


def descriptors(look: Callable[[Any], Step]) -> tuple[Step, list[Change]]:
    outer, inner = classes(nn.Module)
    made = property(lambda self: lambda x: x * 3)
    return look(inner()), [put(outer, "on_end", made), put(outer, "on_end", staticmethod(lambda x: x * 5))]


def in_an_optimizer(look: Callable[[Any], Step]) -> tuple[Step, list[Change]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    of_class = look is by_class
    owner, hook = (torch.optim.SGD, times(3)) if of_class else (optimizer, lambda x: x * 3)
    return look(optimizer), [put(owner, "on_end", hook), remove(owner, "on_end")]


@pytest.mark.parametrize("look", [by_name, by_question, by_class, by_error])
@pytest.mark.parametrize("case", [added, removed, of_a_library, descriptors, in_an_optimizer])
def test_methods_that_the_step_looks_for(case: Any, look: Callable[[Any], Step]) -> None:
    compare(lambda: case(look))


def operators(change: Callable[[Any], Change]) -> tuple[Step, list[Change]]:
    _, inner = classes()
    obj, other = inner(), inner()

    def step(x: torch.Tensor) -> Any:
        obj.value = obj.value + 1
        return x * obj.value if obj and obj != other else x * 7

    return step, [change(inner), lambda: [delattr(inner, name) for name in list(vars(inner)) if name in SPECIAL]]


def _get(self: Any, name: str) -> Any:
    found = object.__getattribute__(self, name)
    return found * 3 if name == "value" else found


SPECIAL: dict[str, Any] = {
    "__bool__": lambda self: False,
    "__len__": lambda self: 0,
    "__eq__": lambda self, other: True,
    "__getattribute__": _get,
    "__setattr__": lambda self, name, value: object.__setattr__(self, name, value * 2),
    "value": property(lambda self: 5, lambda self, value: None),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_methods_that_operators_run(name: str) -> None:
    compare(lambda: operators(lambda kind: put(kind, name, SPECIAL[name])))


def test_a_fallback_for_attributes() -> None:
    def case() -> tuple[Step, list[Change]]:
        outer, inner = classes()

        def fallback(self: Any, name: str) -> Any:
            if name == "on_end":
                return lambda x: x * 3
            raise AttributeError(name)

        return by_name(inner()), [put(outer, "__getattr__", fallback), remove(outer, "__getattr__")]

    compare(case)


def test_attributes_that_no_code_names_do_not_count() -> None:
    outer, inner = classes()
    step = weft.compile(by_name(inner()))
    step(torch.ones(2))
    outer.other = 1
    inner.__doc__ = "Other."
    operator.attrgetter("__annotations__")(inner)
    step(torch.ones(2))
    assert len(step.captures) == 1


def compare(case: Callable[[], tuple[Step, list[Change]]]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[str]:
        step, changes = case()
        step, found = wrap(step), []
        for change in [*changes, lambda: None]:
            for _ in range(2):
                found.append(str(step(torch.ones(2))))
            change()
        return [*found, str(step(torch.ones(2)))]

    compiled = run(weft.compile)
    assert compiled == run(lambda step: step)
    assert len(set(compiled)) > 1


class Marked(torch.Tensor):
    """A subclass of the user's."""


MARK = "mark_of_a_class"
TENSORS: dict[str, tuple[Callable[[], Any], type]] = {
    "subclass": (lambda: torch.ones(2).as_subclass(Marked), Marked),
    "base of a subclass": (lambda: torch.ones(2).as_subclass(Marked), torch.Tensor),
    "tensor": (lambda: torch.ones(2), torch.Tensor),
    "parameter": (lambda: nn.Parameter(torch.ones(2)), nn.Parameter),
    "base of a parameter": (lambda: nn.Parameter(torch.ones(2)), torch.Tensor),
}
READS: dict[str, Callable[[Any], Any]] = {
    "default": lambda t: getattr(t, "mark_of_a_class", 1),
    "question": lambda t: 2 if hasattr(t, "mark_of_a_class") else 1,
    "computed name": lambda t: getattr(t, "_of_".join(["mark", "a_class"]), 1),
    "result": lambda t: getattr(t * 2, "mark_of_a_class", 1) if type(t) is torch.Tensor else 1,
}


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("read", READS)
def test_attributes_of_the_classes_of_tensors_count(tensor: str, read: str) -> None:
    make, owner = TENSORS[tensor]

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        held = make()
        step, found = wrap(lambda x: x * READS[read](held)), []
        for at in range(5):
            if at in (1, 2):
                setattr(owner, MARK, 5 + at)
            if at == 4:
                delattr(owner, MARK)
            found.append(step(torch.ones(2)).tolist())
        return found

    try:
        assert run(weft.compile) == run(lambda step: step)
    finally:
        if MARK in vars(owner):
            delattr(owner, MARK)


def test_a_step_writes_to_a_class_of_tensors() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        held = torch.ones(2).as_subclass(Marked)
        Marked.calls = 0  # type: ignore[attr-defined]

        def step(x: torch.Tensor) -> Any:
            type(held).calls += 1  # type: ignore[attr-defined]
            return x * held.calls  # type: ignore[attr-defined]

        called = wrap(step)
        return [(called(torch.ones(2)).tolist(), Marked.calls) for _ in range(4)]  # type: ignore[attr-defined]

    assert run(weft.compile) == run(lambda step: step)
