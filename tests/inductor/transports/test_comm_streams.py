"""What a lane carries runs after what it reads was made, and before what waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from weft.inductor.transports.comm_streams import CommStream, comm_stream


class FakeStream:
    """Writes down what is asked of it."""

    said: ClassVar[list[str]] = []

    def __init__(self, device: object = None, priority: int = 0, name: str = "lane") -> None:
        self.name, self.cuda_stream = name, 17
        self.priority = priority

    def wait_event(self, event: FakeEvent) -> None:
        self.said.append(f"{self.name} waits for {event.at}")


class FakeEvent:
    at = ""

    def record(self, stream: FakeStream) -> None:
        self.at = f"{stream.name} {len(stream.said)}"
        stream.said.append(f"{stream.name} records {self.at}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compute = FakeStream(name="compute")

    @contextlib.contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        FakeStream.said.append(f"enter {stream.name}")
        yield
        FakeStream.said.append("leave")

    FakeStream.said = []
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return FakeStream.said


def test_a_lane_goes_between_the_compute_stream_and_its_wait(said: list[str]) -> None:
    comm = CommStream(torch.device("cuda", 0))
    done = comm.event()
    with comm.fork(done) as stream:
        said.append(f"launch on {stream}")
    comm.wait(done)
    assert said == [
        "compute records compute 0",
        "lane waits for compute 0",
        "enter lane",
        "launch on 17",
        "leave",
        "lane records lane 5",
        "compute waits for lane 5",
    ]


def test_a_replay_follows_what_a_lane_still_carries(said: list[str]) -> None:
    comm = CommStream(torch.device("cuda", 0))
    ends = [comm.event() for _ in range(2)]
    for done in ends:
        with comm.fork(done):
            pass
    comm.wait(ends[0])
    del said[:]
    comm.join()
    assert said == [f"compute waits for {ends[1].at}"]  # type: ignore[union-attr]
    comm.join()
    comm.wait(ends[1])
    with comm.fork(ends[0]):
        pass
    comm.wait(ends[0])
    del said[:]
    comm.join()
    assert said == []


def test_what_is_recorded_is_nothing_to_wait_for_outside(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    comm = CommStream(torch.device("cuda", 0))
    with comm.fork(comm.event()):
        pass
    del said[:]
    comm.join()
    assert said == []


def test_what_waits_first_is_what_peers_wait_for(said: list[str]) -> None:
    assert CommStream(torch.device("cuda", 0))._stream.priority < 0  # type: ignore[union-attr]


def test_on_the_cpu_everything_has_ended_at_once() -> None:
    comm = comm_stream(torch.device("cpu"), "gather")
    assert comm is comm_stream(torch.device("cpu"), "gather")
    done = comm.event()
    with comm.fork(done) as stream:
        assert stream == 0
    comm.wait(done)
