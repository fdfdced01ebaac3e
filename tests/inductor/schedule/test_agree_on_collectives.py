"""Ranks whose passes come to other collectives issue those of the step one by one; alone, a rank asks nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from weft import knobs
from weft.capture.agreement import agreement
from weft.capture.node_kinds import is_collective
from weft.inductor.compiler import schedule_of
from weft.inductor.schedule import agree_on_collectives

pytestmark = pytest.mark.gloo

Tensor = torch.Tensor


def gather(x: Tensor) -> Tensor:
    out = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x)
    return out


def two_gathers(weights: list[Tensor], works: bool, reads: bool) -> Callable[[Tensor], Tensor]:
    """A step that gathers two weights; it ``works`` between the gathers, and ``reads`` the second of them."""

    def step(x: Tensor) -> Tensor:
        first = gather(weights[0])
        if works:
            x = x @ first
        second = gather(weights[1])
        return (x + second.sum() if reads else x) + first.sum()

    return step


def gathers_of(step: Any) -> list[int]:
    """For each form, the all-gathers in its program."""
    lines = (form.program._lines for form in step.entries)
    return [len({node for node in each if node is not None and is_collective(node)}) for each in lines]


def run(rank: int, world: int) -> list[tuple[list[int], bool]]:
    weights = [torch.full((2, 4), float(rank + at)) for at in (1, 2)]
    found = []
    for works, reads in ((False, True), (rank == 1, True), (False, rank == 1), (True, True)):
        eager = two_gathers(weights, works, reads)
        step = weft.compile(eager)
        calls = [torch.ones(3, 4), torch.ones(3, 4)]
        same = all(torch.equal(step(x), eager(x)) for x in calls)
        found.append((gathers_of(step), same))
    return found


def test_ranks_that_compute_different_things_issue_what_was_captured() -> None:
    for found in run_ranks(run, 2):
        # One bucket where all ranks come to it; two gathers where a rank works between them or leaves one unread.
        assert found == [([1], True), ([2], True), ([2], True), ([2], True)]


def scheduled_after_a_mismatch(rank: int, world: int) -> tuple[list[int], list[str]]:
    """Tensors in each call of the schedule, and warnings, where the ranks' lists of collectives differ."""
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(4)))
    weft.fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    step = weft.compile(lambda x: model(x).sum(), mode="bitwise")
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    agree_on_collectives.log.addHandler(handler)
    with (
        knobs.override(cluster="h200x8"),
        mock.patch("weft.inductor.compiler.device_kind", return_value="cuda"),
        mock.patch.object(agree_on_collectives, "_line", return_value=f"other on rank {rank}"),
    ):
        step(torch.ones(3, 6))
    found = schedule_of(step.entries[0].program)
    assert found is not None
    return [len(report.members) for report in found.reports], warnings


def test_the_warning_does_not_deny_buckets_that_a_schedule_makes() -> None:
    (calls, warnings), (others, _) = run_ranks(scheduled_after_a_mismatch, 2)
    assert calls == others
    assert max(calls) > 1
    assert any("rank 1 computes something else" in line for line in warnings)
    assert not any("one by one" in line or "bucket" in line for line in warnings)


def recapture_alone(rank: int, world: int) -> tuple[list[int], int, bool]:
    """Rank 1 has a short batch at the third call."""
    weights = [torch.full((2, 4), float(rank + at)) for at in (1, 2)]
    eager = two_gathers(weights, rank == 1, True)
    step = weft.compile(eager)
    # After so many calls the next one is predicted, and its ranks need not compare it.
    same = all(torch.equal(step(torch.ones(3, 4)), eager(torch.ones(3, 4))) for _ in range(8))
    asked = 0

    def count(*given: object, **named: object) -> NoReturn:
        nonlocal asked
        asked += 1
        raise AssertionError

    for module in (agreement, agree_on_collectives):
        module.StoreRendezvous = count  # type: ignore[attr-defined]
    for rows in (3, 3 - rank, 3):
        same &= torch.equal(step(torch.ones(rows, 4)), eager(torch.ones(rows, 4)))
    return gathers_of(step), asked, same


def test_a_rank_that_captures_alone_issues_the_same_and_asks_nobody() -> None:
    found = run_ranks(recapture_alone, 2)
    assert found == [([2], 0, True), ([2, 2], 0, True)]
