"""A GPU that waits for a rank that is gone: the main thread gets an error that names both, or its process ends.

A thread stands in for the GPU here. `tests/inductor/transports/test_dead_ranks_gpu.py` has real ones.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import harness
from harness import RanksFailed, run_ranks
from weft import errors, torch_adapter
from weft.capture.agreement import device_watch
from weft.capture.agreement.device_watch import DeviceProgress, DeviceWatch
from weft.capture.agreement.lockstep import lockstep


class Gpu:
    """A driver whose GPU ends each call at once, until it is stuck."""

    stuck = False

    def write_word(self, stream: int, address: int, value: int) -> None:
        if not self.stuck:
            ctypes.c_int32.from_address(address).value = value


class Memory:
    """Shared memory at whose barriers a kernel waits."""

    def __init__(self, place: str) -> None:
        self.place = place

    def end_waiting(self) -> str:
        return self.place


class Program:
    def collective_at(self, line: int) -> tuple[str, list[str]]:
        return "all_gather_into_tensor", [f"train.py:{line}"]


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceProgress, Gpu]:
    """The progress of a GPU that this process watches."""
    ranks, gpu = lockstep(), Gpu()
    assert ranks is not None
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(torch_adapter, "abort_process_groups", lambda: None)
    progress = DeviceProgress(gpu)  # type: ignore[arg-type]
    ranks.watch.on_look = DeviceWatch(ranks.watch, progress, ranks._device_lost).look
    return progress, gpu


def waits(rank: int, world: int, folder: str, how: int, place: str, sleeps: float) -> None:
    monkeypatch = pytest.MonkeyPatch()
    progress, gpu = watched(monkeypatch)
    monkeypatch.setattr(device_watch, "RETURN_S", 1.0)
    memory, program = Memory(place), Program()
    device_watch.shared_memory.add(memory)
    device_watch.programs["<weft program 7>"] = program
    unfinished = torch_adapter.UnfinishedCollective("nccl:_all_gather_base", "world", (("<weft program 7>", 12),))
    monkeypatch.setattr(torch_adapter, "unfinished_collectives", lambda since: [unfinished] if since else [])
    for call in range(3):
        progress.begin()
        gpu.stuck = call == 2 and rank != 1
        progress.end()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), how)
    began = time.monotonic()
    with pytest.raises(errors.CollectiveFailed) as caught:
        _sleep_until(began + 40, sleeps)
    Path(folder, str(rank)).write_text(f"{time.monotonic() - began:.1f}\n{caught.value}")
    with pytest.raises(errors.CollectiveFailed) as again:
        lockstep()._go_on()  # type: ignore[union-attr]
    assert str(again.value) == str(caught.value)


def _sleep_until(end: float, sleeps: float) -> None:
    while time.monotonic() < end:
        time.sleep(sleeps)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "all_gather_into_tensor failed in a compiled step: the process of rank 1 has ended"),
        ("push_gather of 0.weight at train.py:3", "push_gather of 0.weight at train.py:3 failed in a compiled step"),
    ],
    ids=["nccl", "shared memory"],
)
def test_a_gpu_that_waits_for_a_dead_rank_is_given_up_in_seconds(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "GRACE", 30.0)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(waits, 3, str(tmp_path), signal.SIGKILL, place, 0.02, timeout=60)
    assert "0 still running" in str(caught.value), str(caught.value)
    for rank in (0, 2):
        seconds, text = (tmp_path / str(rank)).read_text().split("\n", 1)
        assert float(seconds) < 20
        assert said in text
        assert "rank 1" in text
        assert "train.py:12" in text or place


@pytest.mark.gloo
def test_a_main_thread_that_does_not_come_back_ends_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "GRACE", 30.0)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(waits, 2, str(tmp_path), signal.SIGKILL, "", 39.0, timeout=60)
    assert "0 still running" in str(caught.value), str(caught.value)
    assert not (tmp_path / "0").exists()


def loses_the_store(rank: int, world: int, folder: str) -> None:
    monkeypatch = pytest.MonkeyPatch()
    progress, gpu = watched(monkeypatch)
    ranks = lockstep()
    assert ranks is not None

    def closed() -> None:
        raise RuntimeError("Connection reset by peer")

    told = ranks._device_lost
    lost = lambda error: (told(error), setattr(ranks.watch, "write", closed))
    ranks.watch.on_look = DeviceWatch(ranks.watch, progress, lost).look
    progress.begin()
    gpu.stuck = rank == 0
    progress.end()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.CollectiveFailed, match="the process of rank 1 has ended"):
        _sleep_until(time.monotonic() + 25, 0.02)
    Path(folder, "heard").touch()


@pytest.mark.gloo
def test_the_error_arrives_although_the_store_is_lost_with_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "GRACE", 30.0)
    with pytest.raises(RanksFailed):
        run_ranks(loses_the_store, 2, str(tmp_path), timeout=60)
    assert (tmp_path / "heard").exists()


def slow(rank: int, world: int) -> bool:
    monkeypatch = pytest.MonkeyPatch()
    progress, gpu = watched(monkeypatch)
    monkeypatch.setattr(device_watch, "BEHIND_S", 0.2)
    progress.begin()
    gpu.stuck = True
    progress.end()
    time.sleep(4)  # other ranks live: the GPU is waited for
    gpu.stuck = False
    progress.begin()
    progress.end()
    dist.barrier()
    return progress.done == progress.issued == 2


@pytest.mark.gloo
def test_a_slow_gpu_is_waited_for() -> None:
    assert run_ranks(slow, 2) == [True, True]


def test_calls_that_the_gpu_has_not_ended_have_their_time() -> None:
    progress = DeviceProgress(Gpu())  # type: ignore[arg-type]
    progress._begun.extend([(1, 100), (2, 200), (3, 300)])
    assert progress.oldest_begun_ns() == 100
    progress._done.value = 2
    assert progress.oldest_begun_ns() == 300
