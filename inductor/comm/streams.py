"""Streams beside the compute stream, one a lane: what a lane carries runs one after the other, in order of issue."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


class Lane:
    """Carries collectives on one device. On the CPU nothing runs beside anything: what starts has ended at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._open: torch.cuda.Event | None = None  # the end of what was started last, until somebody waits for it
        if device.type == "cuda":
            # Before computation that is waiting too: peers wait for what is carried here.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._ready = torch.cuda.Event()

    def event(self) -> torch.cuda.Event | None:
        """An event to tell the end of something by; it may be used again and again."""
        return None if self._stream is None else torch.cuda.Event()

    @contextlib.contextmanager
    def carry(self, done: torch.cuda.Event | None) -> Iterator[int]:
        """What is started inside begins when the compute stream has done all that was issued to it so far, and tells
        its end by ``done``.

        Yields the address of the lane's stream, which is torch's current one inside.
        """
        if self._stream is None or done is None:
            yield 0
            return
        self._ready.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream
        done.record(self._stream)
        if not torch.cuda.is_current_stream_capturing():
            self._open = done

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Hold the compute stream until what tells its end by ``done`` has ended."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
            self._open = None if done is self._open else self._open

    def settle(self) -> None:
        """Hold the compute stream until all that is carried has ended. A CUDA graph needs that before its replay: what
        it carries on this lane was recorded to follow the compute stream, and would run beside the rest."""
        self.wait(self._open)


@functools.cache
def lane(device: torch.device, name: str) -> Lane:
    """The lane of that name on a device."""
    return Lane(device)
