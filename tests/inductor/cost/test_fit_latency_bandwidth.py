"""The fit of a latency and a bandwidth: synthetic times, noise, and numpy's least squares."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.inductor.cost.fit_latency_bandwidth import Line, fit

SIZES = [2.0**power for power in (16, 20, 23, 26, 29)]


@given(st.floats(1e-7, 1e-2), st.floats(1e8, 1e12))
def test_exact_times_give_the_line_back(latency: float, bandwidth: float) -> None:
    line = fit([(size, latency + size / bandwidth) for size in SIZES])
    assert line.seconds(SIZES[0]) == pytest.approx(latency + SIZES[0] / bandwidth, rel=1e-6)
    assert line.seconds(SIZES[-1]) == pytest.approx(latency + SIZES[-1] / bandwidth, rel=1e-6)
    if latency * bandwidth > 1e3 and SIZES[-1] / bandwidth > 0.1 * latency:  # both can be seen
        assert line.latency == pytest.approx(latency, rel=1e-3)
        assert line.bandwidth == pytest.approx(bandwidth, rel=1e-3)


def test_noise_of_a_tenth_moves_the_line_by_less() -> None:
    draw = random.Random(0)
    for _ in range(50):
        points = [(size, (40e-6 + size / 340e9) * draw.uniform(0.9, 1.1)) for size in SIZES for _ in range(3)]
        line = fit(points)
        assert line.latency == pytest.approx(40e-6, rel=0.1)
        assert line.bandwidth == pytest.approx(340e9, rel=0.1)
        assert line.worst(points) < 0.25


def test_it_is_the_least_sum_of_squared_relative_errors() -> None:
    draw = random.Random(1)
    points = [(size, (50e-6 + size / 100e9) * draw.uniform(0.7, 1.3)) for size in SIZES]
    sizes, seconds = (np.array(column) for column in zip(*points, strict=True))
    design = np.stack([1 / seconds, sizes / seconds], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)
    line = fit(points)
    assert line.latency == pytest.approx(latency, rel=1e-6)
    assert 1 / line.bandwidth == pytest.approx(slope, rel=1e-6)


def test_a_latency_is_not_negative() -> None:
    line = fit([(1e6, 1e-6), (1e9, 2e-3)])  # grows faster than the size
    assert line.latency == 0
    assert 0.5e12 < line.bandwidth < 1e12


@pytest.mark.parametrize("seconds", [[1e-4, 1e-4, 1e-4], [1e-4, 0.9e-4, 0.8e-4]])
def test_times_that_do_not_grow_are_latency(seconds: list[float]) -> None:
    points = list(zip([1e3, 1e4, 1e5], seconds, strict=True))
    line = fit(points)
    assert line.bandwidth == pytest.approx(100 * 1e5 / seconds[-1])
    assert line.worst(points) < 0.2


def test_the_worst_error() -> None:
    assert Line(1.0, 10.0).worst([(10, 2.0), (20, 4.0), (0, 0.5)]) == pytest.approx(1.0)


def test_one_size_is_too_few() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit([(1e6, 1e-3), (1e6, 2e-3)])
