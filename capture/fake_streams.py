"""Streams and events of a GPU where nothing runs: all they keep is which stream is current."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Event:
    """Stands for `torch.cuda.Event`: always done, zero milliseconds from any other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *exception: object) -> None:
        set_stream(self._before.pop())

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


_default = Stream()
_current = [_default]


def default_stream(device: Any = None) -> Stream:
    return _default


def current_stream(device: Any = None) -> Stream:
    return _current[0]


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _current[0] = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Stands for `torch.cuda.stream`; does nothing for None, as that does."""
    with stream or contextlib.nullcontext():
        yield
