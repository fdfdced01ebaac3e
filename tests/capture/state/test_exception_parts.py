"""Exceptions that a step catches or makes, and returns or keeps: each call has one of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft


class OwnError(ValueError):
    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


def _kept(s: list[Any], x: torch.Tensor) -> Any:
    try:
        raise OwnError("bad", code=3)
    except ValueError as error:
        s.append(error)
    return s[-1]


def _made(s: list[Any], x: torch.Tensor) -> Any:
    error = OwnError("made", code=4)
    error.add_note("a note")
    return error


def _chained(s: list[Any], x: torch.Tensor) -> Any:
    try:
        try:
            raise KeyError("key")
        except KeyError as error:
            raise RuntimeError("from it") from error
    except RuntimeError as error:
        return error


def _with_values(s: list[Any], x: torch.Tensor) -> Any:
    return ValueError("loss", x.sum(), x.max().item())


def _of_python(s: list[Any], x: torch.Tensor) -> Any:
    try:
        return int("x")
    except ValueError as error:
        s.append(error)
    try:
        return x.nothing
    except AttributeError as error:
        return error


def _of_torch(s: list[Any], x: torch.Tensor) -> Any:
    try:
        return x.view(3)
    except RuntimeError as error:
        return error


def _grouped(s: list[Any], x: torch.Tensor) -> Any:
    return ExceptionGroup("several", [ValueError(x[0]), KeyError("b"), StopIteration(3), OSError(2, "gone", "file")])


def _of_the_system(s: list[Any], x: torch.Tensor) -> Any:
    try:
        raise TimeoutError("slow")
    except OSError as error:
        s.append(error)
    changed = OSError(5, "changed", "file")
    changed.errno, changed.filename = None, "other"
    s += [changed, OSError(5, "io"), FileNotFoundError(2, "none", "a"), OSError(18, "link", "a", None, "b")]
    return BlockingIOError(11, "again", 3)


def _in_a_branch(s: list[Any], x: torch.Tensor) -> Any:
    try:
        if x.sum() > 20:
            raise ValueError("large")
        raise KeyError("small")
    except (KeyError, ValueError) as error:
        return error


def _shown(error: Any) -> Any:
    """An exception as plain data."""
    if not isinstance(error, BaseException):
        return error.tolist() if isinstance(error, torch.Tensor) else error
    names = "errno", "strerror", "filename", "filename2", "characters_written", "value", "name", "code", "__notes__"
    fields = {name: getattr(error, name, None) for name in names}
    inside = [_shown(each) for each in (*getattr(error, "exceptions", ()), error.__cause__, error.__context__)]
    lines = [each.line for each in traceback.extract_tb(error.__traceback__) if each.filename == __file__]
    args = error.args if not isinstance(error, ExceptionGroup) else error.args[:1]
    text = str(error) if isinstance(error, OSError) else ""
    return type(error), text, [_shown(each) for each in args], fields, inside, error.__suppress_context__, lines


STEPS = [_kept, _made, _chained, _with_values, _of_python, _of_torch, _grouped, _of_the_system, _in_a_branch]


@pytest.mark.parametrize("act", STEPS, ids=lambda act: act.__name__)
def test_each_call_makes_its_own_exceptions(act: Callable[..., Any]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        kept: list[Any] = []
        step = wrap(lambda x: act(kept, x))
        found, shown = [], []
        for number in range(4):
            found.append(step(torch.arange(4.0) + 3 * number))
            shown.append(_shown(found[-1]))
            found[-1].add_note(f"call {number}")
        assert len(set(map(id, found))) == len(found)
        assert len(set(map(id, kept))) == len(kept)
        return [
            shown,
            [_shown(each) for each in (*found, *kept)],
            [found.index(each) for each in kept if each in found],
        ]

    assert run(weft.compile) == run(lambda step: step)
