"""The transport that a schedule gives a collective: the cheapest that may and can; steps that run by that choice."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from peer_steps import PASSES, model, sharded, step_of, train

import weft
from harness import run_ranks
from weft import knobs
from weft.capture.graph import StepGraph
from weft.errors import UnknownOption
from weft.inductor.cost.cluster import TransportModel, load_cluster
from weft.inductor.cost.collective_cost import Collective, collective_of, transports_for
from weft.inductor.passes.number_collectives import number_collectives
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.schedule.agree_on_schedule import scheduled
from weft.inductor.schedule.select_transport import LIBRARY, allowed_transports, cheapest, choose_transports, cost
from weft.inductor.transports.instantiate import bind
from weft.inductor.transports.peer_calls import results_in_arena

H200 = load_cluster("h200x8")


def test_each_gets_the_cheapest_that_may_and_can() -> None:
    with weft.fake_world(8), knobs.override(transports="all"):
        net = sharded(model(2048, 8192), True)
        graph = run_passes(weft.capture(step_of(net), torch.zeros(1, 4, dtype=torch.long)), PASSES)
        names = {}
        for node in choose_transports(graph, H200).collectives():
            sent = collective_of(graph, node)
            names[sent.kind, node.meta["transport"]] = sent
            price = cost(H200, sent, node.meta["transport"])
            others = [name for name in transports_for(H200, sent) if name in allowed_transports(H200)]
            found = [cost(H200, sent, name) for name in (LIBRARY, *others)]
            assert price == min(found) or (price <= 1.1 * min(found) and not results_in_arena(node.meta["transport"]))
        assert ("reduce_scatter", "pull") in names
        assert {node.meta["transport"] for node in choose_transports(graph, H200, keep_bits=True).collectives()} == {
            LIBRARY
        }


@pytest.mark.parametrize(("cheaper", "chosen"), [(0.95, "copy_engine"), (0.8, "push")])
def test_a_transport_with_results_in_the_arena_must_be_cheaper_by_a_margin(cheaper: float, chosen: str) -> None:
    engine = TransportModel("copy_engine", ("all_gather",), 1e11, 0.0, 0.0)
    push = TransportModel("push", ("all_gather",), 1e11 / cheaper, 0.0, 0.0)
    sent = Collective("all_gather", tuple(range(8)), "g", 1 << 28, torch.bfloat16)
    cluster = replace(H200, transports=(engine, push))
    assert (
        cheapest(cluster, sent, ["copy_engine", "push"]) == cheapest(cluster, sent, ["push", "copy_engine"]) == chosen
    )


@pytest.mark.parametrize(("named", "allowed"), [("", []), ("nccl", []), (" pull ,push", ["pull", "push"])])
def test_the_knob_lists_them(named: str, allowed: list[str]) -> None:
    with knobs.override(transports=named):
        assert allowed_transports(H200) == allowed


def test_a_transport_that_the_cluster_does_not_describe_is_refused() -> None:
    without = replace(H200, transports=tuple(each for each in H200.transports if each.name != "pull"))
    with knobs.override(transports="push,pull"), pytest.raises(UnknownOption, match="pull"):
        allowed_transports(without)


def trained(rank: int, world: int) -> str:
    """Train by the schedule's own choice and uncompiled, compare bits; the text of the program."""
    nets = [sharded(model(8, 16), True) for _ in range(2)]
    expected = train(step_of(nets[0]), nets[0], rank)
    sources = []

    def compile_graph(graph: StepGraph, *how: Any, **more: Any) -> Any:
        number_collectives(graph)
        made, found = scheduled(run_passes(graph, PASSES), H200)
        assert found is not None
        assert {"push", "pull"} <= {bucket.transport for bucket in found.reports}
        program = compile_aten(bind(made))
        sources.append(program.source)
        return program

    sys.modules["weft.program_form"].compile_graph = compile_graph  # type: ignore[attr-defined]
    with knobs.override(transports="push,pull,two_shot"):
        got = train(weft.compile(step_of(nets[1])), nets[1], rank)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    return sources[0]


@pytest.mark.gloo
def test_a_step_trains_by_the_schedules_own_choice() -> None:
    for source in run_ranks(trained, 2, timeout=150):
        assert "peer_gather" in source
        assert "peer_reduce_scatter" in source
