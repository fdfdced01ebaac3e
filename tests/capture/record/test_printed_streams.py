"""Streams that a step prints to: those of Python, those from outside, and those that it makes itself."""

from __future__ import annotations

import contextlib
import io
import pprint
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.errors import TextOfValue

OUTSIDE = io.StringIO()


class Prefixed:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        self.stream.write(f"> {text}")


def to_own(x: torch.Tensor) -> str:
    text = io.StringIO()
    print("size", len(x), sep="-", file=text)
    pprint.pprint({"a": 1}, stream=text)
    return text.getvalue()


def redirected_to_own(x: torch.Tensor) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print("inside")
    print("outside")
    return text.getvalue()


def redirected_to_outside(x: torch.Tensor) -> None:
    with contextlib.redirect_stdout(OUTSIDE):
        print("sum", x.sum().item(), x)
    print("outside")


def redirected_to_the_other(x: torch.Tensor) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        print("sum", x.sum().item())
    print("outside", file=sys.stderr)


def redirected_to_an_object(x: torch.Tensor) -> None:
    stream = sys.stdout
    sys.stdout = Prefixed(stream)  # type: ignore[assignment]
    try:
        print(x.sum().item())
    finally:
        sys.stdout = stream


STEPS = (to_own, redirected_to_own, redirected_to_outside, redirected_to_the_other, redirected_to_an_object)


@pytest.mark.parametrize("step", STEPS)
def test_each_call_prints_to_the_streams_of_eager(step: Callable[[torch.Tensor], Any]) -> None:
    """Python's streams are others at every call."""

    def run(called: Callable[[torch.Tensor], Any]) -> list[tuple[Any, ...]]:
        found = []
        OUTSIDE.seek(0)
        OUTSIDE.truncate()
        for at in range(3):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                returned = called(torch.full((2,), float(at)))
            found.append((returned, out.getvalue(), err.getvalue(), OUTSIDE.getvalue()))
        return found

    assert run(weft.compile(step)) == run(step)


class Shown:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<{self.value}>"


READ: dict[str, Callable[[torch.Tensor, io.StringIO], None]] = {
    "tensor": lambda x, text: print({"x": [x]}, file=text),
    "number": lambda x, text: print(x.sum().item(), file=text),
    "text": lambda x, text: print(f"sum {x.sum():.3f}", file=text),
    "object": lambda x, text: print(Shown(x), file=text),
    "separator": lambda x, text: print(1, 2, sep=f"{x.sum()}", file=text),
}


@pytest.mark.parametrize("write", READ)
def test_values_that_go_to_a_stream_of_the_step_are_refused(write: str) -> None:
    def step(x: torch.Tensor) -> str:
        text = io.StringIO()
        READ[write](x, text)
        return text.getvalue()

    with pytest.raises(TextOfValue, match=r"test_printed_streams\.py:\d+"):
        weft.compile(step)(torch.ones(2))
