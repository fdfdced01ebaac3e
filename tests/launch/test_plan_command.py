"""``weft plan``: scripts as people write them, without a GPU, and what it says of those that it cannot plan."""

from __future__ import annotations

import json
import multiprocessing
import textwrap
from pathlib import Path

import pytest

from weft.launch.cli import main
from weft.launch.plan import sweep_table
from weft.launch.plan_jobs import PlanJob
from weft.launch.script_run import Script

pytestmark = pytest.mark.fake

SCRIPT = """
    import os, sys
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.data import DataLoader, TensorDataset

    def train_step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def main():
        width, batch = int(sys.argv[1]), int(sys.argv[2])
        local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
        device = torch.device("cuda", local)
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=device)
        torch.cuda.manual_seed_all(0)
        print(torch.cuda.get_device_name(), torch.cuda.mem_get_info(), torch.cuda.get_device_capability())
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model)
        model.to_empty(device=device)
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter)
        model = torch.compile(model).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        dcp.load({"model": model.state_dict()}, checkpoint_id="/nowhere")
        loader = DataLoader(TensorDataset(torch.randn(64, width)), batch_size=batch, num_workers=2, pin_memory=True)
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        for (x,) in loader:
            with torch.cuda.stream(stream):
                x = x.pin_memory().to(device, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            loss = train_step(model, optimizer, x)
            event.record()
            print(loss.item(), torch.cuda.max_memory_allocated())

    if __name__ == "__main__":
        main()
"""

COMPILED = """
    import torch, weft
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(64, 64).to("cuda"))

    @weft.compile
    def first(x):
        model(x).sum().backward()
        model.module.weight.grad = None

    @weft.compile
    def second(x):
        model(x).square().sum().backward()
        model.module.weight.grad = None

    for rows in (8, 8, 32):
        first(torch.randn(rows, 64, device="cuda"))
        second(torch.randn(rows, 64, device="cuda"))
"""


def script(folder: Path, text: str) -> str:
    file = folder / "train.py"
    file.write_text(textwrap.dedent(text))
    return str(file)


def planned(folder: Path, *arguments: str) -> dict[str, object]:
    """The numbers that the command writes."""
    out = folder / "out.json"
    main(["plan", *arguments[:1], "--json", str(out), *arguments[1:]])
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_an_ordinary_script_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, trace = script(tmp_path, SCRIPT), tmp_path / "trace.json"
    options = ("--compile-function", "train_step", "--world-size", "16", "--trace", str(trace), "--batch", "6")
    found = planned(tmp_path, file, *options, "--", "256", "4")
    assert (found["world_size"], found["samples"], found["fits"], found["name"]) == (16, 6, True, "train_step")
    assert found["input_bytes"] == {"parameter": 3 * 4 * 256 * 256 // 16} | {
        role: size
        for role, size in found["input_bytes"].items()
        if role != "parameter"  # type: ignore[union-attr]
    }
    assert {each["kind"] for each in found["collectives"]} == {"all_gather", "reduce_scatter"}  # type: ignore[union-attr]
    assert json.loads(trace.read_text())["traceEvents"]
    said = capsys.readouterr()
    assert "where the step goes" in said.out
    assert "fake" in said.err  # what the script prints


def test_a_compiled_step_is_found_by_name_number_and_form(tmp_path: Path) -> None:
    file = script(tmp_path, COMPILED)
    assert planned(tmp_path, file)["name"] == "first"
    assert planned(tmp_path, file, "--nth", "2")["name"] == "second"
    found = planned(tmp_path, file, "--step", "second", "--steps", "2")
    assert (found["name"], found["samples"]) == ("second", 32)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x = 1", [], "compiles"),
        ("import torch\nx = torch.ones(3)\nif x.sum() > 4: x = 1", [], r"train.py:3 in <module>.*no values"),
        ("raise ValueError('what')", [], r"train.py:1 in <module>: ValueError: what"),
        ("raise SystemExit(3)", [], "exit 3"),
        ("def step(): pass", ["--compile-function", "train_step"], "It has step"),
        ("x = (", [], "Python cannot read it"),
        ("x = 1", ["--world-size", "8,x"], "whole numbers"),
        ("x = 1", ["--memory-limit", "45GB"], "GiB, or none"),
        ("x = 1", ["--cluster", "h300"], "h200x8"),
        ("x = 1", ["--html", "/nowhere/page.html"], "cannot be written"),
        ("x = 1", ["--html", "page.html", "--batch", "1,2"], "for one plan"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, options: list[str], message: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    with pytest.raises(SystemExit, match=f"(?s)weft: .*{message}"):
        main(["plan", str(file), *options])


def test_lists_are_planned_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = script(tmp_path, SCRIPT), tmp_path / "out.json"
    options = ["--compile-function", "train_step", "--world-size", "16", "--memory-limit", "0.0001,none"]
    prices = ["--price", "2", "--tokens", "1e12", "--json", str(out), "--processes", "2"]
    main(["plan", file, *options, *prices, "--", "256", "4"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["16"]]
    assert ["yes" in row for row in rows] == [True, False]  # what fits comes first
    assert len(json.loads(out.read_text())) == 2
    assert not multiprocessing.active_children()


def test_a_sorted_table_of_plans() -> None:
    """What fits comes first, then more tokens a GPU; plans that failed come last, with the reason."""

    def row(tokens: float | None, fits: bool = True) -> dict[str, object]:
        numbers = dict.fromkeys(("mfu", "days", "cost", "samples"), None)
        sizes = {"step_seconds": 0.5, "exposed_share": 0.1, "peak_bytes": 2**30, "limit_bytes": 2**31}
        return {**numbers, **sizes, "tokens_per_second": tokens, "fits": fits}

    results = {8: row(100.0), 16: row(300.0, fits=False), 32: row(200.0), 64: "no such thing"}
    jobs = [PlanJob(Script("x.py"), world, 0, "h200x8", 1, (None,), False, "no", None, None) for world in results]
    table = sweep_table([(job, None, results[job.world_size]) for job in jobs])
    assert list(table.columns[0].cells) == ["32", "8", "16", "64"]
    assert list(table.columns[3].cells) == ["yes", "yes", "NO", "failed"]
    assert list(table.columns[9].cells)[-1] == "no such thing"
