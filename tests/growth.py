"""Check that the cost of an algorithm is near linear in the size of its input, on a machine of any speed.

A bound in seconds fails on a slow or busy machine, and says nothing on a fast one. The ratio of two runs of the same
code holds on both: a quadratic algorithm gives 16 where four times the input should give about 4.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import process_time

TIMES = 4
SLACK = 2.5


def assert_near_linear(run: Callable[[int], Callable[[], object]], size: int) -> None:
    """`run(n)` prepares an input of size n and returns what is measured, in CPU seconds.

    Raises AssertionError where `TIMES * size` takes more than `SLACK * TIMES` times as long as `size`.
    """
    _seconds(run(size))  # what is imported or cached at the first call is not counted
    small = min(_seconds(run(size)) for _ in range(3))
    large = _seconds(run(TIMES * size))
    assert large < SLACK * TIMES * small, f"size {size}: {small:.3f} s, {TIMES} times the size: {large:.3f} s"


def _seconds(measured: Callable[[], object]) -> float:
    """Without collections of garbage: their cost grows with everything that other tests have left alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        started = process_time()
        measured()
        return process_time() - started
    finally:
        if was_enabled:
            gc.enable()
