"""The demo from end to end, a few steps of it, as torchrun starts it: it must say what it promises to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import run_script_on_ranks

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.gloo


SCRIPT = ROOT / "examples/train_lm.py"
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def arguments(out: Path) -> list[str]:
    return ["--steps", "2", "--sample", "8", "--out", str(out)]


def run_demo(out: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, str(SCRIPT), *arguments(out)], capture_output=True, text=True, env=os.environ | ON_CPU
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_compiled_and_peer_train_alike(tmp_path: Path) -> None:
    said = run_demo(tmp_path / "compiled")
    assert "compiled against uncompiled, first 2 losses: largest difference 0 (equal bit for bit)" in said
    assert "a bigram model of the same text" in said
    assert "tokens/s" in said
    assert "a sample:" in said
    assert (tmp_path / "compiled" / "loss.png").stat().st_size > 5000
    for run in run_script_on_ranks(SCRIPT, 2, *arguments(tmp_path / "peer"), "--peer", variables=ON_CPU):
        assert run.returncode == 0, run.stdout + run.stderr
    assert losses(tmp_path / "peer") == pytest.approx(losses(tmp_path / "compiled"), rel=1e-6)
