"""Ranks that find out different things about their groups come to one schedule, and say once what they found."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peer_steps import PASSES, model, step_of, train
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from weft import knobs, torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.passes.number_collectives import number_collectives
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.schedule import agree_on_schedule
from weft.inductor.schedule.agree_on_schedule import scheduled
from weft.inductor.transports import apply_transports
from weft.inductor.transports.instantiate import bind
from weft.inductor.transports.peer_calls import PeerCall

pytestmark = pytest.mark.gloo

H200 = load_cluster("h200x8")
# Where the library is slow, whatever can be carried by others is.
SLOW_LIBRARY = dataclasses.replace(
    H200, transports=tuple(dataclasses.replace(t, latency=1e-3) if t.crosses else t for t in H200.transports)
)


def hybrid(rank: int, world: int) -> tuple[list[dict[tuple[str, bool], int]], list[int], list[str]]:
    """Two steps sharded over pairs of ranks, of which the second pair shares no memory. What carries the collectives of
    each axis, how often each step was decided, and what was said."""
    reachable = apply_transports.reachable

    def reached(axis: str, group: str, device: torch.device) -> str | None:
        return "they are worlds apart" if torch_adapter.group_ranks(group) == (2, 3) else reachable(axis, group, device)

    apply_transports.reachable = reached  # type: ignore[assignment]
    agree_on_decisions, asked = agree_on_schedule.agree_on_decisions, 0
    carried: list[dict[tuple[str, bool], int]] = []
    rounds: list[int] = []
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft.inductor.schedule").addHandler(handler)

    def counted(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        return agree_on_decisions(*given)

    def compile_graph(graph: StepGraph, *how: Any, **more: Any) -> Any:
        nonlocal asked
        asked = 0
        graph = run_passes(graph, PASSES)
        number_collectives(graph)
        step, found = scheduled(graph, SLOW_LIBRARY)
        assert found is not None
        kinds = ((group_of(node).partition("/")[0], isinstance(node.target, PeerCall)) for node in step.collectives())
        carried.append(dict(Counter(kinds)))
        rounds.append(asked)
        return compile_aten(bind(step))

    agree_on_schedule.agree_on_decisions = counted  # type: ignore[assignment]
    sys.modules["weft.program_form"].compile_graph = compile_graph  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for _ in range(2):
        nets = [model(8, 16) for _ in range(2)]
        for net in nets:
            for block in net[1:-1]:
                weft.fully_shard(block, mesh=mesh)
            weft.fully_shard(net, mesh=mesh)
        expected = train(step_of(nets[0]), nets[0], rank)
        with knobs.override(transports="all"):
            got = train(weft.compile(step_of(nets[1])), nets[1], rank)
        torch.testing.assert_close(got, expected)
    dist.barrier()
    return carried, rounds, said


def test_a_group_without_peer_access_disables_transports_for_its_mesh_axis() -> None:
    found = run_ranks(hybrid, 4, timeout=180)
    first = found[0][0]
    for carried, rounds, _ in found:
        assert carried == first
        assert rounds == [2, 1]  # what was found out for the first step is known for the second
    for names in first:
        assert set(names) == {("shard", False), ("replicate", True)}
    assert ["worlds apart" in " ".join(said) for _, _, said in found] == [False, False, True, False]
    assert "WEFT_TRANSPORTS=nccl" in " ".join(found[2][2])
