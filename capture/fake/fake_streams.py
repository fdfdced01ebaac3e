"""CUDA streams and events of a fake world, where nothing runs.

They keep only which stream is current, so that the capture can record on which stream each operation was issued.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Event:
    """Replaces `torch.cuda.Event`: always complete, zero milliseconds from any other event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        """Do nothing."""

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """True: all work is complete."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """0.0 ms."""
        return 0.0


class Stream:
    """Replaces `torch.cuda.Stream`; a context manager that makes itself current."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *exception: object) -> None:
        set_stream(self._before.pop())

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing."""

    def wait_event(self, event: Event) -> None:
        """Do nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return ``event``, or a new one."""
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """True: all work is complete."""
        return True

    def is_capturing(self) -> bool:
        """False: there are no CUDA graphs here."""
        return False


_default = Stream()
_current = [_default]


def default_stream(device: Any = None) -> Stream:
    """Replaces `torch.cuda.default_stream`."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """Replaces `torch.cuda.current_stream`."""
    return _current[0]


def set_stream(stream: Stream | None) -> None:
    """Replaces `torch.cuda.set_stream`; does nothing for None, as that does."""
    if stream is not None:
        _current[0] = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Replaces `torch.cuda.stream`; does nothing for None, as that does."""
    with stream or contextlib.nullcontext():
        yield
