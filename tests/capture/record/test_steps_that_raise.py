"""A step that ends with an exception: what it did before takes place, and the exception is that of eager."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from both_ways import assert_equal, detached
from weft.capture.record.recorder import recording

ONES = torch.ones(2, 3)


class StopTraining(Exception):
    """Takes two arguments, and gives one to its base."""

    def __init__(self, calls: int, value: object) -> None:
        super().__init__(f"after {calls} calls")
        self.calls, self.value = calls, value


class Stop(BaseException):
    """No ``Exception``: the loop around the step does not take it for an error."""


@dataclass
class CallFailed(Exception):
    """Has a field and no arguments of its own."""

    calls: int


@dataclass
class Training:
    """A model with an optimizer, and Python state of several kinds."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.calls = self.ended = 0
        self.losses: list[Tensor] = []
        self.seen: dict[str, Any] = {}

    def train(self, x: Tensor) -> Tensor:
        """One update of the parameters."""
        self.calls += 1
        loss = self.model(x).square().mean()
        self.losses.append(loss.detach())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> list[Any]:
        """All that a step changes."""
        momentum = [value for state in self.optimizer.state.values() for value in state.values()]
        return detached([self.calls, self.ended, list(self.losses), self.seen, *self.model.parameters(), *momentum])


def counted(t: Training, x: Tensor) -> Tensor:
    t.calls += 1
    t.seen["last"] = x.sum()
    if t.calls == 4:
        raise ValueError(f"call {t.calls}")
    return x * t.calls


def after_an_update(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if t.calls % 3 == 0:
        raise StopTraining(t.calls, loss)
    return loss


def with_finally(t: Training, x: Tensor) -> Tensor:
    try:
        loss = t.train(x)
        t.seen[["a", "b"][t.calls // 3]] = t.calls  # an IndexError at last
        return loss
    finally:
        t.ended += 1


def exits(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if t.calls == 3:
        sys.exit("no more")
    return loss


def stops(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if t.calls % 3 == 0:
        raise [Stop, KeyboardInterrupt][t.calls % 2](t.calls)
    return loss


def stops_a_generator(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if t.calls == 3:
        t.seen["last"] = loss
        raise GeneratorExit
    return loss


def wrong_sizes(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    return loss if t.calls % 3 else x @ x


def on_data(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if loss > 100:
        t.seen["large"] = loss
        raise StopTraining(t.calls, loss)
    return loss


def on_data_from_another(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if loss > 100:
        try:
            return t.seen["nothing"]
        except KeyError as error:
            raise CallFailed(t.calls) from error
    return loss


def on_data_in_time(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if loss > 100:
        raise TimeoutError("slow")
    return loss


def on_data_stops(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if loss > 100:
        t.ended += 1
        t.seen["large"] = loss
        raise Stop(t.calls)
    return loss


def on_data_is_interrupted(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if loss > 100:
        t.ended += 1
        raise KeyboardInterrupt
    return loss


def on_data_exits(t: Training, x: Tensor) -> Tensor:
    loss = t.train(x)
    if loss > 100:
        t.ended += 1
        sys.exit(3)
    return loss


NO_EXCEPTIONS = (SystemExit, Stop, KeyboardInterrupt, GeneratorExit)


def outcome(called: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return detached(called(x))
    except (StopTraining, CallFailed, ValueError, LookupError, RuntimeError, OSError, *NO_EXCEPTIONS) as error:
        cause = error.__cause__
        entries = traceback.extract_tb(error.__traceback__)
        lines = [(each.name, each.line) for each in entries if each.filename == __file__ and each.name != "<lambda>"]
        return type(error), str(error), error.args, vars(error), lines, type(cause), str(cause)


@pytest.mark.parametrize(
    "step",
    [
        *(counted, after_an_update, with_finally, exits, stops, stops_a_generator, wrong_sizes),
        *(on_data, on_data_from_another, on_data_in_time, on_data_exits, on_data_stops, on_data_is_interrupted),
    ],
)
def test_a_step_that_raises_leaves_what_eager_leaves(step: Callable[[Training, Tensor], Any]) -> None:
    compiled, eager = Training(), Training()
    ours, plain = weft.compile(lambda x: step(compiled, x)), lambda x: step(eager, x)
    raised = 0
    for at in range(8):
        x = ONES * (100 if at in (2, 5) else 1)
        found, expected = outcome(ours, x), outcome(plain, x)
        raised += isinstance(expected, tuple)
        assert_equal(found, expected)
        assert_equal(compiled.state(), eager.state())
    assert raised


def test_an_exception_of_a_path_holds_nothing_of_the_capture() -> None:
    training = Training()
    step = weft.compile(lambda x: on_data(training, x))
    step(ONES)
    with pytest.raises(StopTraining) as caught:
        step(ONES * 100)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert frames[-1].f_code.co_name == "on_data"
    assert not frames[-1].f_locals
    with pytest.raises(StopTraining) as again:
        step(ONES * 100)
    assert again.value is not caught.value
    assert again.value.value is training.seen["large"]


def test_a_step_that_raises_while_it_is_captured_alone_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        if recording():
            raise ValueError("only captured")
        return x

    with pytest.raises(ValueError, match="only captured") as caught:
        weft.compile(step)(ONES)
    assert "did not raise" in "".join(caught.value.__notes__)


def _exits(x: Tensor, items: Iterator[Tensor]) -> None:
    next(items)
    sys.exit(3)


def _exits_on_data(x: Tensor, items: Iterator[Tensor]) -> None:
    next(items)
    if x.sum() > 0:
        raise GeneratorExit


def _fails_on_second(x: Tensor, items: Iterator[Tensor]) -> None:
    next(items)
    next(items)
    raise ValueError


def _has_too_few(x: Tensor, items: Iterator[Tensor]) -> None:
    next(items)
    next(items)
    next(items)


@pytest.mark.parametrize("step", [_exits, _exits_on_data, _fails_on_second, _has_too_few])
def test_the_traceback_has_the_lines_of_the_step_and_no_exception_of_the_capture(step: Callable[..., None]) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        found, compiled = [], wrap(step)
        for _ in range(2):
            with pytest.raises(BaseException) as caught:  # noqa: PT011
                compiled(torch.ones(2), iter([torch.ones(2)] * 2))
            frames = [(frame.f_code.co_name, line) for frame, line in traceback.walk_tb(caught.value.__traceback__)]
            found.append((caught.type, caught.value.__context__, frames[1:]))
        return found

    assert run(weft.compile) == run(lambda step: step)


def test_torch_logs_no_traceback_of_what_a_path_catches(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: Tensor) -> Tensor:
        if x.sum() > 0:
            with contextlib.suppress(RuntimeError):
                x[None] @ torch.ones(7, 7)
        return x.sum()

    compiled = weft.compile(step)
    with caplog.at_level("ERROR", "torch._subclasses.fake_tensor"):
        compiled(-torch.ones(2))
        compiled(torch.ones(2))
    assert not caplog.records
