"""What a rank writes of its last collectives when another one is gone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harness
import weft
from harness import RanksFailed, run_ranks
from weft import knobs
from weft.capture.agreement import collective_ring


def train(rank: int, world: int, folder: str) -> Any:
    weight = torch.nn.Parameter(torch.ones(8))

    @weft.compile
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).sum()
        loss.backward()
        dist.all_reduce(weight.grad)
        total = weight.grad.sum()
        weight.grad = None
        return total

    with knobs.override(ring_dir=folder):
        for step in range(16):
            if rank == 1 and step == 14:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(torch.ones(8))


@pytest.mark.gloo
def test_a_rank_that_waits_for_one_that_is_gone_writes_its_last_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "GRACE", 30.0)  # finding out which rank is gone takes six seconds
    with pytest.raises(RanksFailed):
        run_ranks(train, 2, str(tmp_path))
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    assert content["rank"] == 0
    assert "rank 1" in content["why"]
    entries = content["collectives"]
    assert {entry["what"].rstrip("_") for entry in entries} == {"all_reduce"}
    assert [entry["state"] for entry in entries] == ["ended"] * 14 + ["issued"]
    assert {entry["bytes"] for entry in entries} == {32}
    assert [entry["index"] for entry in entries] == [0] * 15
    calls = [entry["call"] for entry in entries]
    assert calls == sorted(set(calls))


def test_nothing_is_written_without_a_folder_nor_is_it_an_error(tmp_path: Path) -> None:
    assert collective_ring.write(0, "why") is None
    (tmp_path / "file").write_text("")
    with knobs.override(ring_dir=str(tmp_path / "file")):
        assert collective_ring.write(0, "why") is None
