"""examples/train_resumable.py with steps that take a while, so that something can happen to it.

SECONDS_A_STEP: how long each takes more than it does. FAULTS: `rank:step:attempt:what` for each fault that happens by
itself, where `what` is kill, store (the same, for rank 0, which holds the store), term, raise, stop (a hung process),
slow or full (a disk). FAULTS_UNTIL: the time of the monotonic clock after which none happens.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import time
from pathlib import Path

import torch.distributed as dist

import weft

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_resumable.py"

_stopping = weft.stopping
_calls = 0


def slow_stopping() -> bool:
    global _calls
    stop = _stopping()
    time.sleep(float(os.environ.get("SECONDS_A_STEP", "0.02")))
    if time.monotonic() > float(os.environ.get("FAULTS_UNTIL", "inf")):
        return stop
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for fault in filter(None, os.environ.get("FAULTS", "").split(",")):
        rank, call, when, what = fault.split(":")
        if (int(rank), int(call), int(when)) == (dist.get_rank(), _calls, attempt):
            fail(what)
    _calls += 1
    return stop


def fail(what: str) -> None:
    print(f"planted: {what}", flush=True)
    if what == "raise":
        raise ValueError("planted")
    if what == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    elif what == "slow":
        time.sleep(3.0)
    else:
        os.kill(os.getpid(), {"stop": signal.SIGSTOP, "term": signal.SIGTERM}.get(what, signal.SIGKILL))


weft.stopping = slow_stopping  # type: ignore[assignment]
runpy.run_path(str(EXAMPLE), run_name="__main__")
