"""What a schedule does with its collectives, as rows of tables: for ``weft.explain``, and for the log
``weft.inductor.schedule``: a line about the step with ``INFO``, the tables with ``DEBUG``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from weft.capture.sizes_in_bytes import format_bytes
from weft.inductor.cost.simulate import Simulation

log = logging.getLogger(__name__)

_MOST_NAMED = 2  # computations that a row names


@dataclass(frozen=True)
class BucketReport:
    """A collective of a schedule, or several that go as one.

    Attributes:
        kind: "all_gather", "reduce_scatter", ...
        group: the process group.
        members: the values in it, by their parameters where they are of parameters.
        bytes: of all of them, unsharded.
        transport: what moves them.
        why: the numbers that decided it.
        began: seconds from the beginning of the step.
        seconds: predicted, alone.
        took: predicted, in the step, where it may share its link.
        exposed: seconds that the compute stream stands waiting for it.
        beside: names of the computations that hide it, with the part of ``took`` that they ran, the longest first.
    """

    kind: str
    group: str
    members: tuple[str, ...]
    bytes: int
    transport: str
    why: str
    began: float
    seconds: float
    took: float
    exposed: float
    beside: tuple[tuple[str, float], ...]


class Scheduled(Protocol):
    """What the tables need to know about a schedule."""

    @property
    def simulation(self) -> Simulation:
        """The predicted run of the step."""

    @property
    def reports(self) -> Sequence[BucketReport]:
        """One per collective, in the order of issue."""


class ReportTable(NamedTuple):
    """A table."""

    title: str
    columns: list[str]
    rows: list[tuple[Any, ...]]


def bucket_report(
    simulation: Simulation,
    start: int,
    *,
    kind: str,
    group: str,
    members: tuple[str, ...],
    bytes: int,
    transport: str,
    why: str = "",
) -> BucketReport:
    """The report on the collective of a START, with what the simulation says about it."""
    span, tasks = simulation.collectives[start], simulation.task_graph.tasks
    took = span.end - span.start
    beside = tuple((tasks[task].name, seconds / took) for task, seconds in simulation.beside(start))
    return BucketReport(
        kind,
        group,
        members,
        bytes,
        transport,
        why,
        began=span.start,
        seconds=tasks[start].seconds,
        took=took,
        exposed=simulation.exposed.get(start, 0.0),
        beside=beside,
    )


def summary(simulation: Simulation) -> str:
    """A predicted step in a line: its time and where it goes, its memory."""
    exposed, slowed = simulation.exposed_seconds, sum(simulation.slowed_seconds.values())
    share = exposed / simulation.seconds if simulation.seconds else 0.0
    at = simulation.task_graph.tasks[simulation.order[simulation.peak_at]].name if simulation.order else "no task"
    set_aside = simulation.task_graph.set_aside
    aside = f"{set_aside / 2**30:.2f} of it for collectives over peers, " if set_aside else ""
    return (
        f"step {_ms(simulation.seconds)} ms: computation {_ms(simulation.compute_seconds)}, slowed by communication "
        f"beside it {_ms(slowed)}, communication exposed {_ms(exposed)} ({share:.1%}); "
        f"peak {simulation.peak / 2**30:.2f} GiB, {aside}at {at}"
    )


def tables(schedule: Scheduled) -> Iterator[ReportTable]:
    """Collectives by kind, then each bucket in order of its start."""
    columns = ["collective", "group", "transport", "count", "bytes", "alone ms", "exposed ms"]
    yield ReportTable("communication", columns, list(_by_kind(schedule.reports)))
    columns = ["at ms", "collective", "group", "of", "bytes", "transport", "alone us", "took us", "exposed us"]
    # By start, not by issue: that is what the reader compares with a profile.
    buckets = sorted(schedule.reports, key=lambda bucket: bucket.began)
    yield ReportTable("buckets", [*columns, "beside", "why"], [_row(bucket) for bucket in buckets])


def text(rows: ReportTable) -> str:
    """A table as aligned text, however wide."""
    lines = [rows.columns, *([str(cell) for cell in row] for row in rows.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ["   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rows.title, *cells])


def log_schedule(schedule: Scheduled) -> None:
    """Say what a schedule does to whoever listens."""
    log.info("%s", summary(schedule.simulation))
    if log.isEnabledFor(logging.DEBUG):
        for rows in tables(schedule):
            log.debug("%s", text(rows))


def _by_kind(buckets: Sequence[BucketReport]) -> Iterator[tuple[Any, ...]]:
    same: dict[tuple[str, str, str], list[BucketReport]] = {}
    for bucket in buckets:
        same.setdefault((bucket.kind, bucket.group, bucket.transport), []).append(bucket)
    for key, found in sorted(same.items()):
        moved = format_bytes(sum(bucket.bytes for bucket in found))
        alone, exposed = sum(bucket.seconds for bucket in found), sum(bucket.exposed for bucket in found)
        yield (*key, len(found), moved, _ms(alone), _ms(exposed))


def _row(bucket: BucketReport) -> tuple[Any, ...]:
    beside = [f"{name} {share:.0%}" for name, share in bucket.beside[:_MOST_NAMED]]
    more = len(bucket.beside) - _MOST_NAMED
    return (
        _ms(bucket.began),
        bucket.kind,
        bucket.group,
        _together(bucket.members),
        format_bytes(bucket.bytes),
        bucket.transport,
        _us(bucket.seconds),
        _us(bucket.took),
        _us(bucket.exposed),
        ", ".join(beside) + (f", {more} more" if more > 0 else ""),
        bucket.why,
    )


def _together(members: tuple[str, ...]) -> str:
    """``blocks.0.* (9)`` of nine parameters of a block; one by its name."""
    if len(members) == 1:
        return members[0]
    parts = zip(*(member.split(".") for member in members), strict=False)
    common = [part for part, *others in takewhile(lambda same: len(set(same)) == 1, parts)]
    return f"{'.'.join([*common, '*'])} ({len(members)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
