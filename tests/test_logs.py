"""Log lines of weft carry the rank, once, whoever formats them."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft import logs
from weft.capture.fake.fake_world import fake_world

log = logging.getLogger("weft.capture.somewhere")


def test_no_rank_no_prefix(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    log.warning("%d nodes", 3)
    assert caplog.messages == ["3 nodes"]


def test_the_rank_of_the_process_group(caplog: pytest.LogCaptureFixture) -> None:
    with fake_world(16, 7):
        log.warning("%d nodes", 3)
        logging.getLogger("weft").error("100%")
        logging.getLogger("weftless").error("not weft's")
        logging.getLogger("torch").error("nor torch's")
        assert caplog.messages == ["[rank 7] 3 nodes", "[rank 7] 100%", "not weft's", "nor torch's"]


def test_the_rank_of_torchrun(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    log.warning("before the process group")
    assert caplog.messages == ["[rank 5] before the process group"]


def test_records_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    record = logging.getLogRecordFactory()("weft.x", logging.INFO, "file", 1, "%s", ("text",), None)
    assert isinstance(record, logs.RankedRecord)
    for other in (copy.copy(record), pickle.loads(pickle.dumps(record))):
        assert other.getMessage() == "[rank 2] text"


def test_another_factory_keeps_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(logging.LogRecord):
        pass

    before = logging.getLogRecordFactory()
    try:
        logging.setLogRecordFactory(Mine)
        logs.install()
        ours = logging.getLogRecordFactory()
        logs.install()
        assert logging.getLogRecordFactory() is ours
        assert type(ours("weft", logging.INFO, "file", 1, "text", (), None)) is Mine
    finally:
        logging.setLogRecordFactory(before)


SCRIPT = """
import logging
import torch.distributed as dist
import weft
log = logging.getLogger("weft.capture.somewhere")
log.warning("early")
dist.init_process_group("gloo")
log.warning("first line\\nsecond line")
logging.basicConfig(format="plain %(message)s", force=True)
log.warning("to both")
dist.destroy_process_group()
"""


@pytest.mark.gloo
@pytest.mark.parametrize("torch_logs", ["+weft", None])
def test_two_processes_with_and_without_torch_logs(tmp_path: Path, torch_logs: str | None) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCH_LOGS": torch_logs} if torch_logs else {}
    store = "--standalone", "--nproc-per-node", "2"
    command = [sys.executable, "-m", "torch.distributed.run", *store, str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    for rank in range(2):
        lines = [line for line in run.stderr.splitlines() if re.search(rf"\[rank ?{rank}\]", line)]
        assert all(line.count("[rank") == 1 for line in lines)
        if torch_logs:
            early, first, second, *both = lines
            assert re.search(rf"\] \[rank {rank}\] early$", early)
            assert re.match(rf"\[rank{rank}\]:W.*\] first line$", first)
            assert re.match(rf"\[rank{rank}\]:W.*\] second line$", second)
            torchs, plain = sorted(both)
            assert re.match(rf"\[rank{rank}\]:W.*\] to both$", torchs)
            assert plain == f"plain [rank {rank}] to both"
        else:
            assert lines == [
                f"[rank {rank}] early",
                f"[rank {rank}] first line",
                f"plain [rank {rank}] to both",
            ]
