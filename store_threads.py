"""Threads that make requests to the store, and end before the interpreter does.

A request releases Python's lock while it waits for the answer. When Python finalizes meanwhile, the thread cannot have
the lock any more: CPython before 3.14 ends it there with ``pthread_exit``, which unwinds its C++ frames. One of these
is the destructor in torch's bindings that takes the lock back. A destructor must not be unwound, so C++ ends the whole
process with SIGABRT, "terminate called without an active exception", after a run that went well. So at exit
these threads are told to come back, and waited for: until the kernel has no such thread any more, since destructors of
C++'s thread-local objects run after the last line of Python.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

# Seconds at exit that requests under way get. One takes milliseconds, or seconds where the machine is overloaded. One
# that takes longer is to a process that is stopped: it will not be answered while this process ends.
_REQUEST_S = 10.0
# The same for requests that other ranks have to answer. They may be gone, and then only a timeout ends the request.
_RANKS_S = 1.0
_LOOK_S = 0.02

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_waiting: set[int | None] = set()  # threads that wait for other ranks
_kernel_threads: deque[int] = deque(maxlen=64)  # ids of the last that were started
_ending = threading.Event()


def started(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread that runs ``run()``, which asks the store, and returns or raises soon after :func:`ending` is True."""

    def known() -> None:
        _kernel_threads.append(threading.get_native_id())
        run()

    thread = threading.Thread(target=known, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def ending() -> bool:
    """Whether the process is about to end."""
    return _ending.is_set()


@contextlib.contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Inside, this thread makes a request that ends when other ranks have made theirs."""
    thread = threading.get_ident()
    _waiting.add(thread)
    try:
        yield
    finally:
        _waiting.discard(thread)


def _finish() -> None:
    _ending.set()
    start = time.monotonic()
    while under_way := [thread.ident for thread in list(_threads) if thread.is_alive()]:
        seconds = time.monotonic() - start
        if seconds > (_RANKS_S if _waiting.issuperset(under_way) else _REQUEST_S):
            return
        time.sleep(_LOOK_S)
    start = time.monotonic()
    while any(os.path.exists(f"/proc/self/task/{thread}") for thread in _kernel_threads):  # Linux alone has these
        if time.monotonic() - start > _RANKS_S:
            return
        time.sleep(_LOOK_S)


# Handlers run in reverse order: those of the objects that have told their threads to end come first.
atexit.register(_finish)
