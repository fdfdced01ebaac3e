"""Short tracebacks of errors that public functions and compiled steps raise.

A traceback through a capture has fifty frames of torch and of weft between the user's line and the error, that of a
mistake in an argument two or three. What the user can act on is their own lines and the message.
``WEFT_FULL_TRACEBACK=1`` keeps all frames.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from weft import knobs
from weft.errors import CannotCapture, InternalFault, TextOfValue, WeftError
from weft.source_files import is_user_file, is_weft_file

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
E = TypeVar("E", bound=BaseException)

_PUBLIC = ("__init__", "__copy__", "__deepcopy__", "__reduce_ex__")  # of the names with underscores

# Torch logs the traceback of an operation that refuses its arguments, and then raises. The error alone says it.
_FAKES = logging.getLogger("torch._subclasses.fake_tensor")


def shorten_traceback(error: BaseException) -> None:
    """Leave the frames of user code alone in the traceback of ``error``, those of installed packages included.

    The errors that it came from are shortened likewise. Faults of weft's own keep all frames.
    """
    if knobs.full_traceback or _is_fault(error):
        return
    without_machinery(error)


def without_machinery(error: BaseException) -> None:
    """Leave the frames of user code alone in the tracebacks of ``error`` and of the errors that it came from."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = _users(seen.__traceback__)
        seen.__suppress_context__ = seen.__suppress_context__ or isinstance(seen, WeftError)
        seen.__context__ = _context(seen)
        if isinstance(seen, CannotCapture):
            seen.__cause__ = None  # what torch raised says how to debug its own tracer
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def _context(error: BaseException) -> BaseException | None:
    """What was being handled when ``error`` was raised, without what weft and torch handled for themselves."""
    context = error.__context__
    while context is not None and _users(context.__traceback__) is None:
        context = context.__context__
    return context


def shortens_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, the errors of which have short tracebacks. Every public function is one."""

    @functools.wraps(function)
    def short(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # a step may raise SystemExit
            mark_refused_call(error)
            shorten_traceback(error)
            raise

    return short


def methods_shorten_tracebacks(cls: type[C]) -> type[C]:
    """``cls``, after each of its own public methods, and what makes and copies its objects, was made to shorten
    tracebacks."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType) and (name in _PUBLIC or not name.startswith("_")):
            setattr(cls, name, shortens_tracebacks(value))
    return cls


class ShortEntry(AbstractContextManager[R], contextlib.ContextDecorator):
    """A context manager, made anew at each entry, the errors of which have short tracebacks."""

    def __init__(self, make: Callable[[], AbstractContextManager[R]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[R]] = []

    @shortens_tracebacks
    def __enter__(self) -> R:
        inside = self._make()
        value = inside.__enter__()
        self._entered.append(inside)
        return value

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def short_context(function: Callable[P, AbstractContextManager[R]]) -> Callable[P, ShortEntry[R]]:
    """As :func:`shortens_tracebacks`, for a function that returns a context manager."""

    @functools.wraps(function)
    def short(*args: P.args, **kwargs: P.kwargs) -> ShortEntry[R]:
        return ShortEntry(functools.partial(function, *args, **kwargs))

    return short


_USERS = "_weft_users_mistake"


def users_mistake(error: E) -> E:
    """``error``, which weft raises in Python's place: a tensor has no such attribute, an array is no index. Its
    innermost frame is weft's, and the mistake is the user's."""
    setattr(error, _USERS, True)
    return error


def mark_refused_call(error: BaseException) -> None:
    """Call this where ``error`` was caught, in the frame that made a call for the user.

    Where the call itself was refused, for its arguments or by a function in C, no frame of what was called is in the
    traceback. The innermost one is weft's, and the mistake is the user's all the same.
    """
    if error.__traceback__ is not None and error.__traceback__.tb_next is None:
        users_mistake(error)


def called_for_user(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What a function in C returns that the user called by a name that weft replaced: ``math.sqrt(-1)`` is refused."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        mark_refused_call(error)
        raise


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


_STEPS_OWN = "_weft_raised_by_step"


def mark_if_steps_own(error: BaseException) -> None:
    """Mark an error of a capture that the step itself raises, or what it calls: its traceback leads through the user's
    code, or a call of theirs was refused. Eager raises it too, unless the capture itself gave rise to it."""
    in_raise = isinstance(error, TextOfValue) and error.in_raise  # for the message of an exception
    if in_raise or (not isinstance(error, WeftError) and not _is_fault(error) and _users(error.__traceback__)):
        setattr(error, _STEPS_OWN, True)


def is_steps_own(error: BaseException) -> bool:
    """Whether :func:`mark_if_steps_own` has marked an error."""
    return getattr(error, _STEPS_OWN, False)


def _is_fault(error: BaseException) -> bool:
    """Whether an error is a fault of weft's own."""
    of_weft = not isinstance(error, WeftError) and _is_of_weft(error.__traceback__)
    return (isinstance(error, InternalFault) or of_weft) and not getattr(error, _USERS, False)


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


def fault_report(error: BaseException) -> str:
    """What a user is told of an error that is neither weft's own nor the step's."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {error}. This is a fault in weft; please report it with\n{trace}"
