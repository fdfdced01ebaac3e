"""Pauses Python's cyclic garbage collector while graphs are made.

A graph has millions of objects. The collector would walk them again and again, for a third of the time that it takes
to make them, and find nothing.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator

# A pause leaves its objects in the oldest generation without being counted among those that Python goes by to collect
# that one. So the garbage of graphs that are dropped would stay; a full collection after so many pauses finds it.
_FULL_COLLECTION_AFTER = 200
# A full collection walks all objects of the process, for seconds where there are millions. It waits until all of them
# together have taken no more than this share of the processor time.
_LARGEST_SHARE = 0.03

# More objects than Python itself freezes when it starts (3.12 does, some 400), and fewer than a process with torch has.
_OWN_FROZEN = 2000 if sys.version_info[:2] == (3, 12) else 0


class _Pauses:
    """Counts the threads that pause the collector, which is one for all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._ended = 0
        self._collecting = False
        self._not_before = 0.0  # of this process's time, in seconds

    def begin(self) -> None:
        """Switch the collector off."""
        with self._lock:
            if not self._count:
                self._collecting = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> bool:
        """Whether the collector must go on now: nobody else pauses it, and it was on before."""
        with self._lock:
            self._count -= 1
            self._ended += not self._count
            return self._collecting and not self._count

    def is_full_collection_due(self) -> bool:
        """Whether so many pauses have ended that Python would have made a full collection meanwhile."""
        with self._lock:
            due = self._ended >= _FULL_COLLECTION_AFTER and time.process_time() >= self._not_before
            self._ended = 0 if due else self._ended
            return due

    def collect(self) -> None:
        """A full collection."""
        started = time.process_time()
        gc.collect()
        ended = time.process_time()
        self._not_before = ended + (ended - started) / _LARGEST_SHARE


_pauses = _Pauses()


def user_froze() -> bool:
    """Whether the user called ``gc.freeze()``: the collector's permanent generation is theirs then."""
    return gc.get_freeze_count() > _OWN_FROZEN


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """While active, no automatic collection runs.

    Objects that were created inside belong to the oldest generation afterwards. A full collection walks them; the next
    collection of young objects, which would come at once, does not.
    """
    _pauses.begin()
    try:
        yield
    finally:
        if _pauses.end():
            if not user_froze():  # their objects must stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
            if _pauses.is_full_collection_due():
                _pauses.collect()
