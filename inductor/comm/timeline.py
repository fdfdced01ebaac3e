"""A step over time as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: predicted, and measured below.

The format is Chrome's *Trace Event Format* in JSON: complete events (``X``), counters (``C``), and metadata (``M``)
that name and order processes and threads. Viewers drop slices of one thread that overlap without one being inside the
other, so every track of the file holds one slice at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.inductor.comm.measured import MeasuredSpan
from weft.inductor.comm.problem import Kind
from weft.inductor.comm.simulate import COMPUTE, Simulation

Event = dict[str, Any]
Details = Mapping[int, Mapping[str, Any]]

_PREDICTED, _MEASURED = 1, 2  # process ids


def trace(simulation: Simulation, measured: Sequence[MeasuredSpan] = (), details: Details | None = None) -> Event:
    """A trace with a process "predicted": a thread for the compute stream, one for each lane, a counter of the memory
    held; and, where spans are given, a process "measured" with a thread for each of their lanes.

    Args:
        details: by task, what a click on it shows: bytes, transport, members, the user's line; whatever JSON can say.
    """
    events = list(_process(_PREDICTED, "predicted", _predicted(simulation, details or {})))
    events += _memory(simulation)
    if measured:
        slices = [_Slice(span.name, span.lane, "measured", span.start, span.end, {}) for span in measured]
        events += _process(_MEASURED, "measured", slices)
    totals = {
        "step ms": simulation.seconds * 1e3,
        "exposed communication ms": simulation.exposed_seconds * 1e3,
        "peak GiB": simulation.peak / 2**30,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": totals}


def write_trace(
    path: str | Path,
    simulation: Simulation,
    measured: Sequence[MeasuredSpan] = (),
    details: Details | None = None,
) -> None:
    """Write :func:`trace` to a file."""
    Path(path).write_text(json.dumps(trace(simulation, measured, details), allow_nan=False))


class _Slice(NamedTuple):
    """Something that took time; seconds."""

    name: str
    lane: str
    category: str
    start: float
    end: float
    args: Mapping[str, Any]


def _predicted(simulation: Simulation, details: Details) -> Iterator[_Slice]:
    tasks = simulation.problem.tasks
    for span in simulation.spans:
        task = tasks[span.task]
        args: dict[str, Any] = {"alone us": task.seconds * 1e6}
        if task.kind is Kind.START:
            args |= {"exposed us": simulation.exposed.get(span.task, 0.0) * 1e6, "link": task.link}
        args |= details.get(span.task, {})
        category = "collective" if task.kind is Kind.START else "compute"
        yield _Slice(task.name, span.lane, category, span.start, span.end, args)
    for wait in simulation.waits:
        name = f"wait for {tasks[wait.task].name}"
        yield _Slice(name, COMPUTE, "exposed", wait.start, wait.end, details.get(wait.task, {}))


def _process(pid: int, name: str, slices: Iterable[_Slice]) -> Iterator[Event]:
    """The events of a process: its name and place, and for each track the same and its slices by start."""
    yield from _titled("process", name, pid)
    for tid, (track, held) in enumerate(_tracks(slices).items()):
        yield from _titled("thread", track, pid, tid)
        for slice_ in held:
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "ts": _microseconds(slice_.start),
                "dur": _microseconds(slice_.end) - _microseconds(slice_.start),
                "name": slice_.name,
                "cat": slice_.category,
                "args": dict(slice_.args),
            }


def _titled(what: str, name: str, pid: int, tid: int = 0) -> Iterator[Event]:
    place = pid if what == "process" else tid
    yield {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_sort_index", "args": {"sort_index": place}}


def _tracks(slices: Iterable[_Slice]) -> dict[str, list[_Slice]]:
    """A track for each lane, that of the compute stream first, and another where slices of a lane overlap."""
    lanes: dict[str, list[list[_Slice]]] = {}
    for slice_ in sorted(slices, key=lambda s: (s.lane != COMPUTE, s.start, s.end)):
        tracks = lanes.setdefault(slice_.lane, [])
        begins = _microseconds(slice_.start)
        free = next((track for track in tracks if _microseconds(track[-1].end) <= begins), None)
        if free is None:
            tracks.append([slice_])
        else:
            free.append(slice_)
    return {
        f"{lane} ({place})" if place > 1 else lane: track
        for lane, tracks in lanes.items()
        for place, track in enumerate(tracks, 1)
    }


def _memory(simulation: Simulation) -> Iterator[Event]:
    """A point of the counter wherever the memory held changes."""
    before = None
    for time, held in zip(simulation.issued, simulation.memory, strict=True):
        if held != before:
            args = {"GiB": held / 2**30}
            yield {"ph": "C", "pid": _PREDICTED, "tid": 0, "ts": _microseconds(time), "name": "memory", "args": args}
        before = held


def _microseconds(seconds: float) -> float:
    """Rounded to eighths of a microsecond: whole nanoseconds without a rounding error, so that what ends when another
    begins still does once a viewer has added ``ts`` and ``dur``."""
    return round(seconds * 8e6) / 8
