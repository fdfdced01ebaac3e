"""Whoever waits for the store of a process that is stopped hears so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from weft import rank_watch, torch_adapter
from weft.capture.agreement.lockstep import Lockstep
from weft.distributed.checkpoint import exchange
from weft.errors import StoreLost

SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


class Group:
    """As much of a process group of two ranks as a Lockstep asks for."""


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default store is one of a process that is stopped."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        store = dist.TCPStore("localhost", int(server.stdout.readline()), is_master=False)
        monkeypatch.setattr(torch_adapter, "default_store", lambda: store)
        monkeypatch.setattr(torch_adapter, "world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        monkeypatch.setattr(rank_watch, "STORE_S", 0.5)
        os.kill(server.pid, signal.SIGSTOP)
        yield
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("waits", "name"),
    [
        (lambda: Lockstep(Group()), "the first compiled call"),  # type: ignore[arg-type]
        (exchange.Ranks, r"weft\.TrainState"),
    ],
)
def test_a_store_whose_process_is_stopped_is_an_error(waits: Callable[[], Any], name: str, stopped: None) -> None:
    with pytest.raises(StoreLost, match=f"{name}: rank 1 lost the store"):
        waits()


# Requests take two seconds, and Python needs four to take the program apart.
REQUEST_AT_EXIT = """
import sys, time, threading
from datetime import timedelta
import torch.distributed as dist
from weft import rank_watch, threads_at_exit

store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
client = dist.TCPStore("localhost", store.port, is_master=False)
asked = threading.Event()

def ask():
    asked.set()
    client.wait(["never"], timedelta(seconds=2))

class Slow:
    def __getattr__(self, name):
        return getattr(client, name)

    def multi_get(self, keys):
        try:
            ask()
        except RuntimeError:
            return client.multi_get(keys)

class Last:
    def __del__(self, sleep=time.sleep):
        sleep(4)

sys.last_one = Last()
HOW
asked.wait()
print("ends", flush=True)
"""


@pytest.mark.parametrize(
    "how",
    [
        "rank_watch.RankWatch(0, 1, Slow(), lambda: True, lambda number: None)",
        "watch = rank_watch.RankWatch(0, 1, Slow(), lambda: True, lambda number: None)\n"
        "import atexit\natexit.register(watch.stop)",
        "threads_at_exit.started('test', ask)",
        "from weft.distributed.stop_signal import StoreRequests\nrequests = StoreRequests()\nrequests.start(ask)",
    ],
    ids=["a watch", "a watch that is told to stop", "another thread", "weft.stopping"],
)
def test_a_process_ends_well_while_a_thread_is_in_a_request(how: str) -> None:
    run = subprocess.run([sys.executable, "-c", REQUEST_AT_EXIT.replace("HOW", how)], capture_output=True, text=True)
    assert "terminate called" not in run.stderr
    assert (run.returncode, run.stdout) == (0, "ends\n")


def test_the_end_of_a_process_does_not_wait_for_long_for_ranks_that_are_gone() -> None:
    program = REQUEST_AT_EXIT.replace("seconds=2", "seconds=100").replace("sleep(4)", "pass")
    wait = "def wait():\n    with threads_at_exit.waiting_for_ranks():\n        ask()\n"
    wait += "threads_at_exit.started('test', wait)"
    # The limit for requests that no other rank answers, so that a slow machine is told from the wrong limit.
    command = [sys.executable, "-c", program.replace("HOW", f"threads_at_exit._REQUEST_S = 100\n{wait}")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ends\n"
        began = time.monotonic()
        assert run.wait(150) == 0
    assert time.monotonic() - began < 50


def test_what_is_asked_is_answered_or_raised() -> None:
    assert rank_watch.answered("a test", 0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        rank_watch.answered("a test", 0, lambda: 1 // 0)


def test_ranks_that_stopped_together_are_named_together() -> None:
    """Of ranks 1 and 2 the last states were read seconds apart; rank 3 still answers."""
    store = dist.HashStore()
    watch = rank_watch.RankWatch(0, 4, store, alive=lambda: True, compared=lambda number: None)
    watch.stop()
    wait = rank_watch.RankWait([1, 2, 3], None, silent_s=16.0)

    def read(now: float, *beats: int) -> None:
        for rank, beat in zip(wait.ranks, beats, strict=True):
            store.set(rank_watch._state(rank), json.dumps([beat, None, "elsewhere|1|1"]))
        watch._read(wait, now)

    read(100.0, 7, 7, 7)
    read(104.2, 7, 8, 8)
    read(115.8, 7, 8, 22)
    assert not wait.why
    read(116.1, 7, 8, 22)
    assert wait.silent == [1, 2]
    assert wait.why.startswith("ranks 1-2 did not answer for 11 s")
