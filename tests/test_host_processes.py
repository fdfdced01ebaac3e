"""Whether a process of this host runs, is stopped or has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from weft import host_processes

SCRIPT = "import sys; from weft import host_processes; print(host_processes.identity(), flush=True); sys.stdin.read()"


def test_a_process_runs_is_stopped_and_has_ended() -> None:
    here = host_processes.identity()
    assert host_processes.state_of(here, here) == "running"
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        other = process.stdout.readline().strip()
        assert host_processes.state_of(other, here) == "running"
        process.send_signal(signal.SIGSTOP)
        _until(other, here, "stopped")
        process.kill()
        _until(other, here, "ended")  # nobody has asked for its status yet: it is a zombie
        process.wait()
        assert host_processes.state_of(other, here) == "ended"


def test_another_process_with_the_same_number_is_not_taken_for_it() -> None:
    here = host_processes.identity()
    where, pid, started = here.rsplit("|", 2)
    assert pid == str(os.getpid())
    assert host_processes.state_of(f"{where}|{pid}|{int(started) - 1}", here) == "ended"


def test_nothing_is_said_of_processes_on_other_hosts() -> None:
    here = host_processes.identity()
    assert host_processes.state_of(f"elsewhere {here}", here) == ""


def _until(process: str, here: str, state: str) -> None:
    end = time.monotonic() + 10
    while host_processes.state_of(process, here) != state:
        assert time.monotonic() < end
        time.sleep(0.01)
