"""``weft.log`` gives writers eager's numbers, read after the step; ``weft.metrics`` agrees with torch's count."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft.errors import InvalidArgument, InvalidArgumentType, NotCapturedYet, UnknownOption
from weft.metrics import model_operations

STEPS = 5


@pytest.fixture(autouse=True)
def nobody_writes() -> Iterator[None]:
    yield
    weft.log_to()


def training() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        weft.log("loss", loss)
        loss.backward()
        weft.log("grad_norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        weft.log("scale", 2)
        return loss

    return model, step


def run(compiled: bool, *writers: Any) -> list[float]:
    _, step = training()
    weft.log_to(*writers)
    called = weft.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(1)
    losses = [called(torch.randn(4, 8, generator=generator)).item() for _ in range(STEPS)]
    weft.flush_log()
    return losses


@pytest.mark.parametrize("compiled", [False, True])
def test_writers_get_the_values_of_every_step(compiled: bool, tmp_path: Path) -> None:
    class Board:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen.append((name, value, step))

    class Run:
        def __init__(self) -> None:
            self.seen: list[tuple[int, dict[str, float]]] = []

        def log(self, values: dict[str, float], step: int) -> None:
            self.seen.append((step, values))

    board, wandb, called = Board(), Run(), []
    losses = run(
        compiled, board, wandb, lambda step, values: called.append((step, values)), tmp_path / "m" / "log.jsonl"
    )
    rows = [json.loads(line) for line in (tmp_path / "m" / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == losses
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["scale"] == 2.0 and row["grad_norm"] > 0 for row in rows)
    assert len(set(losses)) == STEPS
    assert called == wandb.seen == [(row.pop("step"), row) for row in rows]
    assert board.seen == [(name, value, step) for step, values in called for name, value in values.items()]


def test_values_come_late_and_not_in_the_step() -> None:
    seen: list[int] = []
    _, step = training()
    weft.log_to(lambda number, values: seen.append(number))
    compiled = weft.compile(step)
    counts = []
    for _ in range(4):
        compiled(torch.ones(4, 8))
        counts.append(len(seen))
    assert counts == [0, 0, 1, 2]
    assert not any("scalar" in str(node.target) for node in compiled.entries[0].captured.graph.graph.nodes)


def test_a_step_that_logs_computes_what_one_that_does_not_computes() -> None:
    model, step = training()
    other, eager = training()
    compiled = weft.compile(step)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(4, 8)), eager(torch.ones(4, 8)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_ranks_write_to_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    weft.log_to(tmp_path / "log.jsonl")
    weft.log("x", 1.0)
    weft.log_to(tmp_path / "log.jsonl", ranks="all")
    weft.log("x", torch.tensor(2.0))
    weft.flush_log()
    assert [file.name for file in tmp_path.iterdir()] == ["log-1.jsonl"]
    assert json.loads((tmp_path / "log-1.jsonl").read_text())["x"] == 2.0


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    for first in (0, 2):
        weft.log_to(tmp_path / "log.jsonl", first=first)
        for value in (1.0, 2.0):
            weft.log("x", value + first)
        weft.log_to()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows == [{"step": step, "x": step + 1.0} for step in range(4)]


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"weft.log: value is .* shape \[3\].*Log value.mean"):
        weft.log("loss", torch.ones(3))
    with pytest.raises(InvalidArgumentType, match=r"weft.log: value"):
        weft.log("loss", "high")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentType, match=r"weft.log: name"):
        weft.log(3, 4.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentType, match=r"weft.log_to: writer"):
        weft.log_to(3)
    with pytest.raises(InvalidArgumentType, match=r"weft.log_to: first"):
        weft.log_to(print, first=None)  # type: ignore[arg-type]
    with pytest.raises(UnknownOption, match=r"weft.log_to: ranks"):
        weft.log_to(ranks="some")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentType, match=r"weft.metrics: step"):
        weft.metrics(lambda: None)
    with pytest.raises(NotCapturedYet):
        weft.metrics(weft.compile(lambda: None))


def test_metrics_have_the_names_of_torchtitan_and_count_what_torch_counts() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    optimizer = torch.optim.SGD(model.parameters())

    def step(ids: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = weft.compile(step)
    ids = torch.randint(11, (2, 16))
    for _ in range(2):
        compiled(ids)
        assert "tflops" not in weft.metrics(compiled)  # the first call captured
    compiled(ids)
    found = weft.metrics(compiled)
    with FlopCounterMode(display=False) as counter:
        step(ids)
    assert model_operations(compiled.entries[0].captured.graph) == counter.get_total_flops() > 0
    seconds = found["time_metrics/end_to_end(s)"]
    assert found["throughput(tps)"] * seconds == pytest.approx(32)
    assert found["tflops"] * seconds == pytest.approx(counter.get_total_flops() / 1e12)
    assert weft.metrics(compiled, tokens=64)["throughput(tps)"] * seconds == pytest.approx(64)


def test_metrics_in_every_step_count_operations_and_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = training()
    compiled = weft.compile(step)
    for _ in range(3):
        compiled(torch.ones(4, 8))
    found = weft.metrics(compiled)
    assert found["tflops"] > 0
    for counts in ("flop_registry", "_tokens"):
        monkeypatch.setitem(model_operations.__globals__, counts, None)  # not asked again
    assert weft.metrics(compiled) == found


def test_calls_that_capture_are_not_counted() -> None:
    compiled = weft.compile(lambda x: x @ x.T)
    for width in (4, 4, 4, 5):  # captured again for the last one, after the times of three
        compiled(torch.ones(4, width))
    assert len(compiled.captures) == 2
    assert weft.metrics(compiled) == {}
    for width in (5, 4):
        compiled(torch.ones(4, width))
    assert weft.metrics(compiled)["time_metrics/end_to_end(s)"] == compiled.began[1] - compiled.began[0]


def test_a_program_may_use_weft_log_for_the_first_time_in_its_step(tmp_path: Path) -> None:
    """The name is looked up while the step is captured, when Python's generators are watched."""
    program = tmp_path / "program.py"
    program.write_text(
        "import random, torch, weft\n"
        "@weft.compile\n"
        "def step(x):\n"
        "    weft.log('sum', x.sum())\n"
        "    return x + random.random()\n"
        "random.seed(0)\n"
        "expected = random.random()\n"
        "random.seed(0)\n"
        "assert step(torch.zeros(2, dtype=torch.float64)).tolist() == [expected] * 2\n"
    )
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr
