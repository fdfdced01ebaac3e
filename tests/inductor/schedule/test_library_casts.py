"""Casts that a library needs before a reduction are part of the schedule: their time and memory are searched with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from llama_steps import sharded_llama

import weft
from weft import torch_adapter
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.simulate import peak_memory
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.collectives import REDUCE_SCATTER, WIDENING_REDUCE_SCATTER, payload_of, sum_dtype_of
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.schedule import planner
from weft.inductor.schedule.decisions import apply, structure
from weft.inductor.schedule.planner import ScheduleCandidate, schedule
from weft.inductor.transports.peer_calls import multi_tensor_cast_of

H200 = load_cluster("h200x8")


@pytest.fixture(scope="module")
def sharded(request: pytest.FixtureRequest) -> Iterator[StepGraph]:
    """A step on so many GPUs, whose bfloat16 gradients are summed in float32."""
    with weft.fake_world(request.param), garbage_collection_paused():
        yield kernel_graph(run_passes(sharded_llama(2, 4096, clip=True), KERNEL_PASSES))


# No transport over peers reaches from one node to another.
on_one_node = pytest.mark.parametrize("sharded", [8], indirect=True)
on_two_nodes = pytest.mark.parametrize("sharded", [16], indirect=True)


@on_two_nodes
def test_the_search_knows_all_memory_of_a_step_that_libraries_carry(sharded: StepGraph) -> None:
    with torch_adapter.only_mode():
        one = planner._Planner(sharded, H200, None, keep_bits=False)
        applied = one.applied(ScheduleCandidate((), 1.0))
        found = one.ordered(applied, last=False)
        assert found is not None
        assert found.simulation.peak == peak_memory(applied.task_graph, found.order)
        assert found.simulation.compute_seconds == pytest.approx(
            sum(task.seconds for task in applied.task_graph.tasks if task.kind.value == "compute")
        )


@on_two_nodes
def test_casts_stand_in_the_schedule_before_the_reductions_that_read_them(sharded: StepGraph) -> None:
    assert any(node.target is WIDENING_REDUCE_SCATTER.op for node in sharded.collectives())
    found = schedule(sharded, H200)
    reductions = [n for n in found.step.collectives() if n.target in (REDUCE_SCATTER.op, REDUCE_SCATTER.coalesced)]
    assert reductions
    assert not any(sum_dtype_of(node) for node in found.step.collectives())
    for node in reductions:
        assert node.meta["transport"] == "nccl"
        for sent in payload_of(node):
            assert sent.meta["val"].dtype == torch.float32
            assert sent.target is torch.ops.aten._to_copy.default or multi_tensor_cast_of(sent) is not None


@on_two_nodes
def test_other_ranks_get_the_same_casts_from_the_decisions(sharded: StepGraph) -> None:
    found = schedule(sharded, H200)
    assert structure(apply(sharded, found.decisions)) == structure(found.step)


@on_one_node
def test_what_peers_carry_keeps_its_casts(sharded: StepGraph) -> None:
    found = schedule(sharded, H200).step
    by_peers = [node for node in found.collectives() if sum_dtype_of(node) is not None]
    assert by_peers
    assert all(node.meta["transport"] != "nccl" for node in by_peers)
