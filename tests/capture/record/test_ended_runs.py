"""An interrupt while a step is captured: it ends at once, and the state is as it was before the call."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.capture.record.ended_runs import is_interrupt
from weft.capture.record.recorder import recording


class Terminated(BaseException):
    """What a handler of signals raises."""


def _raise(kind: type[BaseException], *_: Any) -> None:
    raise kind


class Handler:
    def __call__(self, *_: Any) -> None:
        raise Terminated


HANDLERS: dict[str, tuple[Any, type[BaseException]]] = {
    "python's": (signal.default_int_handler, KeyboardInterrupt),
    "a function": (lambda number, frame: _raise(Terminated), Terminated),
    "a partial function": (functools.partial(_raise, KeyboardInterrupt), KeyboardInterrupt),
    "an object": (Handler(), Terminated),
}


@pytest.fixture(params=HANDLERS)
def interrupt(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """What the handler of Ctrl-C raises."""
    handler, kind = HANDLERS[request.param]
    before = signal.signal(signal.SIGINT, handler)
    yield kind
    signal.signal(signal.SIGINT, before)


def _interrupted_capture() -> None:
    """Interrupts the capture, and no call of the uncompiled step."""
    if recording() is not None:
        signal.raise_signal(signal.SIGINT)


class Counter:
    def __init__(self) -> None:
        self.calls, self.total, self.interrupted = 0, torch.zeros(2), True

    def at_once(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += x
        if self.interrupted:
            _interrupted_capture()
        return self.total.sum()

    def on_data(self, x: Tensor) -> Tensor:
        self.calls += 1
        total = self.total + x
        if total.sum() > 0:
            self.total += x
            if self.interrupted:
                _interrupted_capture()
        return self.total.sum()


@pytest.mark.parametrize("step", [Counter.at_once, Counter.on_data], ids=lambda step: step.__name__)
def test_an_interrupt_of_a_capture_changes_nothing(
    step: Callable[[Counter, Tensor], Tensor], interrupt: type[BaseException]
) -> None:
    counter = Counter()
    compiled = weft.compile(lambda x: step(counter, x))
    with pytest.raises(interrupt):
        compiled(torch.ones(2))
    assert counter.calls == 0
    assert counter.total.tolist() == [0, 0]
    counter.interrupted = False
    for calls in range(1, 4):
        assert compiled(torch.ones(2)).item() == 2 * calls
        assert counter.calls == calls


def _caught(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - that is what is looked at
        return error
    raise AssertionError


def test_what_code_raises_is_no_interrupt() -> None:
    def again() -> None:
        try:
            _raise(KeyboardInterrupt)
        except KeyboardInterrupt as error:
            raise error

    for function in (again, lambda: _raise(KeyboardInterrupt), lambda: _raise(Terminated)):
        assert not is_interrupt(_caught(function))


def test_an_interrupt_that_code_raises_again_is_one(interrupt: type[BaseException]) -> None:
    def again() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except interrupt as error:
            raise error

    assert is_interrupt(_caught(again))
