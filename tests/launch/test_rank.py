"""Ranks as `weft launch` starts them: the script is the main module, and a process that is to end does so at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, multiprocessing, os, pickle, sys, threading, time
import beside

class Local: ...

def child(queue):
    queue.put((__name__, pickle.dumps(Local)))

class Loud:
    def __del__(self):
        os.write(1, b"collected\\n")

if __name__ == "__main__":
    loud = Loud()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    context.Process(target=child, args=(queue,)).start()
    name, data = queue.get()
    print(sys.argv[1:], __file__, name, __name__, beside.__name__)
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    how = sys.argv[1]
    if how == "raise":
        raise ValueError("planted")
    if how == "status":
        raise SystemExit(7)
    if how == "text":
        sys.exit("a text")
    if how == "stop":
        import signal, weft
        weft.stopping()
        os.kill(os.getpid(), signal.SIGTERM)
        assert weft.stopping()
"""


@pytest.mark.parametrize(
    ("how", "status", "collected"),
    [("end", 0, True), ("raise", 1, False), ("status", 7, False), ("text", 1, False), ("stop", 0, False)],
)
def test_a_rank_runs_the_script_as_python_does_and_ends_without_looking_through_its_objects(
    how: str, status: int, collected: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    run = lambda *command: subprocess.run(
        [sys.executable, *command, how], capture_output=True, text=True, timeout=100, check=False, env={**os.environ}
    )
    by_python, by_weft = run(str(script)), run("-m", "weft.launch.rank", str(script))
    assert by_python.returncode == by_weft.returncode == status
    assert by_weft.stderr == by_python.stderr
    ends = [text.stdout.splitlines() for text in (by_python, by_weft)]
    assert "collected" in ends[0]
    assert ("collected" in ends[1]) is collected
    assert [line for line in ends[1] if line != "collected"] == [line for line in ends[0] if line != "collected"]
    assert ends[1][0] == f"['{how}'] {script} __mp_main__ __main__ beside"
