"""From a captured step to the graph that runs, within a limit of memory."""

from __future__ import annotations

import logging
import re
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
from weft.inductor.compiler import scheduled_graph
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.graph.retarget import retarget
from weft.inductor.schedule.planner import Schedule

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
        yield graph


def plan(step: StepGraph, limit: int | None) -> tuple[StepGraph, Schedule]:
    made, schedule = scheduled_graph(step, H200, limit, True, PassRunner())
    assert schedule is not None
    return made, schedule


def test_a_lower_memory_limit_is_met_by_recomputation(step: StepGraph) -> None:
    free, schedule = plan(step, None)
    limit = int(schedule.simulation.peak * 0.75)
    made, tight = plan(step, limit)
    assert tight.simulation.peak <= limit
    assert tight.simulation.compute_seconds > schedule.simulation.compute_seconds
    assert made.outputs == free.outputs


def test_an_unreachable_memory_limit_raises_before_recomputation_is_tried(
    step: StepGraph, caplog: pytest.LogCaptureFixture
) -> None:
    """The inputs and one product need 72 MiB, whatever is recomputed."""
    with caplog.at_level(logging.INFO, "weft"), pytest.raises(MemoryLimitUnreachable, match="Allow") as caught:
        plan(step, 1 << 24)
    assert caught.value.certain
    assert "recomputing more" not in caplog.text
    message = str(caught.value)
    assert "memory_limit=0.0156 GiB" in message
    assert re.search(r"GiB made by \w+ of model\.\S+ at \S+test_compiler\.py:\d+ in", message)
    assert " bytes" not in message
