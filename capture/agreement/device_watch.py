"""A rank whose GPU waits for a process that is gone ends in seconds, with an error that names both.

The host issues the collectives of a step to the GPU and goes on. It waits later, for a value, inside of the driver,
where no Python runs. NCCL ends such a wait after the timeout of the process group (10 minutes), a transfer kernel after
WEFT_PEER_TIMEOUT_S. So each compiled call has the GPU write its number to the host's memory at its end, and the thread
of :mod:`weft.rank_watch` compares it with the number of the last call. While the GPU is behind, the thread reads the
states of the other ranks. A rank that is merely slow is waited for.

Where a rank is gone, the thread ends what the GPU waits for. What the GPU computes from then on is wrong, so the main
thread must not see it: an exception is pending in it before the wait ends. A main thread that does not come back to
Python ends with its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from weft import torch_adapter
from weft.capture.agreement import collective_ring
from weft.cuda_driver import Driver
from weft.errors import CollectiveFailed
from weft.rank_watch import RankWait, RankWatch

# Seconds for which the GPU may be behind before other ranks are asked. A longer step costs a few reads of the store.
BEHIND_S = 2.0
# Seconds that the main thread gets to come back to Python with the error, before its process is ended.
RETURN_S = 10.0
# Seconds to find out which collective the GPU waits for. What is asked may itself wait for the GPU.
_FIND_S = 2.0


class InterruptibleWait(Protocol):
    """Memory that ranks share, at whose barriers kernels wait."""

    def end_waiting(self) -> str:
        """Have kernels that wait go on. Returns the collective that one waited for, in a second; "" for none."""
        ...


class ProgramLines(Protocol):
    """A program that issues collectives."""

    def collective_at(self, line: int) -> tuple[str, list[str]]:
        """The operation that a line of the text issues, counted from 1, and the user's lines that it came from."""
        ...


shared_memory: weakref.WeakSet[InterruptibleWait] = weakref.WeakSet()
programs: weakref.WeakValueDictionary[str, ProgramLines] = weakref.WeakValueDictionary()  # by name of the text


class DeviceProgress:
    """How far the GPU of this rank is with the compiled calls of its host.

    Attributes:
        issued: the number of the last call.
    """

    def __init__(self, driver: Driver) -> None:
        self.issued = 0
        # The GPU writes to pinned memory. The thread that reads it makes no call of the driver, which could wait.
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self._done = ctypes.c_int32.from_address(self._word.data_ptr())
        self._begun: deque[tuple[int, int]] = deque(maxlen=256)
        self._driver = driver

    def begin(self) -> None:
        """A call begins."""
        self._begun.append((self.issued + 1, time.time_ns()))

    def end(self) -> None:
        """All of the call has been issued to the current stream, or to streams that it waits for. Raises CudaError."""
        if torch.cuda.is_current_stream_capturing():
            return  # into a graph of the user's, whose replays are no calls
        self.issued += 1
        self._driver.write_word(torch.cuda.current_stream().cuda_stream, self._word.data_ptr(), self.issued)

    @property
    def done(self) -> int:
        """The number of the last call that the GPU has ended."""
        return self._done.value

    def oldest_begun_ns(self) -> int:
        """When the first call began that the GPU has not ended, in ns since 1970."""
        done = self.done
        return next((begun for number, begun in list(self._begun) if number > done), 0)


class DeviceWatch:
    """Finds out, in the thread of a RankWatch, that the GPU waits for a rank that is gone, and ends the wait.

    Args:
        progress: of this rank's GPU.
        broken: called with the error before the main thread gets it.
    """

    def __init__(
        self, watch: RankWatch, progress: DeviceProgress, broken: Callable[[CollectiveFailed], object]
    ) -> None:
        self._watch, self._progress, self._broken = watch, progress, broken
        self._behind_since = (0, time.monotonic())  # the last call that had ended, and since when
        self._wait: RankWait | None = None
        self._ended = False

    def look(self) -> None:
        """Look once. Ends the wait of the GPU where it cannot end otherwise."""
        if self._ended:
            return
        done, now = self._progress.done, time.monotonic()
        if done >= self._progress.issued or done != self._behind_since[0]:
            self._behind_since, self._wait = (done, now), None
            return
        if now - self._behind_since[1] < BEHIND_S:
            return
        if self._wait is None:
            self._wait = self._watch.wait_for(range(self._watch.world))
        self._watch.read(self._wait)
        if self._wait.why:
            self._ended = True
            self._end(self._wait.why)

    def _end(self, why: str) -> None:
        raised = raise_in_main_thread(error := _PendingError())
        # A kernel that waits says where only when it goes on.
        places = [place for memory in list(shared_memory) if (place := memory.end_waiting())]
        operation, stack = (places[0], []) if places else _over_nccl(self._progress.oldest_begun_ns())
        failed = CollectiveFailed(operation, stack, why)
        collective_ring.write(self._watch.rank, str(failed))
        self._broken(failed)
        with contextlib.suppress(Exception):  # the store may be gone with the rank; the main thread waits for the text
            self._watch.write()
        error.complete(failed)
        # It calls the driver, which may wait for what the main thread does there.
        threading.Thread(target=_abort, name="weft abort", daemon=True).start()
        if not raised.wait(RETURN_S):
            sys.stderr.write(f"{type(failed).__name__}: {failed}\nThe main thread did not come back to Python:\n")
            faulthandler.dump_traceback(sys.stderr)
            os._exit(1)


class _PendingError:
    """An error that the main thread gets, and whose text is found while that thread is already on its way."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._error: CollectiveFailed | None = None

    def complete(self, error: CollectiveFailed) -> None:
        self._error = error
        self._known.set()

    def text(self) -> str:
        self._known.wait()
        return str(self._error)


def _over_nccl(since_ns: int) -> tuple[str, list[str]]:
    """The oldest unfinished collective over NCCL, and the user's lines that it came from."""
    found: queue.SimpleQueue[list[torch_adapter.UnfinishedCollective]] = queue.SimpleQueue()
    ask = lambda: found.put(torch_adapter.unfinished_collectives(since_ns))
    threading.Thread(target=ask, name="weft flight recorder", daemon=True).start()
    with contextlib.suppress(queue.Empty):
        for collective in found.get(timeout=_FIND_S):
            for file, line in collective.lines:
                if (program := programs.get(file)) is not None:
                    return program.collective_at(line)
            return f"{collective.operation} over {collective.group}", []
    return "a collective of a replayed CUDA graph", []


def raise_in_main_thread(error: _PendingError) -> threading.Event:
    """Raise CollectiveFailed in the main thread as soon as it runs Python. Returns an event that is set then."""
    raised = threading.Event()

    # Python takes a class here, and calls it with no arguments.
    def make(self: CollectiveFailed) -> None:
        raised.set()
        RuntimeError.__init__(self, error.text())

    names = {"__init__": make, "__module__": CollectiveFailed.__module__, "__qualname__": CollectiveFailed.__qualname__}
    kind = type(CollectiveFailed.__name__, (CollectiveFailed,), names)
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(kind))
    return raised


def _abort() -> None:
    with contextlib.suppress(RuntimeError):  # NCCL says what it met
        torch_adapter.abort_process_groups()
