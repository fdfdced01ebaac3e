"""Collectives whose result nothing reads are dropped, but for small all-reduces, which another rank may read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from step_builder import StepBuilder
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import WAIT
from weft.inductor.graph.collectives import ALL_GATHER, ALL_REDUCE
from weft.inductor.passes.drop_unused_gathers import drop_unused_gathers


def targets(step: StepGraph) -> list[Any]:
    return [node.target for node in drop_unused_gathers(step).graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("collective", "elements", "stays"),
    [(ALL_GATHER, 1, False), (ALL_REDUCE, 1, True), (ALL_REDUCE, 1 << 14, True), (ALL_REDUCE, 1 << 15, False)],
)
def test_small_all_reduces_stay(collective: Any, elements: int, stays: bool) -> None:
    with weft.fake_world(2):
        b = StepBuilder()
        x = b.input(torch.ones(elements))
        start = b.call(collective.op, x, *((2, "dp") if collective is ALL_GATHER else ("sum", "dp")))
        b.call(WAIT, start, val=start.meta["val"])
        b.returns(x)
        found = targets(b.build({"dp": dist.group.WORLD.group_name}))
    assert found == ([collective.op, WAIT] if stays else [])


def test_of_a_coalesced_gather_the_unread_results_are_dropped() -> None:
    with weft.fake_world(2):
        b = StepBuilder()
        first, second = b.pick(b.call(ALL_GATHER.coalesced, [b.input(torch.ones(1)), b.input(torch.ones(2))], 2, "dp"))
        b.call(WAIT, first, val=first.meta["val"])
        b.returns(b.call(WAIT, second, val=second.meta["val"]))
        found = targets(b.build({"dp": dist.group.WORLD.group_name}))
    assert found.count(WAIT) == 1
    assert found[0] is ALL_GATHER.coalesced
