"""Communication streams: CUDA streams beside the compute stream. Collectives of one stream run in issue order, one
after the other; those of different streams overlap."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


class CommStream:
    """A communication stream of one device. On the CPU there is no concurrency: what is launched has completed when the
    launch returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        # The event of the last launch, until the compute stream waits for it.
        self._last_event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # High priority: a collective that waits for SMs behind computation delays all peers, not only this rank.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._ready = torch.cuda.Event()

    def event(self) -> torch.cuda.Event | None:
        """An event that marks the end of a collective; None on the CPU. It may be recorded any number of times."""
        return None if self._stream is None else torch.cuda.Event()

    @contextlib.contextmanager
    def fork(self, done: torch.cuda.Event | None) -> Iterator[int]:
        """Fork: what is launched inside runs on this stream, after everything issued to the compute stream so far.
        ``done`` is recorded behind it.

        Yields the address of this stream (0 on the CPU), which is torch's current stream inside.
        """
        if self._stream is None or done is None:
            yield 0
            return
        # One event serves all forks: a wait refers to what was recorded when it was issued, so recording again later
        # does not move it.
        self._ready.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(self._ready)
        # torch operations inside (copies into the arena) must go to this stream as well.
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream
        done.record(self._stream)
        # An event recorded during capture belongs to the graph; waiting for it outside of the graph is an error.
        if not torch.cuda.is_current_stream_capturing():
            self._last_event = done

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Block the compute stream until ``done`` has completed."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
            # Streams are FIFOs: behind the last launch everything before it has ended, too. Other events leave the last
            # one pending.
            self._last_event = None if done is self._last_event else self._last_event

    def join(self) -> None:
        """Block the compute stream until everything launched on this stream has completed. A CUDA graph needs that
        before its replay: its collectives follow the compute stream only, and would overlap with earlier ones of this
        stream."""
        self.wait(self._last_event)


# Cached, so that a prediction's stream (`peer_stream`) and all programs of the process mean one CUDA stream by a name.
@functools.cache
def comm_stream(device: torch.device, name: str) -> CommStream:
    """The communication stream of that name on a device; the same object for every call."""
    return CommStream(device)
