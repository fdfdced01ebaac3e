"""From a captured step to the graph that runs, within a limit of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import knobs
from weft.capture.graph import StepGraph
from weft.errors import MemoryLimitUnreachable
from weft.inductor.clock import Clock
from weft.inductor.comm.cluster import load_cluster
from weft.inductor.comm.consensus import number
from weft.inductor.comm.schedule import Schedule
from weft.inductor.compiler import planned
from weft.inductor.retarget import retarget

H200 = load_cluster("h200x8")


@pytest.fixture
def step(tmp_path: Path) -> Iterator[StepGraph]:
    """Blocks whose activations in front of products could be computed again, sharded over eight ranks."""
    with weft.fake_world(8), knobs.override(cache_dir=str(tmp_path)):
        blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        for module in (*blocks, model):
            weft.fully_shard(module, mesh=init_device_mesh("cuda", (8,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        graph = retarget(weft.capture(train, torch.zeros(8192, 512)), "cuda:0")
        number(graph)
        yield graph


def plan(step: StepGraph, limit: int | None) -> tuple[StepGraph, Schedule]:
    made, schedule = planned(step, H200, limit, True, Clock())
    assert schedule is not None
    return made, schedule


def test_less_memory_is_met_by_computing_again(step: StepGraph) -> None:
    free, schedule = plan(step, None)
    limit = int(schedule.simulation.peak * 0.75)
    made, tight = plan(step, limit)
    assert tight.simulation.peak <= limit
    assert tight.simulation.compute_seconds > schedule.simulation.compute_seconds
    assert made.outputs == free.outputs


def test_a_limit_that_nothing_fits_is_refused(step: StepGraph) -> None:
    with pytest.raises(MemoryLimitUnreachable, match="Allow"):
        plan(step, 1 << 24)
