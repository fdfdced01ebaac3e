"""`weft launch` on a real Slurm of one node: jobs of two ranks, preempted and requeued, cancelled, refused."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import missing, slurm_cluster

from weft.launch.cli import main
from weft.launch.run_folder import find_run
from weft.launch.slurm import job_state

SLOW_EXAMPLE = Path(__file__).parent / "slow_example.py"

pytestmark = [pytest.mark.slurm, pytest.mark.gloo]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    pytest.importorskip("submitit")
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, slurm_cluster(Path(folder)) as environment:
        yield environment


@pytest.fixture(autouse=True)
def on_cluster(cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's clients find the cluster; the working folder is empty."""
    for name, value in {**cluster, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"still {job_state(find_run(None, Path('weft_runs')).launch().job)}"
        time.sleep(0.1)


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def test_a_preempted_job_loses_no_step_and_is_requeued(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--processes", "2", "--partition", "low", "--requeue"]
    os.environ["SECONDS_A_STEP"] = "0.05"
    main(["launch", str(SLOW_EXAMPLE), *options, "--", "--steps", "80", "--save-every", "1000"])
    assert "job 1 is submitted: 1 x 2 ranks" in capsys.readouterr().out
    (job,) = (find_run(None, Path("weft_runs")).launch().job,)
    wait_for(lambda: len(lines("checkpoints.jsonl")) > 10)
    subprocess.run(["srun", "-p", "high", "-n2", "true"], check=True, timeout=100)
    wait_for(lambda: job_state(job) == "PENDING")
    main(["status", job])
    assert "pending (requeued)" in capsys.readouterr().out
    subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=True)
    main(["logs", "--follow", job])
    printed = capsys.readouterr().out
    assert job_state(job) == "COMPLETED", printed
    rows = [json.loads(line) for line in lines("checkpoints.jsonl")]
    assert [row["step"] for row in rows] == list(range(1, 81))  # no step lost, none taken twice
    assert f"requeueing job {job}" in printed


SLEEPING = "import os, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(300)\n"


def test_a_cancelled_job_ends_and_is_not_requeued(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sleeping.py").write_text(SLEEPING)
    main(["launch", "sleeping.py", "--processes", "2", "--nodes", "1", "--requeue"])
    job = find_run(None, Path("weft_runs")).launch().job
    wait_for(lambda: any("rank 0" in line for line in lines(f"{find_run(job, Path('weft_runs')).job_log(job)}")))
    main(["cancel", job])
    main(["logs", "--follow", job])
    assert job_state(job) == "CANCELLED"
    assert "requeueing" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="does not run: cancelled"):
        main(["cancel", job])


def test_a_job_whose_rank_fails_has_failed_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    Path("failing.py").write_text("import os\nassert os.environ['RANK'] == '0', 'planted'\n")
    main(["launch", "failing.py", "--processes", "2", "--partition", "low"])
    main(["logs", "--follow"])
    assert "AssertionError: planted" in capsys.readouterr().out
    main(["status", find_run(None, Path("weft_runs")).launch().job])
    assert "node 0: rank 1" in capsys.readouterr().out
    assert job_state(find_run(None, Path("weft_runs")).launch().job) == "FAILED"


def test_what_slurm_does_not_have_is_said_before_a_folder_is_made() -> None:
    Path("job.py").write_text("")
    with pytest.raises(SystemExit, match=r"there is no partition lo\. Partitions: high, low"):
        main(["launch", "job.py", "--processes", "1", "--partition", "lo"])
    with pytest.raises(SystemExit, match="sbatch refuses the job: "):
        main(["launch", "job.py", "--processes", "1", "--nodes", "1", "--slurm", "constraint=none"])
    assert not list(Path("weft_runs").glob("*"))
