"""Clocks that a step reads, and sizes of GPU memory: a node reads the same clock at every call.

``time.perf_counter()`` and its relatives give a symbolic number, read at that point of the step. A clock that gives an
object (``datetime.now()``) is refused. Only reads by the user's code count: logging and torch read clocks for ends of
their own, such as the time of a log line.
"""

from __future__ import annotations

import datetime
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft.capture.record.host_draws import HostDraws
from weft.capture.user_code import called_by_user, user_line
from weft.errors import UncapturableDraw

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
CLOCKS = tuple(name + unit for name in _CLOCKS for unit in ("", "_ns"))
# How much memory of a GPU the allocator of torch uses: another number at every call, too.
MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
# These read the clock where they are not given a time, with the number of arguments that they then have.
_CONVERSIONS = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
_REMEDY = (
    "read the clock before the step and pass it as an argument, or read it in a function marked @weft.opaque; "
    "time.time() and time.perf_counter() give numbers, which each call reads anew"
)


def read_clock(name: str, *which: int) -> float | int:
    """``time.perf_counter()`` and its relatives, the target of a node; in seconds, or nanoseconds for ``*_ns``."""
    if name not in CLOCKS:
        raise ValueError(f"{name} is no clock")
    return getattr(time, name)(*which)


def read_memory(name: str, *device: Any) -> int:
    """``torch.cuda.memory_allocated()`` and its relatives, the target of a node; in bytes."""
    if name not in MEMORY:
        raise ValueError(f"{name} tells no size of memory")
    return getattr(torch.cuda, name)(*device)


def clock_replacements(draws: HostDraws) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement): what stands in for the clocks while a step is captured."""
    for owner, names, target in ((time, CLOCKS, read_clock), (torch.cuda, MEMORY, read_memory)):
        for name in names:
            if hasattr(owner, name):
                yield owner, name, _clock(getattr(owner, name), f"{owner.__name__}.{name}", target, draws)
    for name, arguments in _CONVERSIONS.items():
        yield time, name, _conversion(getattr(time, name), name, arguments, draws)
    yield datetime, "datetime", _dated(datetime.datetime, ("now", "utcnow", "today"), draws)
    yield datetime, "date", _dated(datetime.date, ("today",), draws)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy, "datetime64", _moments(numpy.datetime64, draws)


def _clock(original: Callable[..., Any], text: str, target: Callable[..., Any], draws: HostDraws) -> Any:
    name = text.split(".")[-1]

    @functools.wraps(original)
    def read(*which: Any, **named: Any) -> Any:
        if not (draws.intercepts() and called_by_user()):
            return original(*which, **named)
        kind = int if name.endswith("_ns") or target is read_memory else float
        return draws.record(target, (name, *which, *named.values()), {}, draws.fresh(kind, text))

    return read


def _conversion(original: Callable[..., Any], name: str, arguments: int, draws: HostDraws) -> Any:
    @functools.wraps(original)
    def convert(*args: Any) -> Any:
        if len(args) <= arguments and draws.intercepts() and called_by_user():
            raise UncapturableDraw(f"time.{name}", user_line(), "it reads the clock once, in the capture", _REMEDY)
        return original(*args)

    return convert


def _moments(kind: Any, draws: HostDraws) -> Any:
    """A class that is ``numpy.datetime64`` in every respect but that it refuses the present for the user's code."""

    class Like(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kind)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, kind)

        def __call__(cls, *args: Any) -> Any:
            if args and args[0] in ("now", "today") and draws.intercepts() and called_by_user():
                what = f"numpy.datetime64({args[0]!r})"
                raise UncapturableDraw(what, user_line(), "it reads the clock once, in the capture", _REMEDY)
            return kind(*args)

    return Like(kind.__name__, (kind,), {})  # numpy takes it for the dtype that ``kind`` stands for


def _dated(kind: Any, readers: tuple[str, ...], draws: HostDraws) -> Any:
    """A class that is ``kind`` in every respect but that it refuses to read the clock for the user's code."""

    class Like(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kind)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, kind)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

        def __getattribute__(cls, name: str) -> Any:
            value = getattr(kind, name)
            if name not in readers:
                return value

            @functools.wraps(value)
            def read(*args: Any, **kwargs: Any) -> Any:
                if draws.intercepts() and called_by_user():
                    what = f"{kind.__name__}.{name}"
                    raise UncapturableDraw(what, user_line(), "it reads the clock once, in the capture", _REMEDY)
                return value(*args, **kwargs)

            return read

    return Like(kind.__name__, (), {})
