"""A rank dies or is stopped while another one's GPU waits for it: over NCCL, and over symmetric memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peer_steps import COPIES, KERNELS, device, model, over_peers, sharded, step_of, train

import harness
from harness import RanksFailed, run_ranks
from weft import errors

pytestmark = pytest.mark.gpu(2)


def goes(rank: int, world: int, transports: list[str], recorded: bool, how: int, folder: str) -> None:
    """Rank 1 goes after five steps. What the other one hears, and after how long."""
    torch.cuda.set_device(rank)
    net = sharded(model(64, 256))
    step = over_peers(step_of(net), transports, recorded=recorded)
    train(step, net, rank, 5)
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    batch = torch.randint(0, 11, (4, 5)).to(device())
    step(batch)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), how)
        time.sleep(100)
    time.sleep(0.2)
    began, losses = time.monotonic(), []
    with pytest.raises(errors.CollectiveFailed) as caught:
        losses.append(step(batch).item())
    seconds = time.monotonic() - began
    Path(folder, "heard").write_text(f"{seconds:.1f}\n{losses}\n{caught.value}")
    with pytest.raises(errors.CollectiveFailed):
        step(batch)
    os.kill(pids[1], signal.SIGKILL)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("transports", [[], KERNELS, COPIES], ids=["nccl", "kernels", "copies"])
def test_a_gpu_that_waits_for_a_rank_that_is_gone_is_released(
    transports: list[str], how: int, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "GRACE", 40.0)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(goes, 2, transports, recorded, how, str(tmp_path), timeout=90, backend="nccl")
    assert (tmp_path / "heard").exists(), str(caught.value)
    seconds, losses, text = (tmp_path / "heard").read_text().split("\n", 2)
    print(f"{seconds} s: {text}")
    assert losses == "[]"  # the number that the GPU came to is wrong, and nobody has seen it
    assert float(seconds) < (30 if how == signal.SIGSTOP else 12)
    assert "rank 1" in text
    assert recorded or "peer_steps.py:" in text
