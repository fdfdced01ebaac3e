"""Measured spans of kernels and copies, from a profile of torch's profiler, to compare with predicted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from weft.inductor.cost.simulate import COMPUTE
from weft.inductor.transports import apply_transports  # noqa: F401 - imports every transport, so that its kernel counts
from weft.inductor.transports.kernels.barrier import Barrier
from weft.inductor.transports.kernels.peer_kernel import PeerKernel
from weft.inductor.transports.kernels.shard_copy import ShardCopy

# NCCL's kernels (ncclDevKernel_AllGather_RING_LL, ncclKernel_... before NCCL 2.19), and copies between GPUs.
_OF_LIBRARIES = ("nccl", "Memcpy PtoP")


class MeasuredSpan(NamedTuple):
    """When a kernel or copy ran, in seconds from the beginning of the first one of the profile."""

    name: str
    stream: str
    start: float
    end: float


def measured_spans(profile: torch.profiler.profile, device: int | None = None) -> list[MeasuredSpan]:
    """The kernels and copies of a profile, in order of their starts.

    Communication is recognised by kernel names, not by streams: a replayed CUDA graph runs computation and
    communication on the same streams. Communication on a CUDA stream counts as a stream of its own. Of the rest, the
    stream with the most seconds is called :data:`~weft.inductor.cost.simulate.COMPUTE`; the others are named by their
    numbers. Spans of a stream can overlap.

    Args:
        profile: of one step, recorded with ``ProfilerActivity.CUDA``, stopped.
        device: index of the GPU whose spans to return; None: all GPUs that the process used.
    """
    events = [
        event
        for event in profile.events() or ()
        if event.device_type != DeviceType.CPU
        and not event.is_user_annotation
        and (device is None or event.device_index == device)
    ]
    events.sort(key=lambda event: event.time_range.start)
    busy: Counter[int] = Counter()
    for event in events:
        if not communicates(event.name):
            busy[event.device_resource_id] += event.time_range.elapsed_us()
    # A profile does not say which stream is the step's. Most of the computation runs there.
    compute = max(busy, key=lambda stream: (busy[stream], -stream), default=None)

    def stream_of(event: FunctionEvent) -> str:
        stream = f"stream {event.device_resource_id}"
        if communicates(event.name):
            return f"communication, {stream}"
        return COMPUTE if event.device_resource_id == compute else stream

    first = events[0].time_range.start if events else 0.0
    return [
        MeasuredSpan(e.name, stream_of(e), (e.time_range.start - first) / 1e6, (e.time_range.end - first) / 1e6)
        for e in events
    ]


def exposed_seconds(spans: Sequence[MeasuredSpan]) -> float:
    """Exposed communication: seconds during which some communication ran and no computation did."""
    edges = [(time, at, communicates(span.name)) for span in spans for time, at in ((span.start, 1), (span.end, -1))]
    running = {True: 0, False: 0}
    exposed = last = 0.0
    for time, change, communication in sorted(edges):
        if running[True] and not running[False]:
            exposed += time - last
        last = time
        running[communication] += change
    return exposed


def communicates(name: str) -> bool:
    """Whether a kernel or copy of that name belongs to communication: it moves data between GPUs, or prepares or
    finishes a transfer."""
    return name.startswith((*_OF_LIBRARIES, Barrier.name, ShardCopy.name, *_names_of_subclasses(PeerKernel)))


def _names_of_subclasses(kernel: type[PeerKernel]) -> Iterator[str]:
    for each in kernel.__subclasses__():
        if "name" in vars(each):
            yield each.name
        yield from _names_of_subclasses(each)
