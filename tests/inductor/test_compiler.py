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
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.fusion import kernel_stages
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.schedule.planner import Schedule
from weft.inductor.schedule.scheduled_graph import scheduled_graph

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


def test_kernels_that_read_the_batch_are_compiled_for_any_address_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ids[:, 1:]`` of one sequence begins at an address that is no multiple of 16 bytes: the first launch would wait
    for the compiler."""
    model = nn.Sequential(nn.Embedding(512, 64), nn.LayerNorm(64), nn.Linear(64, 512))

    def train(ids: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].reshape(-1))
        loss.backward()
        return loss.detach()

    graph = retarget(weft.capture(train, torch.zeros(1, 129, dtype=torch.int64)), "cuda:0")
    begun: list[KernelSource] = []
    monkeypatch.setattr(kernel_stages.compile_pool, "compiles_ahead", lambda: True)
    monkeypatch.setattr(kernel_stages.compile_pool, "begin", lambda sources, arch: begun.extend(sources))
    monkeypatch.setattr(kernel_stages, "arch_of", lambda device: 90)
    made = kernel_graph(run_passes(graph, KERNEL_PASSES))
    kernel_stages.begin_kernels(made)
    calls = [node for node in made.graph.nodes if isinstance(node.target, KernelCall)]
    integers = lambda node: any(
        val.dtype is torch.int64 and val.numel() > 1
        for operand in node.all_input_nodes
        for val in [operand.meta["val"]]
        if isinstance(val, torch.Tensor)
    )
    sources = {node.target.generated.source: integers(node) for node in calls}  # type: ignore[union-attr]
    assert set(sources.values()) == {True, False}
    for source, reads_the_batch in sources.items():
        assert source in begun
        assert (source.unaligned() in begun) == reads_the_batch
