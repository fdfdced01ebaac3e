"""Steps that branch on values, on several ranks: equal outcomes, different ones, and collectives that do not match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from both_ways import assert_equal, detached
from harness import run_ranks
from weft import knobs
from weft.errors import AgreementTimeout, GraphMismatch

pytestmark = pytest.mark.gloo


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, generator=generator) for _ in range(6)]


def guarded_training(wrap: Callable[[Any], Any], rank: int) -> list[Any]:
    """The loss is reduced before it is looked at, so all ranks skip a step or none."""
    torch.manual_seed(0)
    model = weft.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        total = loss.detach().clone()
        dist.all_reduce(total)
        loss.backward()
        if torch.isfinite(total):
            optimizer.step()
        optimizer.zero_grad()
        return total

    run = wrap(step)
    inputs = batches(rank)
    for at in (1, 2, 4):
        inputs[at][0, 0] = float("nan") if rank == 0 else 1.0
    results = [detached(run(x)) for x in inputs]
    return [results, [p.to_local().detach().clone() for p in model.parameters()]]


def different_outcomes(wrap: Callable[[Any], Any], rank: int) -> list[Any]:
    """Each rank goes its own way, between collectives that all of them issue."""

    def step(x: torch.Tensor) -> Any:
        total = x.sum()
        dist.all_reduce(total)
        y = x * 2 if x[0].sum() > 0 else x.cos() * 3
        dist.all_reduce(y)
        return y * (1 if y.sum() > 0 else total)

    run = wrap(step)
    return [detached(run(x)) for x in batches(rank)]


def different_counts(wrap: Callable[[Any], Any], rank: int) -> list[Any]:
    """Each rank has its own count of calls, which answers a question as soon as it is asked."""
    count = torch.tensor(float(rank))

    def step(x: torch.Tensor) -> Any:
        count.add_(1)
        total = x.sum()
        dist.all_reduce(total)
        y = x * 2 if count.item() > 2 else x.cos() * 3
        dist.all_reduce(y)
        return y * total

    run = wrap(step)
    return [*(detached(run(x)) for x in batches(rank)), count]


def mismatch(rank: int) -> str:
    """What a rank hears where only some ranks go to a collective."""

    def step(x: torch.Tensor) -> Any:
        total = x.sum()
        dist.all_reduce(total)
        if x[0, 0] > 0:
            dist.all_reduce(x)
        return x * total

    run = weft.compile(step)
    run(torch.ones(2, 2))
    try:
        run(torch.full((2, 2), 1.0 if rank else -1.0))
    except GraphMismatch as error:
        return "\n".join([str(error), *error.__notes__])
    return "no error"


def late(rank: int) -> str:
    """One rank meets its first collective in a branch that the others do not take."""

    def step(x: torch.Tensor) -> Any:
        if x[0, 0] > 0:
            dist.all_reduce(x)
        return x * 2

    run = weft.compile(step)
    run(-torch.ones(2, 2))
    with knobs.override(agreement_timeout_s=0.5):
        try:
            run(torch.full((2, 2), 1.0 if rank == 0 else -1.0))
        except AgreementTimeout as error:
            return str(error)
    return "no error"


def on_rank(rank: int, world: int) -> list[Any]:
    found: list[Any] = [[case(wrap, rank) for wrap in (lambda f: f, weft.compile)] for case in CASES]
    return [found, mismatch(rank), late(rank)]


CASES = [guarded_training, different_outcomes, different_counts]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_branch_as_eager_or_all_hear_which_collectives_differ(world: int) -> None:
    for rank, (pairs, heard, alone) in enumerate(run_ranks(on_rank, world, timeout=150)):
        for eager, ours in pairs:
            assert_equal(ours, eager)
        assert "all_reduce" in heard
        assert "Up to there it has run all_reduce. " in heard
        assert "test_branches_on_ranks.py" in heard
        assert (alone != "no error") == (rank == 0)
