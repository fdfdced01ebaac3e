"""Texts, bytes and sets among the arguments: no guards where the step only passes them on, guards where it looks."""

from __future__ import annotations

import collections.abc
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from twenty_calls import CALLS, compared_calls, twenty_calls

import weft

log = logging.getLogger(__name__)
ONES = torch.ones(2)
text = lambda at: f"name {at}"
PASSED_ON: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "unused": (lambda x, t: x + 1, text),
    "returned": (lambda x, t: (x + 1, t), text),
    "in a dictionary": (lambda x, b: {"loss": x.sum(), "id": b["id"]}, lambda at: {"id": text(at)}),
    "in a list": (lambda x, b: {**b, "loss": x.sum()}, lambda at: {"id": [text(at), text(at + 1), text(at)]}),
    "moved by kind": (
        lambda x, b: [v * 2 if isinstance(v, torch.Tensor) else v for v in b],
        lambda at: [ONES, text(at)],
    ),
    "moved by method": (lambda x, b: [v.to("cpu") if hasattr(v, "to") else v for v in b], lambda at: [ONES, text(at)]),
    "of a type": (lambda x, t: (x, type(t) is str, isinstance(t, (str, bytes)), t is None), text),
    "of an abstract type": (lambda x, t: isinstance(t, collections.abc.Sequence), text),
    "printed": (lambda x, t: print(t, x.sum().item()), text),
    "printed in a text": (lambda x, t: print(f"{t}: {x.sum().item():.1f} {t!r}"), text),
    "printed by %": (lambda x, t: print("name %s" % t), text),  # noqa: UP031
    "printed by % with others": (lambda x, t: print("name %s of %r: %.2f" % (t, [t], x.sum().item())), text),  # noqa: UP031
    "logged": (lambda x, t: log.info("batch %s", t), text),
    "returned in a text": (lambda x, t: f"id {t}", text),
    "bytes": (lambda x, t: (x, t), lambda at: bytes([at])),
    "set": (lambda x, t: (x, t), lambda at: {at}),
    "frozen set": (lambda x, t: (x, [t]), lambda at: frozenset({at})),
    "array of texts": (lambda x, t: (x, t), lambda at: np.array([text(at)])),
    "array of objects": (lambda x, t: (x, t), lambda at: np.array([at, None])),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_a_step_passes_on_is_captured_twice(name: str) -> None:
    step, make = PASSED_ON[name]
    twenty_calls(lambda: step, lambda at: (ONES + at, make(at)), 2)


def _swallows(read: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(x: torch.Tensor, t: Any) -> Any:
        try:
            return x * float(read(t))
        except Exception:  # noqa: BLE001
            return x

    return step


READ: dict[str, Callable[[Any], Any]] = {
    "compared": lambda t: t == "name 3",
    "compared on the right": lambda t: "name 3" == t,  # noqa: SIM300
    "hashed": lambda t: {"name 3": 5}.get(t, 1),
    "truth": lambda t: 2 if t else 3,
    "length": len,
    "sliced": lambda t: int(t[5:]),
    "method": lambda t: int(t.split()[1]),
    "contained": lambda t: t in "name 11",
    "containing": lambda t: "1" in t,
    "joined": lambda t: len(t + "a"),
    "joined on the left": lambda t: len("a" + t),
    "found": lambda t: "name 11".find(t),
    "matched": lambda t: bool(re.match("name 1", t)),
    "parsed": lambda t: json.loads("[" + t[5:] + "]")[0],
    "attribute": lambda t: getattr(torch, t[:0] + "pi"),
    "loop": lambda t: sum(1 for each in t if each == "1"),
    "text that is read": lambda t: len(f"{t}"),
    "device": lambda t: torch.device(t).index,
    "ordered": lambda t: sorted([t, "name 4"])[0] == t,
    "caught in C": lambda t: "".join([t, "a"]) == "name 3a",
}
# Of the texts: among them all that are compared with, and one that comes again.
NUMBERS = [0, 3, 11, 1, 3, 4]


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("name", READ)
def test_what_a_step_reads_gives_eagers_results(name: str, swallowed: bool) -> None:
    if name == "device" and not swallowed:
        pytest.skip("eager raises")
    step = _swallows(READ[name]) if swallowed else lambda x, t: x * float(READ[name](t))
    compared_calls(len(NUMBERS), lambda: step, lambda at: (ONES + at, text(NUMBERS[at])), len(NUMBERS))


def test_the_outcomes_of_comparisons_are_guards() -> None:
    steps: list[Callable[..., Any]] = [
        lambda x, t: x * (2 if t == "name 3" else 3),
        lambda x, t: x * (2 if t != "name 3" else 3),
        lambda x, t: x * (2 if t in ("name 3", "name 5") else 3),
        lambda x, t: (x * (2 if "name 3" == t else 3), t, t == 3),  # noqa: SIM300
    ]
    for step, captures in zip(steps, (3, 3, 4, CALLS), strict=True):
        compiled = twenty_calls(lambda step=step: step, lambda at: (ONES + at, text(at)), captures)
        assert captures == CALLS or "args[1] is not 'name 3'" in str(compiled.entries[0].guards.listed())


def test_a_set_that_the_step_changes_is_changed_at_each_call() -> None:
    twenty_calls(lambda: lambda x, t: (t.add(7), x, t), lambda at: (ONES, {at}), CALLS)
    twenty_calls(lambda: lambda x, t, u: (t.add(7), x, u), lambda at: (lambda s: (ONES, s, s))({at}), CALLS)


def test_only_what_is_read_is_a_guard() -> None:
    step = lambda x, kind, name: (x * (2 if kind == "a" else 3), name)
    compiled = twenty_calls(lambda: step, lambda at: (ONES, "ab"[at % 2], text(at)), 4)
    assert all("args[2]" not in why or "args[1]" in why for why in compiled.captures[3:])


def test_another_type_is_captured_again() -> None:
    compiled = weft.compile(lambda x, t: (x, isinstance(t, str)))
    for at in range(6):
        value = [text(at), at, bytes([at])][at % 3]
        assert compiled(ONES, value)[1] is isinstance(value, str)


def test_no_stand_in_stays_with_the_user() -> None:
    class Box:
        """Holds what it is given in a slot."""

        __slots__ = ("item",)

    kept: list[Any] = []
    step = weft.compile(lambda x, t: (kept.append(t), x)[1])
    for at in range(4):
        step(ONES, text(at))
    assert kept == [text(at) for at in range(4)]

    def boxed(x: torch.Tensor, t: str) -> Any:
        box = Box()
        box.item = t
        return x, box

    compiled = weft.compile(boxed)
    for at in range(4):
        assert compiled(ONES, text(at))[1].item == text(at)
