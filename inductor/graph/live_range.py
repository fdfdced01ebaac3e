"""Live intervals: bytes that are live over a range of positions of a program, and their sum at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# CUDA's caching allocator hands out multiples of this (bytes).
BLOCK = 512


@dataclass(eq=False)
class LiveInterval:
    """``size`` bytes that are live from position ``start`` to position ``end`` of the nodes, both included."""

    size: int
    start: int
    end: int


def bytes_over_time(intervals: Sequence[LiveInterval], length: int) -> list[int]:
    """Live bytes at each of ``length`` positions, in time linear in intervals and positions."""
    change = [0] * (length + 1)
    for interval in intervals:
        change[interval.start] += interval.size
        # Both ends are included: an operation's operands and its result are live together.
        change[interval.end + 1] -= interval.size
    total, over_time = 0, []
    for delta in change[:length]:
        total += delta
        over_time.append(total)
    return over_time


def peak_bytes(intervals: Sequence[LiveInterval]) -> int:
    """Most bytes that are live at one position; 0 without intervals."""
    return max(bytes_over_time(intervals, max((interval.end for interval in intervals), default=0) + 1))
