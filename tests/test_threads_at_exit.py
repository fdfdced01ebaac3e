"""Programs that drop tensors of collectives and end at once, while gloo's threads get no processor."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """
import os
import torch
import torch.distributed as dist
import weft

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
for task in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{task}/comm") as file:
        if file.read().strip() == "pt_gloo_runloop":
            os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
step = weft.compile(lambda x: torch.distributed.nn.functional.all_reduce(x * 2).sum())
for _ in range(3):
    print(float(step(torch.ones(4))), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def busy_processors() -> Iterator[None]:
    """Other processes use every processor."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


@pytest.mark.gloo
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux alone has such threads")
@pytest.mark.usefixtures("busy_processors")
def test_a_program_ends_with_status_0_while_threads_of_gloo_wait_for_a_processor(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    # Python itself, because forked processes of the test harness end without finalizing the interpreter.
    command = [sys.executable, str(tmp_path / "train.py")]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=150)
        assert rank.returncode == 0, err.decode()
        assert out.split() == [b"16.0"] * 3
