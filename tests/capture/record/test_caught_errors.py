"""Exceptions that a step catches, and that numbers raise for some values or symbols in their place would raise."""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import json
import math
import pickle
import random
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

import weft

Function = Callable[[Any], Any]

WHOLE = (3, 5, -2, 0, 4)
FLOATS = (1.5, 2.0, 0.0, 900.0, -2.5)

# Functions of a whole number, and how often they may be captured for the five of WHOLE: one for each outcome of the
# question, one for the first call; or one for each value.
OF_WHOLE: dict[str, tuple[Function, int]] = {
    "whole quotient": (lambda n: 100 // n, 3),
    "remainder": (lambda n: 100 % n, 3),
    "quotient": (lambda n: 100 / n, 3),
    "divmod": (lambda n: divmod(100, n), 3),
    "negative power": (lambda n: n**-1, 4),
    "power": (lambda n: 10.0**n, 4),
    "exp": (lambda n: math.exp(2 * n), 4),
    "sqrt": (lambda n: math.sqrt(n - 2), 4),
    "log": (lambda n: math.log(n), 4),
    "log of a base": (lambda n: math.log(n, 3), 4),
    "shift": (lambda n: 1 << n, 5),
    "shift right": (lambda n: 100 >> n, 5),
    "power of a modulus": (lambda n: pow(n, 3, 5), 5),
    "inverse": (lambda n: ~n, 5),
    "json": (lambda n: json.dumps({"n": n}), 5),
    "fraction": (lambda n: float(fractions.Fraction(n, 3)), 5),
    "decimal": (lambda n: str(decimal.Decimal(n)), 5),
    "mean": (lambda n: statistics.mean([n, 3, 4]), 5),
    "time": (lambda n: str(datetime.timedelta(seconds=n)), 5),
    "generator": (lambda n: random.Random(n).random(), 5),
    "pickle": (lambda n: pickle.loads(pickle.dumps(n)), 5),
    "bytes": (lambda n: n.to_bytes(1, "big"), 5),
    "method of the type": (lambda n: int.__add__(n, 3), 5),
    "real": (lambda n: (n.real, n.imag, n.numerator, n.denominator, n.conjugate()), 2),
    "default of an attribute": (lambda n: (getattr(n, "real", None), hasattr(n, "to_bytes"), hasattr(n, "expr")), 5),
    "no attribute": (lambda n: n.foo, 5),
    "no item": (lambda n: n[0], 5),
    "no text": (lambda n: "a" + n, 5),
    "no sum": (lambda n: sum([n, "a"]), 5),
    "complex": (lambda n: n * 1j, 5),
    "no format": (lambda n: f"{n:zz}", 2),
}
OF_FLOATS: dict[str, tuple[Function, int]] = {
    "whole quotient": (lambda n: 100 // n, 4),
    "remainder": (lambda n: 100 % n, 4),
    "quotient": (lambda n: 100 / n, 4),
    "power": (lambda n: n**-1.5, 5),
    "powers": (lambda n: 10.0**n, 4),
    "exp": (lambda n: math.exp(n), 4),
    "log": (lambda n: math.log(n), 4),
    "acos": (lambda n: math.acos(n), 4),
    "int": (lambda n: int(n * 1e300), 6),
    "round": (lambda n: round(n * 1e300), 6),
    "infinity": (lambda n: n * 1e300, 4),
    "json": (lambda n: json.dumps({"n": n}), 5),
    "no format": (lambda n: f"{n:d}", 2),
    "and": (lambda n: 100 & n, 5),
}


def guarded(function: Function, number: Any) -> Any:
    """What the function gives, or the exception that it raises."""
    try:
        return function(number)
    except Exception as error:  # noqa: BLE001 - whatever it is, eager raises the same
        return type(error).__name__, str(error)


def compared(step: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> int:
    """Compare every call with eager; the number of captures."""
    compiled = weft.compile(step)
    for args in calls:
        expected, found = step(*args), compiled(*args)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
        assert (type(found[1]), repr(found[1])) == (type(expected[1]), repr(expected[1])), args
    return len(compiled.captures)


def of_argument(function: Function, x: torch.Tensor, number: Any) -> Any:
    return x * 2, guarded(function, number)


@pytest.mark.parametrize("name", OF_WHOLE)
def test_whole_numbers(name: str) -> None:
    function, most = OF_WHOLE[name]
    assert compared(functools.partial(of_argument, function), [(torch.ones(3), n) for n in WHOLE]) <= most


@pytest.mark.parametrize("name", OF_FLOATS)
def test_floats(name: str) -> None:
    function, most = OF_FLOATS[name]
    assert compared(functools.partial(of_argument, function), [(torch.ones(3), n) for n in FLOATS]) <= most


OF_DATA: dict[str, Function] = {
    "exp": math.exp,
    "quotient": lambda n: 100 / n,
    "remainder": lambda n: 100 % n,
    "sqrt": lambda n: math.sqrt(n),
    "log": lambda n: math.log(n),
    "power": lambda n: n**-0.5,
    "powers": lambda n: 10.0**n,
    "int": lambda n: int(n),
    "round": lambda n: round(n),
    "floor": lambda n: math.floor(n),
    "whole quotient": lambda n: 100 // int(n),
    "no attribute": lambda n: n.foo,
}


@pytest.mark.parametrize("name", OF_DATA)
def test_numbers_that_only_the_data_decides(name: str) -> None:
    """One branch for each kind of outcome, however many values there are."""

    def step(x: torch.Tensor) -> Any:
        return x * 2, guarded(OF_DATA[name], x.sum().item())

    values = (1.0, 0.0, 2.5, -1.0, 1000.0, float("nan"), 3.0, float("inf"))
    assert compared(step, [(torch.tensor([value]),) for value in values]) <= 7


@pytest.mark.parametrize("name", ["whole quotient", "json", "fraction", "sqrt", "bytes", "real"])
def test_sizes(name: str) -> None:
    def step(x: torch.Tensor) -> Any:
        return x * 2, guarded(OF_WHOLE[name][0], x.shape[0] - 4)

    compared(step, [(torch.ones(size),) for size in (2, 3, 5, 4, 6, 3, 7)])


def test_learning_rates_of_the_first_call() -> None:
    def made() -> Callable[..., Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = rate * 0.5
            return loss.detach(), guarded(json.dumps, rate)

        return step

    eager, compiled = made(), weft.compile(made())
    for _ in range(4):
        x = torch.randn(2, 3)
        expected, found = eager(x), compiled(x)
        assert found[1] == expected[1]
        assert torch.equal(found[0], expected[0])


def test_exceptions_that_have_nothing_to_do_with_numbers_cost_no_captures() -> None:
    """The step meets the same exceptions with symbols and without: numbers stay symbols."""

    def step(x: torch.Tensor, epoch: int) -> Any:
        try:
            kind = int("a text")
        except ValueError:
            kind = 7
        with suppress(AttributeError):
            kind = x.no_such_attribute
        return x * kind + epoch, epoch + 1

    assert compared(step, [(torch.ones(3), epoch) for epoch in range(8)]) <= 3


def test_nothing_is_asked_where_nothing_is_caught() -> None:
    """The exception ends the call. The perplexity of a loss costs no branch."""

    def step(x: torch.Tensor) -> Any:
        try:
            with torch.no_grad():
                y = x * 2
        finally:
            z = x * 3
        try:
            z = z + y
        except torch.OutOfMemoryError:
            raise
        except (KeyError, RuntimeError):
            z = z * 0
        return z, math.exp(x.sum().item())

    compiled = weft.compile(step)
    for value in (1.0, 2.0, 3.0):
        x = torch.tensor([value])
        assert compiled(x)[1] == step(x)[1]
    assert len(compiled.captures) == 1
    with pytest.raises(weft.errors.StepFailed, match="OverflowError"):
        compiled(torch.tensor([1000.0]))


def test_a_guard_on_an_exception_is_shown_with_its_operation() -> None:
    def step(x: torch.Tensor, n: int) -> Any:
        return x * 2, guarded(lambda n: 100 // n, n)

    compiled = weft.compile(step)
    for n in (2, 3, 0):
        compiled(torch.ones(3), n)
    assert "error_of_floordiv(100, " in compiled.captures[-1]


LOST: dict[str, Function] = {
    "decimal": decimal.Decimal,
    "complex": lambda n: n * 1j,
    "sum": lambda n: math.fsum([n, 1]),
    "hexadecimal": lambda n: n.hex(),
    "mean": lambda n: statistics.mean([n, 1]),
}


@pytest.mark.parametrize("name", LOST)
def test_an_exception_of_the_capture_that_a_step_catches_is_an_error(name: str) -> None:
    """Python wants the value of a number that only the data decides; eager raises nothing."""

    def step(x: torch.Tensor) -> Any:
        return x * 2, guarded(LOST[name], x.sum().item())

    with pytest.raises(weft.errors.CannotCapture, match="test_caught_errors"):
        weft.compile(step)(torch.ones(2))


def jittered(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """A Cholesky factor, of a matrix with as much on its diagonal as it takes."""
    scaled, jitter = x * weight, 0.0
    while True:
        try:
            factor = torch.linalg.cholesky(scaled + jitter * torch.eye(3))
            break
        except torch.linalg.LinAlgError as error:
            jitter, said = jitter + 2.0, str(error)
    loss = factor.diagonal().log().sum()
    loss.backward()
    gradient, weight.grad = weight.grad, None
    return loss.detach(), (gradient, jitter, said if jitter else "")


def test_a_factor_that_does_not_exist() -> None:
    good, bad = torch.eye(3) * 2, torch.diag(torch.tensor([1.0, -1.0, 2.0]))
    weight = torch.tensor(1.0, requires_grad=True)
    compared(jittered, [(each, weight) for each in (good, bad, good, bad * 0.5, bad)])


def test_singular_matrices_of_a_batch() -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> Any:
        try:
            return torch.linalg.solve(a, b), ""
        except RuntimeError as error:
            return a @ b, str(error)

    one, zero, b = torch.eye(3), torch.zeros(3, 3), torch.ones(2, 3, 1)
    batches = [torch.stack(pair) for pair in ((one, one), (one, zero), (zero, one), (one * 2, one))]
    compared(step, [(batch, b) for batch in batches])


def test_a_debugger_sees_the_lines_of_a_step_that_is_captured() -> None:
    """Exceptions are noted by a trace function, as debuggers have one."""
    lines: list[int] = []

    def step(x: torch.Tensor, n: int) -> Any:
        try:
            quotient = 100 // n
        except ZeroDivisionError:
            quotient = 0
        return x * 2, quotient

    def of_step(frame: types.FrameType, event: str, argument: Any) -> Any:
        lines.append(frame.f_lineno - step.__code__.co_firstlineno)
        return of_step

    def tracer(frame: types.FrameType, event: str, argument: Any) -> Any:
        return of_step if frame.f_code is step.__code__ else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        found = weft.compile(step)(torch.ones(3), 0)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert found[1] == 0
    assert set(lines) == {1, 2, 3, 4, 5}
