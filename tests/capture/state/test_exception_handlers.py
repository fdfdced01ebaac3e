"""Which exceptions a piece of code catches, by its instructions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from weft.capture.state.exception_handlers import handlers_in


def one(n: int) -> Any:
    try:
        return 1 / n
    except ZeroDivisionError:
        return None


def of_a_base(n: int) -> Any:
    try:
        return 1 / n
    except (KeyError, ArithmeticError) as error:
        return error


def second_clause(n: int) -> Any:
    try:
        return 1 / n
    except KeyError as error:
        print(error)
    except ZeroDivisionError:
        return None


def everything(n: int) -> Any:
    try:
        return 1 / n
    except:  # noqa: E722
        return None


def suppressed(n: int) -> Any:
    with suppress(ZeroDivisionError):
        return 1 / n


def outer(n: int) -> Any:
    try:
        with torch.no_grad():
            try:
                return 1 / n
            finally:
                print(n)
    except Exception:  # noqa: BLE001
        return None


def of_another_name(n: int) -> Any:
    try:
        return 1 / n
    except contextlib.AbstractContextManager.__class__:
        return None


def nothing(n: int) -> Any:
    return 1 / n


def others(n: int) -> Any:
    try:
        return 1 / n
    except (KeyError, RuntimeError):
        return None


def cleans_up(n: int) -> Any:
    with torch.no_grad():
        try:
            return 1 / n
        finally:
            print(n)


@pytest.mark.parametrize("function", [one, of_a_base, second_clause, everything, suppressed, outer, of_another_name])
def test_code_that_may_catch(function: Callable[[int], Any]) -> None:
    assert any(each.catches([ZeroDivisionError]) for each in handlers_in(function.__code__))


@pytest.mark.parametrize("function", [nothing, others, cleans_up])
def test_code_that_does_not(function: Callable[[int], Any]) -> None:
    assert not any(each.catches([ZeroDivisionError]) for each in handlers_in(function.__code__))


def test_only_instructions_inside_count() -> None:
    def around(n: int) -> Any:
        before = 1 / n
        try:
            return before / n
        except ZeroDivisionError:
            return 2 / n

    [handler, *_] = handlers_in(around.__code__)
    code = around.__code__
    divided = [2 * at for at, op in enumerate(code.co_code[::2]) if op == 122]  # BINARY_OP
    assert [at in handler.around for at in divided] == [False, True, False]
