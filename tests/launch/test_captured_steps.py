"""Plans of steps that were captured before: they print what a plan that runs the script prints, and a script whose
inputs have changed runs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft import knobs
from weft.capture.step_interface import Input, Role
from weft.inductor.schedule import scheduled_graph
from weft.launch.captured_steps import _inputs
from weft.launch.cli import main

pytestmark = pytest.mark.fake

SCRIPT = """
    import os, pathlib, sys
    import torch, weft
    from torch import nn
    from widths import WIDTH

    here = pathlib.Path(__file__).parent
    with open(here / "runs", "a") as runs:
        runs.write("run ")
    torch.set_float32_matmul_precision("high")
    mesh = torch.distributed.init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicas", "shards"))

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    width = WIDTH * int((here / "factor").read_text()) * (2 if (here / "wide").exists() else 1)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for _ in range(int(sys.argv[1]))))
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if "HALF" in os.environ else torch.float32)
    for block in model:
        weft.fully_shard(block, mesh=mesh, mp_policy=policy)
    weft.fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    @weft.compile
    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    MORE
    train_step(torch.zeros(512, width, device="cuda"))
"""


class Project:
    """A folder with a training script, and plans of it."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder = folder
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT).replace("MORE", more))
        (folder / "widths.py").write_text("WIDTH = 256\n")
        (folder / "factor").write_text("1")

    def plan(self, *options: str, layers: int = 3) -> dict[str, Any]:
        """The numbers of a plan, and the lines that it prints."""
        out = self.folder / "out.json"
        main(["plan", str(self.folder / "train.py"), "--json", str(out), *options, "--", str(layers)])
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def fresh(self, *options: str) -> dict[str, Any]:
        """The numbers of a plan that nothing is kept for."""
        runs = (self.folder / "runs").read_text()
        with knobs.override(cache_dir=""):
            found = self.plan(*options)
        (self.folder / "runs").write_text(runs)
        return found

    @property
    def runs(self) -> int:
        """How often the script ran for plans other than :meth:`fresh`."""
        return len((self.folder / "runs").read_text().split())


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    with knobs.override(cache_dir=str(folder)):
        yield folder


@pytest.fixture
def project(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.syspath_prepend(str(tmp_path))  # so that it is taken away, with what was imported from there
    monkeypatch.setitem(sys.modules, "widths", None)
    monkeypatch.delitem(sys.modules, "widths")
    # Torch sets it when it is first needed. Each plan of a user's has a process of its own.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return Project(tmp_path)


def test_another_cluster_or_limit_gives_the_plan_of_a_fresh_run(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    first = project.plan()
    floor = sum(first["input_bytes"].values())
    between = (floor + 0.6 * (first["peak_bytes"] - floor)) / 2**30
    peaks = []
    for options in ((), ("--cluster", "h100x8"), ("--memory-limit", f"{between:.4f}")):
        capsys.readouterr()
        kept = project.plan(*options)
        printed = capsys.readouterr().out
        assert project.runs == 1, options
        assert kept == project.fresh(*options)
        assert capsys.readouterr().out == printed
        peaks.append(kept["peak_bytes"])
    assert peaks[-1] < peaks[0], "the limit changes nothing: values are not computed again"


def test_the_same_plan_again_searches_no_schedule(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    first = project.plan()
    floor = sum(first["input_bytes"].values())
    limit = "--memory-limit", f"{(floor + 0.6 * (first['peak_bytes'] - floor)) / 2**30:.4f}"
    recomputed = project.plan(*limit)

    def search(*_: object, **__: object) -> None:
        raise NotImplementedError("a search")

    monkeypatch.setattr(scheduled_graph, "schedule", search)
    assert project.plan() == first
    assert project.plan(*limit) == recomputed
    for others in (("--cluster", "h100x8"), ("--memory-limit", "70")):
        with pytest.raises(NotImplementedError):
            project.plan(*others)


def test_pages_with_other_batches_equal_those_of_a_fresh_run(project: Project) -> None:
    page = project.folder / "page.html"
    first = project.plan("--html", str(page), "--what-if", "yes")
    text = page.read_text()
    assert len(first["changes"]) > 3
    assert project.plan("--html", str(page), "--what-if", "yes") == first
    assert page.read_text() == text
    assert project.runs == 1
    assert project.fresh("--html", str(page), "--what-if", "yes") == first


def edited(name: str, text: str) -> Callable[[Project, pytest.MonkeyPatch], None]:
    def edit(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "widths")  # as in a process of its own
        (project.folder / name).write_text(text)

    return edit


CHANGES: dict[str, Callable[[Project, pytest.MonkeyPatch], Any]] = {
    "imported module": edited("widths.py", "WIDTH = 512\n"),
    "file that was read": edited("factor", "2"),
    "file that was looked for": edited("wide", ""),
    "script": lambda project, _: (project.folder / "train.py").write_text(
        (project.folder / "train.py").read_text().replace("4 * width", "8 * width")
    ),
    "environment": lambda _, monkeypatch: monkeypatch.setenv("HALF", "1"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_script_with_other_inputs_runs_again(
    project: Project, change: Callable[[Project, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = project.plan()
    change(project, monkeypatch)
    after = project.plan()
    assert project.runs == 2
    assert after["step_seconds"] != before["step_seconds"]
    assert after == project.fresh()


def test_other_arguments_ranks_and_batches_run_the_script(project: Project) -> None:
    project.plan()
    project.plan(layers=2)
    project.plan("--batch", "256")
    project.plan("--world-size", "8", "--rank", "1")
    assert project.runs == 4
    project.plan("--batch", "256", "--cluster", "h100x8")
    assert project.runs == 4


@pytest.mark.parametrize(
    "more",
    [
        "import subprocess; subprocess.run(['true'])",
        "weft.knobs.even_batches = not weft.knobs.even_batches",
        "import logging; logging.getLogger('weft.test').warning('something is odd')",
    ],
)
def test_a_script_that_depends_on_more_than_files_is_not_kept(
    project: Project, cache: Path, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs, "even_batches", knobs.even_batches)
    Project(project.folder, more).plan()
    assert not (cache / "captured").exists()


def test_a_damaged_entry_runs_the_script(project: Project, cache: Path) -> None:
    first = project.plan()
    for entry in (cache / "captured").rglob("*"):
        if entry.is_file():
            entry.write_bytes(entry.read_bytes()[:-100])
    assert project.plan() == first
    assert project.runs == 2


def test_kept_inputs_are_those_of_the_capture() -> None:
    """Passes decide by their axes."""
    found = Input("weight", Role.PARAMETER, "model.weight", "[4] as R", (("dp", False), ("tp", True)))
    entry = [found.name, found.role.value, found.path, found.sharding, found.axes]
    assert _inputs(json.loads(json.dumps([entry]))) == [found]
