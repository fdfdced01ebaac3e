"""Gloo's threads let go of tensors before the interpreter ends.

A thread of gloo (``pt_gloo_runloop``) drops a finished collective, with its tensors, a moment after it has told those
who wait. Where the program has dropped them meanwhile, the thread frees tensors that Python made, and needs Python's
lock for that. If Python finalizes by then, CPython before 3.14 ends the thread there with ``pthread_exit``, which
unwinds a C++ destructor, and C++ ends the process with SIGABRT: "terminate called without an active exception", after a
run that went well. The moment is long where the thread gets no processor, on a busy machine. So at exit the process
waits until none of these threads runs or waits for a processor. Torch's own FSDP and DDP end in the same way without
this.
"""

from __future__ import annotations

import atexit
import os
import time

_NAME = "(pt_gloo_runloop)"
_LOOK_S = 0.002
# Looks in a row that must find none of them running: between two, one may get Python's lock and go on.
_LOOKS = 3
# Upper bound of the wait. A collective that other ranks never join sleeps, and is not waited for.
_MOST_S = 10.0


def _states() -> list[str]:
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
        if _NAME in text:
            found.append(text.rpartition(")")[2].split()[0])
    return found


def _finish() -> None:
    quiet, until = 0, time.monotonic() + _MOST_S
    while (states := _states()) and quiet < _LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_S)  # without Python's lock
        quiet = 0 if "R" in states else quiet + 1


atexit.register(_finish)
