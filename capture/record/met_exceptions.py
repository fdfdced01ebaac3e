"""Exceptions that the user's code meets in an attempt at a capture that has stand-ins for values.

Code in C that wants a plain number or a text finds an object of another type, and raises an exception that eager does
not raise. If the user's code catches it, the step goes another way than eager does. So these exceptions are noted, and
:mod:`weft.capture.record.attempts` does not trust such an attempt by itself.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from weft.capture.record.ended_runs import RunEnded
from weft.capture.state.exception_handlers import handlers_in
from weft.capture.user_code import Frame
from weft.source_files import is_own_file, is_user_file

# Those that code in C raises where it gets a stand-in.
_OF_WRONG_TYPES = (TypeError, ValueError, RuntimeError, AssertionError, SystemError, BufferError)
_OF_SYMBOLS = (*_OF_WRONG_TYPES, AttributeError, ArithmeticError)
# Those that a symbol raises only where its value does too: a lookup goes by the hash, which is that of the value.
_OF_OTHERS = (LookupError, OSError, ImportError)
# The ends of iterators, and of a run that the capture itself ends at an open question.
_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit, RunEnded)

SYMBOLIC_TYPE = re.compile(r"\bSym(Int|Float|Bool)\b")
"""The types of symbolic numbers, in messages."""

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)

# Packages with which a capture computes, and which raise and catch for reasons of their own.
_OF_CAPTURES = frozenset({"sympy", "mpmath", "numpy"})


class MetException(NamedTuple):
    """An exception in a function of the user's or of a library.

    Attributes:
        kind: its type.
        said: its message, where that is a plain text.
        where: the line that met it.
    """

    kind: type[BaseException]
    said: str
    where: Frame


def of_wrong_types(met: Iterable[MetException]) -> list[MetException]:
    """Those that a text or an array of another type raises."""
    return [each for each in met if issubclass(each.kind, _OF_WRONG_TYPES)]


def of_symbols(met: Iterable[MetException]) -> list[MetException]:
    """Those that a symbolic number may raise where a plain one does not, or with other words."""
    return [each for each in met if not issubclass(each.kind, _OF_OTHERS)]


def names_symbols(met: MetException) -> bool:
    """Whether its message names the type of a symbolic number, which no eager step has."""
    return issubclass(met.kind, TypeError) and SYMBOLIC_TYPE.search(met.said) is not None


def may_catch(functions: Iterable[types.FunctionType], *, libraries: bool) -> bool:
    """Whether one of the functions catches exceptions that symbolic numbers raise.

    Args:
        libraries: whether those of libraries count: they catch many, and to note exceptions takes time.
    """
    counts = is_user_file if libraries else is_own_file
    codes = (each.__code__ for each in functions)
    return any(
        handler.catches(_OF_SYMBOLS) for code in codes if counts(code.co_filename) for handler in handlers_in(code)
    )


def _may_be_of_number(error: Any) -> bool:
    """Libraries look for attributes of their own objects at every call."""
    owner = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    return owner is None or isinstance(owner, _NUMBERS)


@contextlib.contextmanager
def exceptions_noted(met: list[MetException]) -> Iterator[None]:
    """Inside, note in ``met`` the exceptions in code of the user's or of libraries, but for ``_ENDS``."""
    before: Callable[[types.FrameType, str, Any], Any] | None = sys.gettrace()  # type: ignore[bad-assignment]

    def enter(frame: types.FrameType, event: str, argument: Any) -> Any:
        theirs = None if before is None else before(frame, event, argument)
        if not is_user_file(frame.f_code.co_filename):
            return theirs
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _OF_CAPTURES:
            return theirs
        if theirs is not None:  # a debugger, or a tool that counts lines
            return functools.partial(both, [theirs])
        frame.f_trace_lines = False
        return step

    def step(frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and not issubclass(argument[0], _ENDS) and _may_be_of_number(argument[1]):
            args = getattr(argument[1], "args", ())
            said = args[0] if args and type(args[0]) is str else ""
            where = Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            met.append(MetException(argument[0], said, where))
        return step

    def both(theirs: list[Any], frame: types.FrameType, event: str, argument: Any) -> Any:
        step(frame, event, argument)
        theirs[0] = None if theirs[0] is None else theirs[0](frame, event, argument)
        return functools.partial(both, theirs)

    met.clear()  # those of an attempt that ended before the step did
    sys.settrace(enter)
    try:
        yield
    finally:
        if sys.gettrace() is enter:  # and no debugger that the step has called
            sys.settrace(before)
