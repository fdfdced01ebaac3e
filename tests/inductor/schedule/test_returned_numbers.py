"""Ranks of which one logs have one schedule: numbers that only the caller reads are no part of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from harness import run_ranks
from step_builder import StepBuilder
from weft import knobs
from weft.capture.node_kinds import WAIT
from weft.inductor.compiler import schedule_of
from weft.inductor.graph.collectives import ALL_GATHER, ALL_REDUCE
from weft.inductor.schedule.returned_numbers import without_returned_numbers

aten = torch.ops.aten


def training(rank: int, world: int, kind: str) -> tuple[Any, nn.Module, list[float]]:
    """A step of which rank 0 keeps numbers in a list."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    for layer in (model[0], model[2]):
        weft.fully_shard(layer)
    weft.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    seen: list[float] = []
    calls = torch.zeros(())

    def step(x: torch.Tensor) -> torch.Tensor:
        if kind == "before" and rank == 0:
            seen.append(calls.item() + sum(state["step"].item() for state in optimizer.state.values()))
        calls.add_(1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if kind == "reduced":
            dist.reduce(mean, 0)
        if rank == 0:
            seen.append(mean.item() / world)
            if kind == "two":
                seen.append(loss.item() * 2 + seen[-1])
        return loss.detach()

    return step, model, seen


def logged(rank: int, world: int, kind: str) -> tuple[bool, Any]:
    """Whether three compiled steps leave what eager ones do; and the collectives of the schedule."""
    outcomes: list[list[Any]] = []
    found: Any = None
    for compiled in (False, True):
        step, model, seen = training(rank, world, kind)
        if kind == "before":
            step(torch.ones(3, 6))  # makes the optimizer's state
        run = weft.compile(step, mode="bitwise") if compiled else step
        on_gpus = mock.patch("weft.inductor.compiler.device_kind", return_value="cuda")
        with knobs.override(cluster="h200x8", disable_passes="pack"), on_gpus:
            losses = [run(torch.full((3, 6), at + 1.0)).clone() for at in range(3)]
        outcomes.append([losses, [p.to_local().detach().clone() for p in model.parameters()], seen])
        if compiled:
            found = schedule_of(run.entries[0].program)
    flat = [torch.utils._pytree.tree_leaves(outcome) for outcome in outcomes]
    same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*flat, strict=True))
    return same, None if found is None else [(report.kind, report.members) for report in found.reports]


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["returned", "reduced", "two"])
def test_a_rank_that_logs_has_the_schedule_of_the_others(kind: str) -> None:
    (same, mine), (same_there, theirs) = run_ranks(logged, 2, kind, timeout=120)
    assert same
    assert same_there
    assert mine is not None
    assert mine == theirs


@pytest.mark.gloo
def test_what_is_read_before_it_is_overwritten_has_its_value_of_then() -> None:
    """A counter of the step's, and those of a fused optimizer, which one rank logs before they are counted up."""
    assert [same for same, _ in run_ranks(logged, 2, "before", timeout=120)] == [True, True]


def test_numbers_are_put_back_where_they_were_returned() -> None:
    with weft.fake_world(2):
        b = StepBuilder()
        x = b.input(torch.ones(4))
        total = b.call(aten.sum.default, x)
        start = b.call(ALL_REDUCE.op, total, "sum", "dp")
        reduced = b.call(WAIT, start, val=start.meta["val"])
        number = b.call(aten._local_scalar_dense.default, reduced, val=1.5)
        b.returns(number, b.call(aten.mul.Tensor, x, 2.0), number)
        step = b.build({"dp": dist.group.WORLD.group_name})
        parts = without_returned_numbers(step)
        assert [node.target for node in parts.numbers] == [aten._local_scalar_dense.default]
        assert all(node.target is not aten._local_scalar_dense.default for node in parts.step.graph.nodes)
        assert [result.name for result in parts.step.results] == [step.results[1].name, reduced.name]
        joined = parts.joined(parts.step)
    first, doubled, last = joined.results
    assert first is last is list(joined.graph.nodes)[-2]
    assert first.target is aten._local_scalar_dense.default
    assert doubled.name == step.results[1].name
    assert joined.outputs == step.outputs


@pytest.mark.parametrize("in_place", [False, True])
def test_a_number_that_is_read_of_memory_that_the_step_writes_to_stays(in_place: bool) -> None:
    b = StepBuilder()
    counter = b.input(torch.zeros(()))
    number = b.call(aten._local_scalar_dense.default, counter, val=1.5)
    counted = b.call(aten.add.Tensor, counter, 1.0)
    b.returns(number, counted)
    if in_place:
        counted.meta["inplace"] = aten.add_.Tensor
    assert len(without_returned_numbers(b.build()).numbers) == (0 if in_place else 1)


def test_what_is_read_of_a_gathered_value_stays() -> None:
    """Its value could not be freed and gathered again: ranks that read nothing of it may do that."""
    with weft.fake_world(2):
        b = StepBuilder()
        shard = b.input(torch.ones(1))
        start = b.call(ALL_GATHER.op, shard, 2, "dp")
        whole = b.call(WAIT, start, val=start.meta["val"])
        b.returns(b.call(aten._local_scalar_dense.default, whole, val=1.5))
        step = b.build({"dp": dist.group.WORLD.group_name})
        assert not without_returned_numbers(step).numbers
