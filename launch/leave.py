"""The end of a process without a look through its objects.

Python destroys all objects of a process when it ends. After a capture or a training there are millions of them, which
takes a second or several, and process groups are destroyed whose ranks may be gone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading


def status_of(error: SystemExit) -> int:
    """The status with which Python ends for ``error``, whose text, if it has one, is printed as Python does."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def leave(status: int) -> None:
    """End the process as Python does, but for what becomes of its objects. Does not return.

    Threads that are no daemons are waited for, exit functions run, and what was printed is written.
    """
    try:
        vars(threading)["_shutdown"]()  # also ends executors
        vars(atexit)["_run_exitfuncs"]()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)
