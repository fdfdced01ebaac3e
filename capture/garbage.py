"""Python's cyclic garbage collector, out of the way while graphs are made: it would walk their millions of objects
again and again, for a third of the time that making them takes, and find nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """No automatic collections inside."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
