"""Threads that are waited for before the interpreter ends: weft's own that ask the store, and gloo's.

Such a thread has released Python's lock and will take it back: a request to the store when the answer is there; a
thread of gloo (``pt_gloo_runloop``) when it drops a finished collective with tensors that Python made, a moment after
it has told those who wait. If Python finalizes by then, CPython before 3.14 ends the thread with ``pthread_exit``,
which unwinds its C++ frames. One of these is a destructor in torch's bindings. A destructor must not be unwound, so C++
ends the whole process with SIGABRT, "terminate called without an active exception", after a run that went well. The
moment is long where the thread gets no processor, on a busy machine. Torch's own FSDP and DDP end in the same way
without this.

At exit weft's threads are told to come back, and waited for until the kernel has no such thread any more, since
destructors of C++'s thread-local objects run after the last line of Python. Threads of gloo stay: they are waited for
until none of them runs or waits for a processor.
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

_GLOO = "(pt_gloo_runloop)"
_GLOO_LOOK_S = 0.002
# Looks in a row that must find none of gloo's threads running: between two, one may get Python's lock and go on.
_GLOO_LOOKS = 3
# Upper bound of the wait for gloo. A collective that other ranks never join sleeps, and is not waited for.
_GLOO_S = 10.0

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
    if _wait(lambda: not _under_way(), lambda: _RANKS_S if _waiting.issuperset(_under_way()) else _REQUEST_S, _LOOK_S):
        _wait(_own_are_gone, lambda: _RANKS_S, _LOOK_S)
    quiet = 0

    def gloo_is_quiet() -> bool:
        nonlocal quiet
        states = _gloo_states()
        quiet = 0 if "R" in states else quiet + 1
        return not states or quiet >= _GLOO_LOOKS

    _wait(gloo_is_quiet, lambda: _GLOO_S, _GLOO_LOOK_S)


def _wait(done: Callable[[], bool], most_s: Callable[[], float], look_s: float) -> bool:
    """Whether ``done()`` comes true in time. Python's lock is free in between."""
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > most_s():
            return False
        time.sleep(look_s)
    return True


def _under_way() -> list[int | None]:
    """Weft's threads that run Python."""
    return [thread.ident for thread in list(_threads) if thread.is_alive()]


def _own_are_gone() -> bool:
    return not any(os.path.exists(f"/proc/self/task/{thread}") for thread in _kernel_threads)  # Linux alone has these


def _gloo_states() -> list[str]:
    """The scheduler's state of each of gloo's threads (``R``: runs or waits for a processor); none but on Linux."""
    found = []
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return []
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/stat") as file:
                text = file.read()
        except OSError:  # it has ended
            continue
        if _GLOO in text:
            found.append(text.rpartition(")")[2].split()[0])
    return found


# Handlers run in reverse order: those of the objects that have told their threads to end come first.
atexit.register(_finish)
