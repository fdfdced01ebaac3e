"""What a run of a step ends with: an exception of the step's own, an interrupt, or a reason of the capture's own."""

from __future__ import annotations

import dis
import signal
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import Any

_RAISE = dis.opmap["RAISE_VARARGS"]


class RunEnded(BaseException):
    """The capture itself ends a run of the step.

    Not an ``Exception``: the step's own ``except Exception`` must not take it for an error of its own.
    """


def may_be_of_step(error: BaseException) -> bool:
    """Whether the code of the step may have raised an exception, so that eager raises it too.

    Such a call has changed what it changes in eager. A call that a signal interrupts (Ctrl-C) is none: it ends at once,
    and changes nothing.
    """
    return not isinstance(error, RunEnded) and (isinstance(error, Exception) or not is_interrupt(error))


def is_interrupt(error: BaseException) -> bool:
    """Whether the handler of a signal has raised an exception that is no ``Exception``.

    Python's own handler of Ctrl-C is written in C: the innermost frame is at any instruction but one that raises.
    """
    if not _handlers().isdisjoint(entry.tb_frame.f_code for entry in _entries(error.__traceback__)):
        return True
    return isinstance(error, KeyboardInterrupt) and raised_by_statement(error) is None


def raised_by_statement(error: BaseException) -> str | None:
    """The file of the ``raise`` statement that raised an exception; None where code in C did, or an operation."""
    *_, innermost = None, *_entries(error.__traceback__)
    if innermost is None or innermost.tb_frame.f_code.co_code[innermost.tb_lasti] != _RAISE:
        return None
    return innermost.tb_frame.f_code.co_filename


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _handlers() -> set[CodeType]:
    """The code of the handlers of signals that are written in Python."""
    found: set[CodeType] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # of a partial function, as asyncio's
        for each in (handler, type(handler).__call__) if callable(handler) else ():
            code = getattr(getattr(each, "__func__", each), "__code__", None)
            found |= {code} if isinstance(code, CodeType) else set()
    return found
