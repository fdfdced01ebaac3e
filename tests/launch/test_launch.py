"""`weft launch` on this machine: what it says of what is missing, what it starts, and how runs are seen and ended."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import run_ranks
from weft.errors import CannotLaunch
from weft.inductor.transports.symmetric_memory import NO_MULTICAST
from weft.launch import slurm
from weft.launch.cli import main
from weft.launch.run_folder import LaunchRecord, NodeState, RunFolder, find_run

ROOT = Path(__file__).parents[2]
SLOW_EXAMPLE = ROOT / "tests" / "launch" / "slow_example.py"

SCRIPT = """
import json, os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
names = [*json.loads(sys.argv[1]), "CUDA_VISIBLE_DEVICES", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
values = [os.environ.get(name) for name in names]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "attempt", attempt, values, flush=True)
open(f"printed_{rank}_{attempt}", "w").close()
if sys.argv[2] == "fail" and rank == "1":
    while not os.path.exists(f"printed_0_{attempt}"):  # a rank that fails ends the others
        time.sleep(0.01)
    raise ValueError(f"planted in attempt {attempt}")
if sys.argv[2] == "sleep":
    time.sleep(120)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`weft launch` in a process of its own, in the working folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "weft.launch", "launch", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.py"], r"none\.py is no file"),
        (["job.py"], "no GPU that torch can use. --processes 2"),
        (["job.py", "--gpus", "2"], "no GPU that torch can use"),
        (["job.py", "--gpus", "1", "--processes", "1"], "both given"),
        (["job.py", "--processes", "0"], "--processes is 0. It must be at least 1"),
        (["job.py", "--processes", "1", "--max-restarts", "-1"], "--max-restarts is -1"),
        (["job.py", "--processes", "1", "--requeue"], "are for Slurm jobs"),
        (["job.py", "--processes", "1", "--logs", "job.py"], r"job\.py is a file"),
        (["job.py", "--processes", "1", "--address", "here"], "--address is here. It is host:port"),
        (["job.py", "--processes", "1", "--address", "here:1", "--nodes", "2", "--node", "2"], "counted from 0"),
        (["job.py", "--nodes", "2", "--dry-run"], "neither --gpus nor --processes"),
        (["job.py", "--nodes", "2", "--gpus", "8"], "sbatch is not in PATH"),
        (["job.py", "--nodes", "2", "--gpus", "8", "--slurm", "account", "--dry-run"], "a name and a value"),
        (["job.py", "--nodes", "2", "--gpus", "8", "--slurm", "acount=x", "--dry-run"], "acount.*account"),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    arguments: list[str], message: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "acount=x" in arguments:
        pytest.importorskip("submitit")
    found = shutil.which
    monkeypatch.setattr(slurm.shutil, "which", lambda name, **_: None if name == "sbatch" else found(name))
    with pytest.raises(SystemExit, match=rf"(?s)^weft: .*{message}"):
        main(["launch", *arguments])


def test_a_port_that_is_taken_is_said_and_nothing_starts(script: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port} of this machine cannot be used.*--port"):
            main(["launch", "job.py", "--processes", "1", "--port", str(port)])
    assert not Path("weft_runs").exists()


def test_submitit_that_is_not_installed_is_said(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SystemExit, match=r"submitit is not installed. pip install 'weft\[slurm\]'"):
        main(["launch", "job.py", "--processes", "1", "--nodes", "1", "--dry-run"])


def test_a_dry_run_prints_the_script_and_writes_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("submitit")
    options = ["--nodes", "2", "--gpus", "8", "--partition", "large", "--requeue", "--minutes", "90"]
    main(["launch", "job.py", *options, "--stop-seconds", "300", "--slurm", "account=physics", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    options = ["account=physics", "nodes=2", "gpus-per-node=8", "partition=large", "time=90", "signal=USR2@300"]
    for option in (*options, "requeue", "ntasks-per-node=1", "cpus-per-task=64"):
        assert f"#SBATCH --{option}" in lines
    assert any(line.startswith("srun ") and "submitit" in line for line in lines)
    main(["launch", "job.py", "--processes", "2", "--dry-run", "--", "--lr", "3"])
    assert capsys.readouterr().out.endswith(f"--standalone {script} --lr 3\n")
    assert os.listdir() == ["job.py"]


@pytest.mark.gloo
def test_ranks_get_the_environment_and_a_failed_rank_is_named_and_restarted(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--processes", "2", "--max-restarts", "1", "--", json.dumps(list(NO_MULTICAST)), "fail"]
    process = start("job.py", *options)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    values = [*NO_MULTICAST.values(), "", "1"]
    for attempt in range(2):
        assert f"rank 0 of 2 attempt {attempt} {values}" in printed
        assert f"rank 1 of 2 attempt {attempt}" not in printed  # only rank 0 is shown
    (said,) = (line for line in printed.splitlines() if line.startswith("weft launch: rank 1"))
    assert "ended with status 1; its log:" in said
    assert "ValueError: planted in attempt 1" in printed.partition(said)[2]

    main(["logs", "--rank", "1"])
    assert f"rank 1 of 2 attempt 1 {values}" in capsys.readouterr().out
    (run,) = os.listdir("weft_runs")
    main(["status", run])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{run} - 1 x 2 failed" in shown
    assert f"{run}, node 0: rank 1" in shown
    with pytest.raises(SystemExit, match=r"does not run: failed. There is nothing to end"):
        main(["cancel", run])


@pytest.mark.gloo
def test_a_run_is_cancelled_by_name_and_followed_to_its_end(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start("job.py", "--processes", "2", "--", "[]", "sleep")
    try:
        until = time.monotonic() + 60
        folders = lambda: list(Path("weft_runs").glob("*/node0/*/attempt_0/1/stdout.log"))
        while not any(path.read_text() for path in folders()) and time.monotonic() < until:
            time.sleep(0.05)
        (run,) = os.listdir("weft_runs")
        main(["status"])
        assert f"{run} - 1 x 2 running" in " ".join(capsys.readouterr().out.split())
        main(["cancel", run])
        main(["logs", "--follow"])
        assert process.wait(30) == 128 + 15
        main(["status"])
        printed = " ".join(capsys.readouterr().out.split())
        assert "rank 0 of 2 attempt 0" in printed
        assert f"{run} - 1 x 2 stopped" in printed
    finally:
        process.kill()
        process.communicate()


def test_runs_are_found_by_folder_name_and_job_the_newest_first(tmp_path: Path) -> None:
    first, second = (RunFolder.new(tmp_path, Path("a.py")) for _ in range(2))
    assert first.path != second.path
    for at, folder in enumerate((first, second)):
        folder.write_launch(LaunchRecord(("a.py", "x"), 2, 4, job=str(10 + at)))
        os.utime(folder.path / "launch.json", (at, at))
    assert find_run(None, tmp_path).path == second.path
    assert find_run("10", tmp_path).path == first.path
    assert find_run(first.path.name, tmp_path).path == first.path
    assert find_run(str(first.path), Path("elsewhere")).launch().command == ("a.py", "x")
    with pytest.raises(CannotLaunch, match=f"there is no run 12 in .*Runs there: {second.path.name}, "):
        find_run("12", tmp_path)
    with pytest.raises(CannotLaunch, match="there are no runs in"):
        find_run(None, tmp_path / "absent")


def test_a_run_whose_process_is_gone_counts_as_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.new(tmp_path, Path("a.py"))
    child = subprocess.Popen(["true"])
    child.wait()
    folder.write_launch(LaunchRecord(("a.py",), 1, 1, pid=child.pid, host=socket.gethostname()))
    folder.write_state(0, NodeState("running"))
    main(["status", str(folder.path)])
    assert "killed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="does not run: killed"):
        main(["cancel", str(folder.path)])


def losses(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in map(json.loads, path.read_text().splitlines())]


def uninterrupted(rank: int, world: int, folder: str) -> None:
    """The example in processes that have torch loaded already, and a process group."""
    sys.argv = ["train_resumable.py", "--steps", "30", "--save-every", "10", "--folder", folder]
    dist.init_process_group = lambda *_, **__: None
    dist.destroy_process_group = lambda *_: None
    runpy.run_path(str(ROOT / "examples" / "train_resumable.py"), run_name="__main__")


@pytest.mark.gloo
def test_a_run_whose_rank_is_killed_goes_on_with_the_bits_of_the_uninterrupted_one(script: Path) -> None:
    """Rank 0, which holds the store, is killed after step 15: the steps since the save of step 10 are lost."""
    options = ["--steps", "30", "--save-every", "10", "--folder", "killed"]
    environment = {"SECONDS_A_STEP": "0.01", "FAULTS": "0:15:0:kill"}
    run = start(str(SLOW_EXAMPLE), "--processes", "2", "--max-restarts", "1", "--", *options, **environment)
    run_ranks(uninterrupted, 2, "whole")
    printed = run.communicate(timeout=150)[0]
    assert run.returncode == 0, printed
    whole, killed = losses(Path("whole.jsonl")), losses(Path("killed.jsonl"))
    assert [step for step, _ in whole] == list(range(1, 31))
    assert len(killed) > len(whole)  # steps after the last save were taken again
    assert set(killed) == set(whole)
    assert "failed (exitcode: -9) local_rank: 0" in printed
