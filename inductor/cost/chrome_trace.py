"""Trace files of a step for Perfetto (ui.perfetto.dev) and chrome://tracing, with the predicted and the measured run.

The format is Chrome's *Trace Event Format* in JSON: complete events (``X``), counters (``C``), and metadata (``M``)
that names and orders processes and threads. Viewers drop slices of one thread that overlap without nesting, so every
track of the file has one slice at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.inductor.cost.simulate import COMPUTE, Simulation
from weft.inductor.cost.task_graph import Kind
from weft.inductor.cost.trace_timings import MeasuredSpan

Event = dict[str, Any]

_PREDICTED, _MEASURED = 1, 2  # process ids


def trace(
    simulation: Simulation, measured: Sequence[MeasuredSpan] = (), lines: Mapping[str, str] | None = None
) -> Event:
    """The trace as an object for JSON.

    The process "predicted" has a thread for the compute stream, one for each other stream, and a counter of live
    memory. If ``measured`` has spans, the process "measured" has a thread for each of their streams;
    ``lines`` has the user's line of kernels by their names.
    """
    events = list(_process(_PREDICTED, "predicted", _predicted(simulation)))
    events += _memory(simulation)
    if measured:
        known = lines or {}
        slices = [
            _Slice(s.name, s.stream, "measured", s.start, s.end, {"from": known[s.name]} if s.name in known else {})
            for s in measured
        ]
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
    lines: Mapping[str, str] | None = None,
) -> None:
    """Write :func:`trace` to a JSON file. Raises OSError."""
    Path(path).write_text(json.dumps(trace(simulation, measured, lines), allow_nan=False))


class _Slice(NamedTuple):
    """A slice of a track; ``start`` and ``end`` in seconds."""

    name: str
    stream: str
    category: str
    start: float
    end: float
    args: Mapping[str, Any]


def _predicted(simulation: Simulation) -> Iterator[_Slice]:
    tasks = simulation.task_graph.tasks
    for span in simulation.spans:
        task = tasks[span.task]
        args: dict[str, Any] = {"alone us": task.seconds * 1e6}
        if task.kind is Kind.START:
            args |= {"exposed us": simulation.exposed.get(span.task, 0.0) * 1e6, "link": task.link}
        category = "collective" if task.kind is Kind.START else "compute"
        yield _Slice(task.name, span.stream, category, span.start, span.end, args)
    for wait in simulation.waits:
        name = f"wait for {tasks[wait.task].name}"
        yield _Slice(name, COMPUTE, "exposed", wait.start, wait.end, {})


def _process(pid: int, name: str, slices: Iterable[_Slice]) -> Iterator[Event]:
    """The events of a process: its name and position, and for each track the same and its slices by start."""
    yield from _titled("process", name, pid)
    for tid, (track, on_track) in enumerate(_tracks(slices).items()):
        yield from _titled("thread", track, pid, tid)
        for slice_ in on_track:
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
    """The slices of each track: one track per stream, the compute stream first, and more tracks for slices that overlap
    within a stream."""
    streams: dict[str, list[list[_Slice]]] = {}
    for slice_ in sorted(slices, key=lambda s: (s.stream != COMPUTE, s.start, s.end)):
        tracks = streams.setdefault(slice_.stream, [])
        begins = _microseconds(slice_.start)
        # Slices of one thread that overlap without nesting would be dropped by viewers.
        free = next((track for track in tracks if _microseconds(track[-1].end) <= begins), None)
        if free is None:
            tracks.append([slice_])
        else:
            free.append(slice_)
    return {
        f"{stream} ({place})" if place > 1 else stream: track
        for stream, tracks in streams.items()
        for place, track in enumerate(tracks, 1)
    }


def _memory(simulation: Simulation) -> Iterator[Event]:
    """A counter event wherever live memory changes."""
    before = None
    for time, live_bytes in zip(simulation.issued, simulation.memory, strict=True):
        if live_bytes != before:
            args = {"GiB": live_bytes / 2**30}
            yield {"ph": "C", "pid": _PREDICTED, "tid": 0, "ts": _microseconds(time), "name": "memory", "args": args}
        before = live_bytes


def _microseconds(seconds: float) -> float:
    """Microseconds, rounded to eighths. Eighths (125 ns) are exact in binary, so ``ts + dur`` of a slice equals ``ts``
    of the next one if they are adjacent."""
    return round(seconds * 8e6) / 8
