"""Traces of a step: what viewers of the format ask for, and the same numbers as the simulation."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from weft.inductor.cost.chrome_trace import trace, write_trace
from weft.inductor.cost.simulate import COMPUTE, Simulation, simulate
from weft.inductor.cost.task_graph import Kind, Storage, Task, TaskGraph
from weft.inductor.cost.trace_timings import MeasuredSpan, communicates, exposed_seconds, measured_spans
from weft.inductor.transports.kernels.all_gather import PushGather
from weft.inductor.transports.kernels.all_reduce import OneShotAllReduce, TwoShotAllReduce
from weft.inductor.transports.kernels.barrier import Barrier
from weft.inductor.transports.kernels.reduce_scatter import LocalReduceScatter, PullReduceScatter
from weft.inductor.transports.kernels.shard_copy import ShardCopy


@pytest.fixture
def simulation() -> Simulation:
    """Two gathers, on a stream each, behind and before computation; lengths that no power of two divides."""
    tasks = [
        Task("gather_0", Kind.START, (), 1e-3, "nccl:fsdp", "nvlink", 0.3),
        Task("gather_1", Kind.START, (), 7e-4 / 3, "copies:fsdp", "nvlink", 0.1),
        Task("matmul_0", Kind.COMPUTE, (), 1.1e-3 / 3),
        Task("wait_0", Kind.WAIT, (0,)),
        Task("norm", Kind.COMPUTE, (3,), 1e-7 / 3),
        Task("wait_1", Kind.WAIT, (1,)),
        Task("matmul_1", Kind.COMPUTE, (4, 5), 1e-3 / 7),
    ]
    storages = [Storage(2**30, 0, (3, 6)), Storage(2**29, 2, (4,)), Storage(2**20, 6, kept=True)]
    return simulate(TaskGraph(tasks, storages, base=2**30))


def threads(events: list[dict[str, Any]], process: str) -> dict[str, list[dict[str, Any]]]:
    """The slices of each named thread of a named process, in the order of the file."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and names["process_name", event["pid"], 0] == process:
            found[names["thread_name", event["pid"], event["tid"]]].append(event)
    return found


def test_a_file_is_json_of_the_format(simulation: Simulation, tmp_path: Path) -> None:
    write_trace(tmp_path / "step.json", simulation, [MeasuredSpan("gemm", "compute", 0.0, 1e-3)])
    loaded = json.loads((tmp_path / "step.json").read_text())
    assert loaded.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    needed = {"X": {"ts", "dur", "cat"}, "C": {"ts"}, "M": set()}
    for event in loaded["traceEvents"]:
        assert event.keys() == {"ph", "pid", "tid", "name", "args"} | needed[event["ph"]]
        assert event.get("dur", 0) >= 0
    assert loaded["otherData"]["step ms"] == simulation.seconds * 1e3
    assert loaded["otherData"]["exposed communication ms"] == simulation.exposed_seconds * 1e3


def test_each_stream_is_a_thread_and_its_slices_do_not_overlap(simulation: Simulation) -> None:
    found = threads(trace(simulation)["traceEvents"], "predicted")
    assert list(found) == ["compute", "copies:fsdp", "nccl:fsdp"]
    for slices in found.values():
        until = 0
        for event in slices:
            nanoseconds = event["ts"] * 1000
            assert nanoseconds == int(nanoseconds) >= until
            until = nanoseconds + event["dur"] * 1000
    names = [event["name"] for event in found["compute"]]
    assert names == ["matmul_0", "wait for gather_0", "norm", "matmul_1"]


def test_slices_sum_to_the_simulation(simulation: Simulation) -> None:
    """Within what rounding each end to an eighth of a microsecond does."""
    found = threads(trace(simulation)["traceEvents"], "predicted")
    assert sum(event["dur"] for event in found["compute"]) == pytest.approx(simulation.seconds * 1e6, abs=0.5)
    exposed = sum(event["dur"] for event in found["compute"] if event["cat"] == "exposed")
    assert exposed == pytest.approx(simulation.exposed_seconds * 1e6, abs=0.5)
    [gather] = found["nccl:fsdp"]
    assert gather["args"]["exposed us"] == pytest.approx(exposed, abs=0.5)
    assert gather["args"]["alone us"] == 1e3


def test_memory_is_a_counter(simulation: Simulation) -> None:
    points = [event for event in trace(simulation)["traceEvents"] if event["ph"] == "C"]
    assert [point["args"]["GiB"] for point in points] == [2, 2.5, 2, 2 + 2**-10]
    assert [point["ts"] for point in points] == sorted(point["ts"] for point in points)
    assert max(point["args"]["GiB"] for point in points) == simulation.peak / 2**30


# ---- measured


def event(
    name: str, start: float, end: float, stream: int, *, cpu: bool = False, annotation: bool = False, gpu: int = 0
) -> FunctionEvent:
    """As torch's profiler makes them: microseconds, the stream as ``device_resource_id``."""
    return FunctionEvent(
        id=0,
        name=name,
        thread=1,
        start_us=start,
        end_us=end,
        device_type=DeviceType.CPU if cpu else DeviceType.CUDA,
        device_index=gpu,
        device_resource_id=stream,
        is_user_annotation=annotation,
    )


def profile(*events: FunctionEvent) -> Any:
    return SimpleNamespace(events=lambda: list(events))


STEP = [
    event("aten::mm", 0, 5, 0, cpu=True),
    event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 100, 400, 20),
    event("nccl:_all_gather_base", 100, 400, 20, annotation=True),
    event("nvjet_hsh_128x256_64x4", 110, 300, 7),
    event("triton_norm_3", 300, 310.5, 7),
    event("Memcpy PtoP (Device -> Device)", 120, 200, 24),
    event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 350, 360, 7),
]


def test_kernels_are_mapped_to_streams_by_their_numbers() -> None:
    spans = measured_spans(profile(*reversed(STEP)))
    assert [(span.stream, span.name.split("_")[0]) for span in spans] == [
        ("communication, stream 20", "ncclDevKernel"),
        ("compute", "nvjet"),
        ("communication, stream 24", "Memcpy PtoP (Device -> Device)"),
        ("compute", "triton"),
        ("communication, stream 7", "ncclDevKernel"),
    ]
    assert spans[0][2:] == (0, pytest.approx(300e-6))
    assert spans[3][2:] == (pytest.approx(200e-6), pytest.approx(210.5e-6))


def test_spans_of_one_gpu() -> None:
    events = [event("a", 0, 1, 7), event("b", 5, 6, 7, gpu=1)]
    assert [span.name for span in measured_spans(profile(*events), device=1)] == ["b"]
    assert measured_spans(profile()) == []


def test_a_profile_without_a_gpu_has_no_spans() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        torch.ones(4).sum()
    assert measured_spans(recorded) == []


def test_measured_spans_are_a_second_process_of_the_same_file(simulation: Simulation) -> None:
    spans = measured_spans(profile(*STEP))
    events = trace(simulation, spans)["traceEvents"]
    assert threads(events, "predicted") == threads(trace(simulation)["traceEvents"], "predicted")
    found = threads(events, "measured")
    assert list(found) == [
        "compute",
        "communication, stream 20",
        "communication, stream 24",
        "communication, stream 7",
    ]
    assert sum(len(slices) for slices in found.values()) == len(spans)
    with_lines = threads(trace(simulation, spans, {"triton_norm_3": "train.py:12"})["traceEvents"], "measured")
    lines = {event["name"]: event["args"] for event in with_lines["compute"]}
    assert lines == {"nvjet_hsh_128x256_64x4": {}, "triton_norm_3": {"from": "train.py:12"}}


def test_measured_spans_that_overlap_on_a_stream_are_put_on_two_tracks(simulation: Simulation) -> None:
    spans = [MeasuredSpan(name, "compute", start, start + 2e-6) for name, start in [("a", 0), ("b", 1e-6), ("c", 2e-6)]]
    found = threads(trace(simulation, spans)["traceEvents"], "measured")
    assert {track: [event["name"] for event in slices] for track, slices in found.items()} == {
        "compute": ["a", "c"],
        "compute (2)": ["b"],
    }


def test_exposed_is_what_communicates_while_nothing_computes() -> None:
    """By names: a replayed CUDA graph computes on many streams."""
    spans = [
        MeasuredSpan("mm", COMPUTE, 0.0, 2.0),
        MeasuredSpan("ncclGather", "stream 7", 1.0, 4.0),
        MeasuredSpan("ncclReduce", "stream 8", 3.0, 5.0),
        MeasuredSpan("mm", "stream 8", 4.5, 6.0),
        MeasuredSpan("Memcpy PtoP (Device -> Device)", "stream 9", 7.0, 7.5),
        MeasuredSpan("Memcpy DtoD (Device -> Device)", "stream 9", 8.0, 9.0),
    ]
    assert exposed_seconds(spans) == pytest.approx((4.5 - 2.0) + 0.5)


def test_kernels_of_transports_are_known_by_name() -> None:
    common = {"world": 2, "sizes": (8,), "wire": torch.float32}
    transports = [
        PushGather(source=torch.float32, **common),
        PullReduceScatter(result=torch.float32, **common),
        LocalReduceScatter(result=torch.float32, **common),
        OneShotAllReduce(result=torch.float32, **common),
        TwoShotAllReduce(**common),
        Barrier(2),
        ShardCopy((8,), torch.float32, torch.float32),
    ]
    assert all(communicates(transport.kernel.name) for transport in transports)
