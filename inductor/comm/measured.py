"""What ran on a GPU, and when: spans from a recording of torch's profiler, to lie beside the predicted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from weft.inductor.comm.simulate import COMPUTE


class MeasuredSpan(NamedTuple):
    """When a kernel or copy ran: seconds from the beginning of the first."""

    name: str
    lane: str
    start: float
    end: float


def measured_spans(profile: torch.profiler.profile, device: int | None = None) -> list[MeasuredSpan]:
    """The kernels and copies of a profile, in order of their starts.

    The stream with most seconds of kernels is the lane :data:`~weft.inductor.comm.simulate.COMPUTE`; others are named
    by their numbers. NCCL's kernels, known by their names, have lanes of their own even on a stream that computes:
    replays of a CUDA graph may report all that they run on one stream. So spans of a lane may overlap.

    Args:
        profile: of one step, recorded with ``ProfilerActivity.CUDA``, stopped.
        device: index of the GPU whose spans count; None: every GPU that the process used.
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
        if not _is_nccl(event.name):
            busy[event.device_resource_id] += event.time_range.elapsed_us()
    compute = max(busy, key=lambda stream: (busy[stream], -stream), default=None)

    def lane(event: FunctionEvent) -> str:
        stream = f"stream {event.device_resource_id}"
        if _is_nccl(event.name):
            return f"nccl {stream}"
        return COMPUTE if event.device_resource_id == compute else stream

    first = events[0].time_range.start if events else 0.0
    return [
        MeasuredSpan(e.name, lane(e), (e.time_range.start - first) / 1e6, (e.time_range.end - first) / 1e6)
        for e in events
    ]


def exposed_seconds(spans: Sequence[MeasuredSpan]) -> float:
    """Seconds during which something ran on other lanes, and nothing on that of computation."""
    edges = [(time, at, span.lane == COMPUTE) for span in spans for time, at in ((span.start, 1), (span.end, -1))]
    running = {True: 0, False: 0}
    exposed = last = 0.0
    for time, change, computes in sorted(edges):
        if running[False] and not running[True]:
            exposed += time - last
        last = time
        running[computes] += change
    return exposed


def _is_nccl(name: str) -> bool:
    """``ncclDevKernel_AllGather_RING_LL(...)``, ``ncclKernel_...`` before NCCL 2.19."""
    return name.startswith("nccl")
