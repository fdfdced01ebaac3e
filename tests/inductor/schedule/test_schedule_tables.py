"""Tables of a schedule: the simulator's numbers, beside the names that people know."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from weft.inductor.cost.simulate import Simulation, simulate
from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph
from weft.inductor.schedule.schedule_tables import BucketReport, bucket_report, log_schedule, summary, tables, text


@dataclass
class Schedule:
    simulation: Simulation
    reports: list[BucketReport]


@pytest.fixture
def schedule() -> Schedule:
    """A gather of 4 ms behind computations of 1, 2 and 0.5 ms, half a millisecond exposed; a reduction alone."""
    tasks = [
        Task("gather", Kind.START, (), 4e-3, "nccl", "nvlink"),
        Task("norm", Kind.COMPUTE, (), 1e-3),
        Task("matmul", Kind.COMPUTE, (), 2e-3),
        Task("gelu", Kind.COMPUTE, (), 0.5e-3),
        Task("wait_gather", Kind.WAIT, (0,)),
        Task("reduce", Kind.START, (4,), 2e-3, "nccl", "nvlink"),
        Task("wait_reduce", Kind.WAIT, (5,)),
    ]
    found = simulate(TaskGraph(tasks, [Storage(2**30, 2, (3,))], base=2**30))
    gather = bucket_report(
        found,
        0,
        kind="all_gather",
        group="fsdp",
        members=("model.blocks.0.query.weight", "model.blocks.0.key.weight"),
        bytes=3 * 2**20,
        transport="copies",
        why="alone 4 ms, merged 4 ms",
    )
    reduce = bucket_report(
        found, 5, kind="reduce_scatter", group="fsdp", members=("head.weight",), bytes=2**20, transport="nccl"
    )
    return Schedule(found, [reduce, gather])


def test_a_bucket_has_the_simulators_numbers(schedule: Schedule) -> None:
    reduce, gather = schedule.reports
    assert (gather.began, gather.seconds, gather.took) == (0, 4e-3, 4e-3)
    assert gather.exposed == pytest.approx(0.5e-3)
    assert gather.beside == (
        ("matmul", pytest.approx(0.5)),
        ("norm", pytest.approx(0.25)),
        ("gelu", pytest.approx(0.125)),
    )
    assert (reduce.began, reduce.took, reduce.exposed) == pytest.approx((4e-3, 2e-3, 2e-3))
    assert reduce.beside == ()


def test_a_line_a_bucket_in_order_of_start(schedule: Schedule) -> None:
    by_kind, buckets = tables(schedule)
    assert [dict(zip(buckets.columns, row, strict=True)) for row in buckets.rows] == [
        {
            "at ms": "0.00",
            "collective": "all_gather",
            "group": "fsdp",
            "of": "model.blocks.0.* (2)",
            "bytes": "3.0 MiB",
            "transport": "copies",
            "alone us": "4000.0",
            "took us": "4000.0",
            "exposed us": "500.0",
            "beside": "matmul 50%, norm 25%, 1 more",
            "why": "alone 4 ms, merged 4 ms",
        },
        {
            "at ms": "4.00",
            "collective": "reduce_scatter",
            "group": "fsdp",
            "of": "head.weight",
            "bytes": "1.0 MiB",
            "transport": "nccl",
            "alone us": "2000.0",
            "took us": "2000.0",
            "exposed us": "2000.0",
            "beside": "",
            "why": "",
        },
    ]
    assert by_kind.rows == [
        ("all_gather", "fsdp", "copies", 1, "3.0 MiB", "4.00", "0.50"),
        ("reduce_scatter", "fsdp", "nccl", 1, "1.0 MiB", "2.00", "2.00"),
    ]


def test_the_step_in_a_line(schedule: Schedule) -> None:
    assert summary(schedule.simulation) == (
        "step 6.00 ms: computation 3.50, slowed by communication beside it 0.00, communication exposed 2.50 (41.7%); "
        "peak 2.00 GiB, at matmul"
    )
    assert summary(simulate(TaskGraph([]))).startswith("step 0.00 ms")


def test_the_log_has_the_line_and_for_debugging_the_tables(
    schedule: Schedule, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "weft.inductor.schedule"):
        log_schedule(schedule)
    assert [record.getMessage() for record in caplog.records] == [summary(schedule.simulation)]
    with caplog.at_level(logging.DEBUG, "weft.inductor.schedule"):
        log_schedule(schedule)
    assert [record.getMessage() for record in caplog.records[2:]] == [text(rows) for rows in tables(schedule)]


def test_text_is_aligned(schedule: Schedule) -> None:
    title, *lines = text(next(tables(schedule))).splitlines()
    assert title == "communication"
    assert len({line.index(" fsdp") for line in lines[1:]} | {lines[0].index(" group")}) == 1
