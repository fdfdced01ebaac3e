"""Errors of arithmetic that the user's code catches: ``try: math.exp(loss)``, ``except OverflowError``.

Whether an operation on numbers raises an exception depends on their values. Where the code around it catches the
exception, the step has two paths. There the capture asks whether the operation raises: for numbers whose values are
known the answer is a guard, for numbers that only the data decides it is a branch. Elsewhere it asks nothing: the
exception ends the call, whichever path was captured.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.capture.state.exception_handlers import handlers_in
from weft.source_files import is_user_file, is_weft_file

KINDS = (ZeroDivisionError, OverflowError, ValueError)
"""The exceptions that operations on numbers raise; :class:`ErrorOf` gives their positions, from 1 on."""

_RAISING = frozenset(
    (
        *("truediv", "floordiv", "mod", "pow", "lshift", "rshift", "trunc", "floor", "ceil", "round", "_sym_sqrt"),
        *("sqrt", "exp", "exp2", "expm1", "cosh", "sinh", "gamma", "lgamma", "log", "log10", "log1p", "log2"),
        *("acos", "acosh", "asin", "atanh", "cos", "sin", "tan", "fmod", "remainder"),
    )
)
_BY_DIVISOR = frozenset({"truediv", "floordiv", "mod"})
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Numbers among which each of these operations finds some for which it raises.
_WHOLE = (0, -1, 1, 100_000)
_FLOATS = (0.0, -1.0, 2.0, 1e308, float("inf"), float("nan"))
_CAPTURE = "weft.capture.record.tracer"  # runs the step


class ErrorOf:
    """The target of a node that says whether an operation raises an exception, and which.

    Args:
        function: the operation on numbers.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"error_of_{function.__name__}"
        self.__module__ = __name__

    def __call__(self, *numbers: Any) -> float:
        """0.0 where the operation has a result, else the number of the exception's type, from 1.0 on."""
        try:
            self.function(*numbers)
        except KINDS as error:
            return 1.0 + next(at for at, kind in enumerate(KINDS) if isinstance(error, kind))
        return 0.0


error_of = functools.cache(ErrorOf)


def may_raise(function: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Whether an operation raises an exception for some values of its symbolic operands."""
    name = getattr(function, "__name__", "")
    if name not in _RAISING:
        return False
    if name in _BY_DIVISOR:
        return isinstance(operands[1], _SYMBOLIC) or operands[1] == 0
    return name != "round" or all(digits is None for digits in operands[1:])


def raise_example(function: Callable[..., Any], operands: Sequence[Any], hints: Sequence[Any], kind: type) -> None:
    """Raise the exception that Python raises, with its words.

    Args:
        hints: values of the operands; None for those that only the data decides.
        kind: of the exception, one of ``KINDS``.
    """
    for numbers in itertools.product(*map(_samples, operands, hints)):
        try:
            function(*numbers)
        except kind as error:
            raise error.with_traceback(None) from None
        except (ArithmeticError, TypeError, ValueError):
            continue
    raise kind


def _samples(operand: Any, hint: Any) -> tuple[Any, ...]:
    if hint is not None or not isinstance(operand, _SYMBOLIC):
        return (hint,)
    return _FLOATS if isinstance(operand, torch.SymFloat) else _WHOLE


def is_caught(kinds: Sequence[type[BaseException]] = KINDS, *, by_torch: bool = False) -> bool:
    """Whether code of the user's around the running call, inside the step, catches exceptions of these types.

    Args:
        kinds: errors of arithmetic, unless others are given.
        by_torch: whether code of torch's that catches them first counts: the user's code does not meet these.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _CAPTURE:
        is_users, at = is_user_file(frame.f_code.co_filename), frame.f_lasti
        if is_users or (by_torch and not is_weft_file(frame.f_code.co_filename)):
            around = (each for each in handlers_in(frame.f_code) if at in each.around)
            if any(each.catches(kinds) for each in around):
                return is_users
        frame = frame.f_back
    return False
