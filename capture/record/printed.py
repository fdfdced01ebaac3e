"""What a step prints and logs: each call of ``print`` and of a logger becomes a call that every step repeats.

While a step is captured its numbers are symbols, and its Python runs once. So calls of ``print`` and of loggers, made
by code of the user's or of libraries, are recorded as :func:`weft.opaque` records a function: they run at this point of
every step, with the numbers of that step. A message that is already text by then (an f-string) has marks in the place
of numbers (:mod:`weft.capture.record.late_text`). Where text is not only printed, logged or returned, that of a number
whose value is known is the text of the value, which is then a guard; of a tensor, or of a number that only the data
decides, it is refused. So it is with what the step prints to a stream that it made, which the capture writes to. Files
are not opened in a captured step.

What runs once in eager too is left alone: the code of a module that the step imports, and loggers that a function with
``functools.lru_cache`` calls (``logger.warning_once``).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft.capture.record.late_text import is_late, late_text, text_by
from weft.capture.record.opaque import opaque
from weft.capture.record.outside_objects import is_made_by_step
from weft.capture.record.plain_numbers import NumpyFloat, numpy_float, plain_number
from weft.capture.record.recorder import recording
from weft.capture.record.shown_gradients import Showing
from weft.capture.user_code import called_for_user, formatting_frame, in_raise_statement, is_remembered, user_line
from weft.errors import OutsideEffect, TextOfValue
from weft.source_files import is_user_file

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
TEXTS = {torch.Tensor.__repr__, torch.Tensor.__format__}
# Functions of torch's that lead from the user to the mode.
_ON_THE_WAY = {"__repr__", "__format__", "handle_torch_function", "__torch_function__"}


def text_of_tensor(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Called with each torch function, from a function mode, before it runs: what it returns instead, if anything.

    Raises:
        TextOfValue: the user's code makes text of a tensor, and may read it.
    """
    if function not in TEXTS:
        return None
    frame = sys._getframe(2)
    while frame.f_code.co_name in _ON_THE_WAY and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_filename == __file__:  # `print` to a stream that the step made
        raise TextOfValue(user_line())
    frame = formatting_frame(frame)
    if not is_user_file(frame.f_code.co_filename):
        return None
    tensor, *arguments = args
    if function is torch.Tensor.__format__ and type(tensor) is FakeTensor and tensor.dim() == 0:
        return text_of_value(frame, tensor.item(), "__format__", tuple(arguments))
    return text_of_value(frame, tensor, function.__name__, tuple(arguments))


def text_of_value(frame: types.FrameType, value: Any, method: str, arguments: tuple[Any, ...]) -> str:
    """The text of a value that the function in ``frame`` makes.

    Raises:
        TextOfValue: it may be read.
    """
    if not isinstance(value, (torch.Tensor, *_NUMBERS)):  # a number that is equal at every call
        return text_by(method, value, arguments)
    recorder = recording()
    convert = numpy_float if type(value) is NumpyFloat else None
    text = None if recorder is None else late_text(recorder, frame, value, method, arguments, convert=convert)
    if text is not None:
        return text
    plain = plain_number(value) if isinstance(value, _NUMBERS) else None
    if plain is None:
        raise TextOfValue(user_line(), in_raise=in_raise_statement())
    return text_by(method, plain, arguments)


@contextlib.contextmanager
def output_repeated(shape_env: ShapeEnv) -> Iterator[None]:
    """Inside, the capturing thread's calls of ``print`` and of loggers are recorded; other threads notice nothing.

    Args:
        shape_env: of the capture. Another thread may find a number of it in the user's state, and log it.
    """
    originals = builtins.print, logging.Logger.handle, builtins.open
    texts = [(kind, name, getattr(kind, name)) for kind in _NUMBERS for name in ("__repr__", "__str__", "__format__")]
    builtins.print = _print_through(originals[0])
    logging.Logger.handle = _handle_through(originals[1])  # type: ignore[method-assign]
    builtins.open = io.open = _open_through(originals[2])  # type: ignore[assignment]
    inherited = [name not in vars(kind) for kind, name, _ in texts]
    for kind, name, original in texts:
        setattr(kind, name, _text_through(name, original, shape_env))
    try:
        yield
    finally:
        builtins.print, logging.Logger.handle, builtins.open = originals  # type: ignore[method-assign]
        io.open = originals[2]
        for (kind, name, original), from_base in zip(texts, inherited, strict=True):
            delattr(kind, name) if from_base else setattr(kind, name, original)


def _by_user() -> bool:
    """Whether code of the user's or of a library calls, in a thread that captures, what each call of the step would."""
    return recording() is not None and called_for_user(__name__)


def _print_through(original: Callable[..., None]) -> Callable[..., None]:
    def print(*args: Any, **kwargs: Any) -> None:
        if not _by_user():
            return original(*args, **kwargs)
        if kwargs.get("file") is None:
            kwargs["file"] = sys.stdout  # the step may have redirected it, which no call does
        if is_made_by_step(kwargs["file"]):
            if is_late((*args, *kwargs.values())):
                raise TextOfValue(user_line())
            return original(*args, **kwargs)
        return _repeated(original, args, kwargs)(*args, **kwargs)

    return print


def _repeated(function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., None]:
    recorder = recording()
    own = {} if recorder is None else recorder.snapshots.places_by_id
    return opaque(Showing(function, (args, kwargs), own))


def _log(logger: logging.Logger, where: tuple[Any, ...], message: Any, args: Any) -> None:
    level, filename, line, function = where
    record = logger.makeRecord(logger.name, level, filename, line, message, args, None, function)
    logger.handle(record)


def _handle_through(original: Callable[..., None]) -> Callable[..., None]:
    def handle(self: logging.Logger, record: logging.LogRecord) -> None:
        if recording() is None or not is_user_file(record.pathname) or _speaks_once(record):
            if is_late((record.msg, record.args)):
                raise TextOfValue(user_line())
            return original(self, record)
        where = record.levelno, record.pathname, record.lineno, record.funcName
        args = record.args if isinstance(record.args, tuple) else (record.args,)
        arguments = self, where, record.msg, args
        return _repeated(_log, arguments, {})(*arguments)

    return handle


def _speaks_once(record: logging.LogRecord) -> bool:
    """Whether a cached function logs: it runs once in eager too."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != record.pathname:
        frame = frame.f_back
    if frame is None:
        return False
    return is_remembered(frame)


def _open_through(original: Callable[..., Any]) -> Callable[..., Any]:
    def open(*args: Any, **kwargs: Any) -> Any:
        if _by_user():
            raise OutsideEffect("opens a file", user_line())
        return original(*args, **kwargs)

    return open


def _text_through(name: str, original: Callable[..., str], shape_env: ShapeEnv) -> Callable[..., str]:
    @functools.wraps(original)
    def text(number: Any, *args: Any) -> str:
        if _by_user():
            return text_of_value(formatting_frame(sys._getframe(1)), number, name, args)
        if recording() is None and number.node.shape_env is shape_env and (plain := plain_number(number)) is not None:
            return text_by(name, plain, args)
        return original(number, *args)

    return text
