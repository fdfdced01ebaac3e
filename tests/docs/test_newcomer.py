"""A newcomer with a fresh clone: the README's program and the commands that a machine without GPUs can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import page_parts

ROOT = Path(__file__).parents[2]


@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_run_in_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    if subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], capture_output=True).returncode:
        pytest.skip("not a git checkout")
    # Stands for the installed command; tests/test_packaging.py installs the wheel.
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "weft"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m weft.launch "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), str(command.parent), os.environ["PATH"]])
    work = tmp_path / "work"
    work.mkdir()
    run = subprocess.run(
        [sys.executable, str(clone / ".ci/newcomer.py"), str(clone), "--quick"],
        cwd=work,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(clone / ".types"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "README.md: weft plan train.py --world-size 1024 --cluster h200x8 --html plan.html" in run.stdout
    assert (work / "plan.html").stat().st_size > 10_000
    assert "README.md: weft logs --follow: needs Slurm" in run.stdout
    assert run.stdout.rstrip().endswith("0 failed")


def test_commands_are_found_without_comments_and_prose() -> None:
    text = """
A line.

    weft plan train.py --x 1    # what it does
    .ci/newcomer python3        # a script
    TORCH_LOGS="+weft" torchrun train.py
    loss.backward()
    weft.explain(step)

```python
    python not_a_command
```
<!--
    make nothing
-->
"""
    assert list(page_parts.commands(text)) == [
        "weft plan train.py --x 1",
        ".ci/newcomer python3",
        'TORCH_LOGS="+weft" torchrun train.py',
    ]
