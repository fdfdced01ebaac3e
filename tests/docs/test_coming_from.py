"""Both sides of each diff in docs/coming_from.md run and print the same losses; the compiled side captures once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from harness import ScriptRun, run_script_on_ranks

PAGE = Path(__file__).parents[2] / "docs/coming_from.md"
BLOCK = re.compile(
    r"^## (.+?)$|^<!-- script: (\d) process(?:es)?(?:, needs (\w+))? -->\n```diff\n(.*?)^```", re.M | re.S
)
# What torch.compile makes rounds otherwise than eager.
EAGER = "import torch\ntorch.compile = lambda model: model\n"
# Printed after a script: how often each step was captured.
COUNT = """
import gc, sys, weft
from weft.compile import CompiledStep
print("captures", *{len(found.captures) for found in gc.get_objects() if type(found) is CompiledStep})
"""


class Diff(NamedTuple):
    """A script before and after."""

    title: str
    ranks: int
    needs: str
    text: str

    def side(self, mark: str) -> str:
        """The lines with ``mark`` and those without one."""
        lines = self.text.splitlines()
        return "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", mark))


def diffs() -> list[Diff]:
    found, title = [], ""
    for heading, ranks, needs, text in BLOCK.findall(PAGE.read_text()):
        title = heading or title
        if text:
            found.append(Diff(title, int(ranks), needs, text))
    return found


def outputs(file: Path, diff: Diff) -> list[ScriptRun]:
    if diff.needs:  # packages that start processes of their own
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(diff.ranks)]
        command = [sys.executable, *(launch if diff.ranks > 1 else []), str(file)]
        run = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=170)
        return [ScriptRun(run.returncode, run.stdout, run.stderr)]
    return run_script_on_ranks(file, diff.ranks)


@pytest.mark.gloo
@pytest.mark.parametrize("diff", diffs(), ids=lambda diff: diff.title)
def test_both_sides_of_a_diff_print_the_same_losses(
    diff: Diff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if diff.needs and importlib.util.find_spec(diff.needs) is None:
        pytest.skip(f"{diff.needs} is not installed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    losses = []
    for name, text in (("before", EAGER + diff.side("-")), ("after", diff.side("+") + COUNT)):
        file = tmp_path / name / "train.py"
        file.parent.mkdir()
        file.write_text(text)
        runs = outputs(file, diff)
        assert all(run.returncode == 0 for run in runs), "\n".join(run.stderr[-3000:] for run in runs)
        printed = "\n".join(run.stdout for run in runs)
        # The launchers of packages write the lines of all ranks to one stream, in any order.
        losses.append(sorted(re.findall(r"(?<!_)loss'?\W+([\d.]+)", printed)))
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 4
    counts = [int(count) for count in re.findall(r"captures (\d+)", printed)]
    # transformers fills a cache of its own in the first call, which the step reads.
    assert counts
    assert max(counts) <= (2 if diff.needs == "transformers" else 1)


def test_the_lines_of_torchtitan_that_change_are_there() -> None:
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or spec.origin is None or importlib.metadata.version("torchtitan") != "0.2.2":
        pytest.skip("torchtitan 0.2.2 is not installed")
    block = PAGE.read_text().partition("## torchtitan")[2].partition("```diff\n")[2].partition("```")[0]
    file = ""
    for line in block.splitlines():
        if line.endswith(".py"):
            file = (Path(spec.origin).parent.parent / line.strip()).read_text()
        elif not line.startswith("+"):
            assert f"{line[1:]}\n" in file


def test_the_page_has_a_diff_for_each_library() -> None:
    titles = re.findall(r"^## (.+)$", PAGE.read_text(), re.M)
    assert titles == ["FSDP2", "DDP", "torch.compile", "torchtitan", "Lightning", "accelerate", "HF Trainer"]
    assert [diff.title for diff in diffs()] == [title for title in titles if title != "torchtitan"]
