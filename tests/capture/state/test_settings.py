"""What a step reads that belongs to Python or to a library, and that code changes between calls: settings, names of
functions, mocks, what is saved of a module, streams."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributions, nn

import weft

Made = tuple[Callable[[torch.Tensor], Any], Callable[[int], Any]]
CALLS = 5


def checks_of_distributions() -> Made:
    def step(x: torch.Tensor) -> Any:
        try:
            distributions.Normal(x, -1.0)
        except ValueError:
            return x * 3
        return x

    return step, lambda at: distributions.Distribution.set_default_validate_args(at % 3 != 2)


def names_of_functions() -> Made:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x

    def change(at: int) -> None:
        helper.__name__, helper.__doc__ = f"n{at // 2}", f"d{at // 3}"
        helper.__qualname__, helper.__module__ = f"q{at // 4}", f"m{at // 4}"

    return lambda x: (x, helper.__name__, helper.__doc__, helper.__qualname__, helper.__module__), change


def name_of_the_step() -> Made:
    def step(x: torch.Tensor) -> Any:
        return x, step.__name__

    return step, lambda at: setattr(step, "__name__", f"n{at // 2}")


def attributes_of_mocks() -> Made:
    mocks = mock.Mock(), mock.MagicMock()

    def change(at: int) -> None:
        mocks[0].scale, mocks[1].inner.scale, mocks[0].read.return_value = at // 2, at // 3, at // 4

    return lambda x: x * mocks[0].scale + mocks[1].inner.scale * mocks[0].read(), change


def calls_of_mocks() -> Made:
    held = mock.Mock()

    def step(x: torch.Tensor) -> Any:
        held.read(1)
        return x, held.read.call_count, held.read.called

    return step, lambda at: held.read.call_count


def names_of_saved_buffers() -> Made:
    model = nn.Sequential(nn.BatchNorm1d(2))

    def change(at: int) -> None:
        unsaved = model[0]._non_persistent_buffers_set
        (unsaved.add if at == 2 else unsaved.discard)("running_mean")

    return lambda x: (x, list(model.state_dict())), change


def redirected_streams() -> Made:
    def change(at: int) -> None:
        sys.stderr = io.StringIO() if at in (2, 3) else sys.__stderr__  # type: ignore[assignment]

    return lambda x: x * (2 if sys.stderr is sys.__stderr__ else 3), change


def arrays_as_text() -> Made:
    held = SimpleNamespace(array=np.array([1 / 3, 2 / 3]))
    change = lambda at: np.set_printoptions(precision=2 + at // 2)
    return lambda x: (x, repr(held.array), f"{held.array}"), change


CASES: list[Callable[[], Any]] = [
    checks_of_distributions,
    names_of_functions,
    name_of_the_step,
    attributes_of_mocks,
    calls_of_mocks,
    names_of_saved_buffers,
    redirected_streams,
    arrays_as_text,
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    checked = distributions.Distribution._validate_args
    with np.printoptions():
        yield
    distributions.Distribution.set_default_validate_args(checked)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_each_call_reads_what_eager_reads(case: Callable[[], Any]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[str]:
        step, change = case()
        called, found = wrap(step), []
        for at in range(CALLS):
            found.append(f"{change(at)} {called(torch.ones(2))}")
        return found

    with contextlib.redirect_stderr(sys.stderr):  # puts it back
        eager = run(lambda step: step)
        assert run(weft.compile) == eager
    assert len(set(eager)) > 1, "the change changes nothing"


def test_what_no_code_asks_for_is_no_reason_for_a_capture() -> None:
    model, array = nn.BatchNorm1d(2), np.ones(2)
    step = weft.compile(lambda x: model(x) * float(array[0]))
    step(torch.ones(2, 2))
    captures = len(step.captures)
    model._non_persistent_buffers_set.add("running_mean")
    np.set_printoptions(precision=3)
    with contextlib.redirect_stderr(io.StringIO()):
        step(torch.ones(2, 2))
    assert len(step.captures) == captures
