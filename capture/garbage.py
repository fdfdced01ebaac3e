"""Python's cyclic garbage collector, out of the way while graphs are made: it would walk their millions of objects
again and again, for a third of the time that making them takes, and find nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """No automatic collections inside. What was made inside counts as old afterwards: a full collection finds it, and
    those of young objects, one of which would else come at once, do not walk it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # what the user froze stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
