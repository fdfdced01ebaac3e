"""A ``__repr__`` or ``__str__`` of the user's that counts or changes something, in what a step prints or formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.errors import PythonStateChanged

CALLS = 5


class Counts:
    def __init__(self, x: Any = None) -> None:
        self.shown, self.x = 0, x

    def __repr__(self) -> str:
        self.shown += 1
        return f"shown {self.shown} times"


class OfClass:
    shown = 0

    def __str__(self) -> str:
        OfClass.shown += 1
        return f"shown {OfClass.shown} times"


class State:
    def __init__(self) -> None:
        self.own: Any = Counts()
        self.text: Any = None


STEPS: dict[str, Callable[[State, torch.Tensor], Any]] = {
    "printed": lambda s, x: print(s.own),
    "printed with a tensor": lambda s, x: print(s.own, x.sum()),
    "formatted and printed": lambda s, x: print(f"{s.own}!"),
    "formatted with a tensor": lambda s, x: print(f"{s.own} {x.sum()}"),
    "formatted and stored": lambda s, x: setattr(s, "text", f"{s.own!r}"),
    "repr": lambda s, x: setattr(s, "text", repr(s.own)),
    "of the class": lambda s, x: print(f"{OfClass()}"),
    "of the class and printed": lambda s, x: print(OfClass(), x.sum()),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_texts_change_what_they_change_in_eager(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        s = State()
        OfClass.shown = 0

        def step(x: torch.Tensor) -> torch.Tensor:
            STEPS[name](s, x)
            return x + 1

        compiled, found = wrap(step), []
        for at in range(CALLS):
            found += [compiled(torch.full((2,), float(at))).tolist(), vars(s)["own"].shown, s.text, OfClass.shown]
        return [*found, capsys.readouterr().out]

    assert run(weft.compile) == run(lambda step: step)


@pytest.mark.parametrize("shown", [lambda made: print(made), lambda made: print([made], {"a": made})])
def test_a_text_that_changes_an_object_that_the_step_leaves_is_refused(shown: Callable[[Any], None]) -> None:
    def step(x: torch.Tensor) -> Any:
        made = Counts(x * 2)
        shown(made)
        return made

    with pytest.raises(PythonStateChanged, match=r"an object that it made \(in a `__repr__` or `__str__` run by print"):
        weft.compile(step)(torch.ones(2))


def test_a_text_that_changes_what_the_step_reads_afterwards_is_refused() -> None:
    s = State()

    def step(x: torch.Tensor) -> torch.Tensor:
        print(s.own, x.sum())
        return x + s.own.shown

    with pytest.raises(PythonStateChanged, match=r"s\.own\.shown \(in a `__repr__` or `__str__` run by print"):
        weft.compile(step)(torch.ones(2))
