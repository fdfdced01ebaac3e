"""Objects of the standard library that hold what the user put there: a change between calls, or in the step, counts."""

from __future__ import annotations

import argparse
import contextlib
import logging
import string
import textwrap
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft

# What makes the object, what the step reads of it, and what a program does with it between calls.
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "argparse.Namespace": (lambda: argparse.Namespace(n=1.0), lambda o: o.n, lambda o: setattr(o, "n", 2.0)),
    "LoggerAdapter": (
        lambda: logging.LoggerAdapter(logging.getLogger("weft test"), {"n": 1.0}),
        lambda o: o.extra["n"],
        lambda o: o.extra.update(n=2.0),
    ),
    "string.Template": (
        lambda: string.Template("1$n"),
        lambda o: float(o.substitute(n=0)),
        lambda o: setattr(o, "template", "2$n"),
    ),
    "textwrap.TextWrapper": (
        lambda: textwrap.TextWrapper(width=20),
        lambda o: float(len(o.wrap("one two three four five"))),
        lambda o: setattr(o, "width", 10),
    ),
    "UserDict": (lambda: UserDict(n=1.0), lambda o: o["n"], lambda o: o.update(n=2.0)),
    "UserList": (lambda: UserList([1.0]), lambda o: o[0], lambda o: o.__setitem__(0, 2.0)),
    "ChainMap": (lambda: ChainMap({"n": 1.0}), lambda o: o["n"], lambda o: o.maps.insert(0, {"n": 2.0})),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_change_between_calls_is_noticed(name: str) -> None:
    make, read, change = OBJECTS[name]
    obj = make()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * read(obj)

    compiled = weft.compile(step)
    x = torch.ones(2)
    before = step(x)
    for _ in range(5):
        assert torch.equal(compiled(x), before)
    assert len(compiled.captures) == 1
    change(obj)
    after = step(x)
    assert not torch.equal(after, before)
    assert torch.equal(compiled(x), after)


def test_callbacks_that_a_step_pushes_run_when_the_stack_is_closed() -> None:
    counts = []
    for compile_ in (weft.compile, lambda step: step):
        log: list[int] = []
        stack = contextlib.ExitStack()

        def step(x: torch.Tensor, stack: contextlib.ExitStack = stack, log: list[int] = log) -> torch.Tensor:
            stack.callback(log.append, 1)
            return x + 1

        called: Any = compile_(step)
        for _ in range(4):
            assert torch.equal(called(torch.ones(2)), torch.full((2,), 2.0))
        stack.close()
        counts.append(len(log))
    assert counts == [4, 4]
