"""Which threads may be inside compiled steps at the same time.

A capture puts fake values into the user's own objects (gradients, optimizer state, learning rates) and takes them out
again. Meanwhile no other thread may run a compiled step, whose guards and program read those objects:

- any number of threads may be :func:`in_step`, where they check guards and run programs;
- one thread may be :func:`capturing`, while no other is in a step.

A capture waits for the steps that run. Steps that start meanwhile wait for the capture, but not where there are other
ranks: then a step that runs may wait for another thread of another rank, which must be able to start. A capture itself
waits for nobody, so no thread ever waits for ever. A thread that is in a step, and first calls another one inside it
(from an opaque function), counts as being in no step until that call runs.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from weft import torch_adapter

log = logging.getLogger(__name__)

# Seconds after which a thread that still waits says so.
PATIENCE_S = 60.0


class ThreadInSteps:
    """What one thread is doing.

    Attributes:
        depth: number of compiled steps that it is in, one inside the other.
        capturing: number of captures that it is in, one inside the other.
    """

    __slots__ = ("__weakref__", "capturing", "depth")

    def __init__(self) -> None:
        self.depth = 0
        self.capturing = 0


class _RecordOfThread(threading.local):
    """The record of the running thread."""

    def __init__(self) -> None:
        self.record = ThreadInSteps()
        with _all.lock:
            _all.records.add(self.record)


class _Threads:
    """What all threads are doing.

    Attributes:
        lock: held to change anything here; ``changed``: to wait for it.
        records: one for each thread that was ever in a step and lives.
        closed: number of threads that capture or wait to: no step may begin where it is not 0.
        capturing: name of the thread that captures, or None.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.records: weakref.WeakSet[ThreadInSteps] = weakref.WeakSet()
        self.closed = 0
        self.capturing: str | None = None

    def busy(self) -> bool:
        """Whether a thread captures or is in a step."""
        return self.capturing is not None or any(each.depth and not each.capturing for each in self.records)


_all = _Threads()
_mine = _RecordOfThread()


def inside_step() -> bool:
    """Whether this thread is running a compiled step."""
    return _mine.record.depth > 0


def in_capture() -> bool:
    """Whether this thread captures a step."""
    return _mine.record.capturing > 0


def enter_step() -> ThreadInSteps:
    """Begin to be in a step; waits while another thread captures. Returns what :func:`leave_step` must be given."""
    record = _mine.record
    # No lock: this thread first says that it is in a step and then looks at `closed`; a capture does the reverse. One
    # of them sees the other.
    record.depth += 1
    if _all.closed and record.depth == 1 and not record.capturing:
        record.depth = 0
        with _all.lock:
            _all.changed.notify_all()
            _enter(record, 1)
    return record


def leave_step(record: ThreadInSteps) -> None:
    """End what :func:`enter_step` began."""
    record.depth -= 1
    if _all.closed:
        with _all.lock:
            _all.changed.notify_all()


@contextmanager
def in_step() -> Iterator[None]:
    """Inside, no other thread captures."""
    record = enter_step()
    try:
        yield
    finally:
        leave_step(record)


@contextmanager
def out_of_step() -> Iterator[None]:
    """Inside, this thread counts as being in no step; it must not touch the user's objects."""
    record = _mine.record
    depth = record.depth
    if not depth or record.capturing:
        yield
        return
    record.depth = 1
    leave_step(record)
    try:
        yield
    finally:
        with _all.lock:
            _enter(record, depth, alone=False)  # what waits to begin may wait for the step that goes on here


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, no other thread is in a step or captures. A capture inside a capture of the same thread is let in."""
    record = _mine.record
    if record.capturing:
        record.capturing += 1
        try:
            yield
        finally:
            record.capturing -= 1
        return
    with out_of_step(), _closed():
        with _all.lock:
            while _all.busy():
                _wait(f"the capture in {_all.capturing}" if _all.capturing else "threads that run compiled steps")
            _all.capturing = threading.current_thread().name
        record.capturing = 1
        try:
            yield
        finally:
            record.capturing = 0
            with _all.lock:
                _all.capturing = None
                _all.changed.notify_all()


@contextmanager
def _closed() -> Iterator[None]:
    with _all.lock:
        _all.closed += 1
    try:
        yield
    finally:
        with _all.lock:
            _all.closed -= 1
            _all.changed.notify_all()


def _enter(record: ThreadInSteps, depth: int, alone: bool | None = None) -> None:
    """Be in a step as soon as no thread captures and, where this process is ``alone`` in its world, none waits to."""
    if alone is None:
        alone = torch_adapter.world_size() == 1
    while _all.capturing is not None or (alone and _all.closed):
        _wait(f"a capture in thread {_all.capturing}" if _all.capturing else "a capture that waits to begin")
    record.depth = depth


def _wait(what: str) -> None:
    if not _all.changed.wait(PATIENCE_S):
        log.warning("thread %s has waited %d s for %s", threading.current_thread().name, PATIENCE_S, what)


def _after_fork() -> None:
    """In a forked process there is one thread; what the others were doing is not done there."""
    record = _mine.record
    _all.__init__()  # type: ignore[misc]
    _all.records.add(record)
    if record.capturing:
        _all.closed, _all.capturing = 1, threading.current_thread().name


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
