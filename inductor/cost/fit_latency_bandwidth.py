"""Fit a latency and a bandwidth to measured times of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """``seconds(size) = latency + size / bandwidth``, in seconds, bytes and bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Predicted seconds for ``size`` bytes."""
        return self.latency + size / self.bandwidth

    def worst(self, points: Sequence[tuple[float, float]]) -> float:
        """The largest relative error over ``points``, pairs of bytes and seconds."""
        return max(abs(self.seconds(size) / seconds - 1) for size, seconds in points)


# If times do not grow with the size, the fraction of the longest time that the bandwidth accounts for. A choice.
_UNSEEN = 0.01


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """Least-squares fit to points (bytes, seconds) by *relative* errors, so that small sizes count as much as large
    ones.

    The latency is not negative. If times do not grow with the size, the bandwidth is only known to be high: the
    largest size then spends the fraction ``_UNSEEN`` of its time on it.

    Raises:
        ValueError: fewer than two different sizes.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError("a line needs the times of two sizes")
    # Minimise sum((a + b x) / t - 1)^2: a linear system in a and b, with weights 1 / t^2.
    weighted = [(seconds**-2, size, seconds) for size, seconds in points]
    one = sum(w for w, _, _ in weighted)
    x = sum(w * size for w, size, _ in weighted)
    xx = sum(w * size * size for w, size, _ in weighted)
    t = sum(w * seconds for w, _, seconds in weighted)
    xt = sum(w * size * seconds for w, size, seconds in weighted)
    slope = (one * xt - x * t) / (one * xx - x * x)
    latency = (t - slope * x) / one
    # The best line through the origin.
    if latency < 0:
        slope, latency = xt / xx, 0.0
    largest, longest = max(points)
    least = _UNSEEN * longest / largest
    if slope < least:
        slope = least
        latency = (t - slope * x) / one
    return Line(latency, 1 / slope)
