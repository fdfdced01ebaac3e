"""Short tracebacks of errors in a step.

A traceback through a capture has fifty frames of torch and of weft between the user's line and the error. What the user
can act on is their own lines and the message. ``WEFT_FULL_TRACEBACK=1`` keeps all frames.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from weft import knobs
from weft.capture.user_code import is_refused_call, is_user_file, is_weft_file
from weft.errors import CannotCapture, InternalFault, WeftError

P = ParamSpec("P")
R = TypeVar("R")

# Torch logs the traceback of an operation that refuses its arguments, and then raises. The error alone says it.
_FAKES = logging.getLogger("torch._subclasses.fake_tensor")


def shorten_traceback(error: Exception) -> None:
    """Leave the frames of user code alone in the traceback of ``error``, those of installed packages included.

    The errors that it came from are shortened likewise. Faults of weft's own keep all frames.
    """
    own = isinstance(error, InternalFault) or (not isinstance(error, WeftError) and _is_of_weft(error.__traceback__))
    if knobs.full_traceback or (own and not is_refused_call(error)):
        return
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = _users(seen.__traceback__)
        seen.__suppress_context__ = seen.__suppress_context__ or isinstance(seen, WeftError)
        if isinstance(seen, CannotCapture):
            seen.__cause__ = None  # what torch raised says how to debug its own tracer
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def shortens_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, the errors of which have short tracebacks: it captures a step, and nobody's line is between."""

    @functools.wraps(function)
    def short(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            shorten_traceback(error)
            raise

    return short


def _users(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            frames.append(traceback)
        traceback = traceback.tb_next
    short: TracebackType | None = None
    for frame in reversed(frames):
        short = TracebackType(short, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return short


def _is_of_weft(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame is weft's: an error that nobody wrote for a user, which needs all of its frames."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and is_weft_file(traceback.tb_frame.f_code.co_filename)


@contextlib.contextmanager
def without_torchs_log() -> Iterator[None]:
    """Inside, torch does not log the tracebacks of operations that refuse their arguments: the error says it."""
    if knobs.full_traceback:
        yield
        return
    _FAKES.addFilter(_is_no_traceback)
    try:
        yield
    finally:
        _FAKES.removeFilter(_is_no_traceback)


def _is_no_traceback(record: logging.LogRecord) -> bool:
    return record.levelno != logging.ERROR or record.exc_info is None


def fault_report(error: Exception) -> str:
    """What a user is told of an error that is neither weft's own nor the step's."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {error}. This is a fault in weft; please report it with\n{trace}"
