"""Ranks that stop at the same step after a signal to one of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from harness import run_ranks
from weft.distributed.stop_signal import StoreRequests
from weft.errors import StoreLost


def train(rank: int, world: int, told: int, number: int, ahead: bool) -> Any:
    """Steps until the ranks stop. Rank ``told`` gets the signal; with ``ahead`` no collective keeps ranks together."""
    draw = random.Random(rank)
    for step in range(1, 2000):
        if rank == told and step == 7:
            os.kill(os.getpid(), number)
        if not ahead:
            dist.all_reduce(torch.ones(1))
        time.sleep(draw.random() * 0.002)
        if weft.stopping():
            return step, weft.stopping()
    return None, False


@pytest.mark.gloo
@pytest.mark.parametrize("ahead", [False, True], ids=["with collectives", "running ahead"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_all_ranks_stop_at_the_same_step(number: int, ahead: bool) -> None:
    results = run_ranks(train, 3, 1, int(number), ahead)
    steps = {step for step, _ in results}
    assert len(steps) == 1
    assert 7 <= (steps.pop() or 0) < 2000
    assert all(again for _, again in results)


@pytest.mark.gloo
def test_decisions_of_long_ago_leave_the_store() -> None:
    assert all(run_ranks(keys_left, 2))


def keys_left(rank: int, world: int) -> bool:
    for call in range(3500):
        weft.stopping()
        if call % 500 == 0:
            dist.barrier()
    dist.barrier()
    return dist.distributed_c10d._get_default_store().num_keys() < 3000


def test_a_store_that_does_not_answer_is_an_error_and_not_a_wait() -> None:
    """As where the process that holds it is stopped."""
    ask = StoreRequests(silent_s=0.2)
    assert ask(max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        ask(divmod, 1, 0)
    with pytest.raises(StoreLost, match=r"weft\.stopping"):
        ask(time.sleep, 0.5)
    time.sleep(0.5)
    with pytest.raises(StoreLost, match=r"weft\.stopping"):  # not the answer of the request before
        ask(max, 1, 2)


SCRIPT = """
    import os, signal, sys, time
    import weft
    weft.stopping()
    if sys.argv[1] == "fork":
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not weft.stopping()
    else:
        for _ in range(3):  # copies of one signal, as clusters and launchers send them
            os.kill(os.getpid(), signal.SIGTERM)
            assert weft.stopping()
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    print("end")
"""


@pytest.mark.parametrize(("kind", "status"), [("fork", 0), ("twice", -signal.SIGTERM)])
def test_forked_workers_ignore_the_signal_and_a_second_one_ends_the_process(kind: str, status: int) -> None:
    script = textwrap.dedent(SCRIPT)
    done = subprocess.run([sys.executable, "-c", script, kind], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    assert ("end" in done.stdout) is (status == 0)


def test_the_first_call_in_another_thread_is_refused() -> None:
    code = (
        "import threading, weft\n"
        "def call():\n"
        "    try: weft.stopping()\n"
        "    except ValueError as error: print(error)\n"
        "thread = threading.Thread(target=call); thread.start(); thread.join()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "main thread" in done.stdout
