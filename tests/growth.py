"""Check how the cost of an algorithm grows with the size of its input, on a machine of any speed.

A bound in seconds fails on a slow or busy machine, and says nothing on a fast one. The ratio of two runs of the same
code holds on both: a quadratic algorithm gives 16 where four times the input should give about 4.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from time import process_time

TIMES = 4
SLACK = 2.5


def assert_near_linear(run: Callable[[int], Callable[[], object]], size: int) -> None:
    """:func:`assert_growth` with a degree of 1."""
    assert_growth(run, size, 1)


def assert_growth(run: Callable[[int], Callable[[], object]], size: int, degree: int) -> None:
    """`run(n)` prepares an input of size n and returns what is measured, in CPU seconds.

    Raises AssertionError where an input of `TIMES * size` takes more than `SLACK * TIMES**degree` times as long as one
    of `size`: where the cost grows faster than a polynomial of that degree.
    """
    _seconds(run(size))  # what is imported or cached at the first call is not counted
    small, large = min(_seconds(run(size)) for _ in range(3)), math.inf
    for _ in range(3):
        large = min(large, _seconds(run(TIMES * size)))
        if large < SLACK * TIMES**degree * small:
            return  # more runs could only lower it
    raise AssertionError(f"size {size}: {small:.3f} s, {TIMES} times the size: {large:.3f} s")


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
