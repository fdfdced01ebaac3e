"""The commands for long runs find what they look for: schedules that are too slow, and memory that grows."""

from __future__ import annotations

import memory_growth
import pytest
import schedule_search
from memory_growth import Memory

from weft.inductor.cost.task_graph import TaskGraph


def ratios(first: int, count: int) -> list[tuple[int, float]]:
    return [(seed, schedule_search.ratio_to_best(seed)) for seed in range(first, first + count)]


def test_schedules_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule_search.search(ratios(0, 40), every=20) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["20 problems", "40 problems"] + [
        "40 problems"
    ]


def test_a_slow_schedule_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The order of the graph itself hides little communication."""

    def own_order(task_graph: TaskGraph) -> list[int]:
        return list(range(len(task_graph.tasks)))

    monkeypatch.setattr(schedule_search, "search_order", own_order)
    found = ratios(0, 40)
    slow = [seed for seed, ratio in found if ratio > 1.25]
    assert slow
    assert schedule_search.search(found) == len(slow)
    assert all(f"times the best: seed {seed}" in capsys.readouterr().out for seed in slow[:1])


def test_memory_that_is_kept_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    before = memory_growth.held()
    assert not memory_growth.held().grew_from(before)
    kept = bytearray(b"1" * (32 << 20))
    assert memory_growth.held().grew_from(before)
    del kept
    assert not memory_growth.held().grew_from(before)
    many = [[] for _ in range(200_000)]
    assert memory_growth.held().grew_from(before)
    assert len(many) == 200_000
    flat, grown = Memory(100.0, 1000), Memory(120.0, 1000)
    assert not memory_growth.report("steps", [(1, flat), (2, flat)])
    assert memory_growth.report("steps", [(1, flat), (2, grown)])
    assert "memory GREW" in capsys.readouterr().out
