"""The command line: its help, its mistakes, and that it writes what was measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console

import weft
from weft import knobs
from weft.inductor.cost.calibrate import Calibration
from weft.inductor.cost.cluster import Cluster, load_cluster
from weft.inductor.transports.symmetric_memory import NO_MULTICAST
from weft.launch.calibrate import show
from weft.launch.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without torchrun, and as before once a test has ended."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *NO_MULTICAST):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize(
    "arguments", [[], ["calibrat"], ["calibrate", "--scale", "huge"], ["calibrate", "--into", "x"]]
)
def test_what_is_not_understood_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "weft" in "".join(capsys.readouterr())


def test_calibrate_alone_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", "--out", str(tmp_path / "mine.toml"), "--scale", "tiny"])
    cluster = load_cluster(tmp_path / "mine.toml")
    assert cluster.gpus_per_node == 1
    assert (tmp_path / "mine.toml").read_text().startswith("# Written by `weft calibrate`")
    printed = capsys.readouterr().out
    assert "matmul bfloat16" in printed
    assert "torchrun" in printed
    assert "mine.toml" in printed.replace("\n", "")
    assert {name: os.environ[name] for name in NO_MULTICAST} == NO_MULTICAST


def test_calibrate_writes_where_weft_looks(tmp_path: Path) -> None:
    with knobs.override(cache_dir=str(tmp_path)):
        main(["calibrate"])
    (file,) = (tmp_path / "clusters").iterdir()
    assert load_cluster(file).name == file.stem


def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    main(["calibrate", "--out", str(tmp_path / "mine.toml")])
    assert os.environ["NCCL_NVLS_ENABLE"] == "2"


def test_a_mistake_that_weft_knows_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.launch.calibrate.calibrate", lambda: load_cluster("h300x8"))
    with pytest.raises(SystemExit, match=r"^weft: cluster='h300x8' is not known"):
        main(["calibrate"])


def test_what_was_measured_stands_beside_what_ships() -> None:
    base = load_cluster("h200x8")
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(Calibration(base, base, tuple((transport, 0.07) for transport in base.transports), True), console)
    lines = console.export_text().splitlines()
    (products,) = (line for line in lines if "matmul bfloat16" in line)
    assert products.count("720") == 2
    (gather,) = (line for line in lines if "nccl all_gather" in line)
    assert [word for word in gather.split() if word[0].isdigit()] == ["338", "40", "14.4", "45%", "7%"]
    assert any("between nodes: 45 GB/s" in line for line in lines)


CONSOLE_SCRIPT = """
import atexit, os, sys
import {module}

class Loud:
    def __del__(self):
        os.write(1, b"collected")

loud = Loud()
atexit.register(print, "at exit")
{module}.{name}()
"""


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (["--help"], 0, "calibrate"),
        (["plan", "--help"], 0, "--world-size"),
        (["plam"], 2, "weft"),
        (["plan", "absent.py", "--world-size", "2"], 1, "absent.py"),
    ],
)
def test_the_console_script_ends_with_the_status_and_without_looking_through_its_objects(
    arguments: list[str], status: int, printed: str
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["weft"].partition(":")
    script = CONSOLE_SCRIPT.format(module=module, name=name)
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == status, run.stderr
    assert printed in run.stdout + run.stderr
    assert "at exit" in run.stdout
    assert "collected" not in run.stdout


@pytest.mark.gloo
def test_torchrun_starts_it(tmp_path: Path) -> None:
    """Two processes of `python -m weft.launch`; one writes and prints."""
    out = tmp_path / "two.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "weft.launch", "calibrate", "--out", str(out)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("written to") == 1
    cluster: Cluster = load_cluster(out)
    assert cluster.gpus_per_node == 2
    assert {transport.name for transport in cluster.transports} == {"gloo"}


def test_checkpoint_verify_ends_with_1_and_names_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(3, 4)
    state = weft.TrainState(model=model)
    for step in (1, 2):
        state.save(tmp_path, step, wait=True)
    main(["checkpoint", "list", str(tmp_path)])
    assert "step_000000002" in capsys.readouterr().out.replace("\n", "")
    main(["checkpoint", "show", str(tmp_path)])
    assert "model.weight: float32[4, 3]" in capsys.readouterr().out
    for path, status in ((tmp_path, 0), (tmp_path / "step_000000001", 0)):
        with pytest.raises(SystemExit) as end:
            main(["checkpoint", "verify", str(path)])
        assert end.value.code == status
    data = tmp_path / "step_000000002" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(SystemExit) as end:
        main(["checkpoint", "verify", str(tmp_path)])
    assert end.value.code == 1
    assert "step_000000002: __0_0.distcp has" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no checkpoint in"):
        main(["checkpoint", "verify", str(tmp_path / "absent")])


def test_version_is_that_of_the_package() -> None:
    command = [sys.executable, "-m", "weft.launch", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"weft {weft.__version__}\n"
