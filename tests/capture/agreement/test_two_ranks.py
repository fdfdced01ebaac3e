"""A compiled step over wrapped modules on two ranks equals eager; ranks with different graphs get an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from both_ways import assert_equal, detached
from harness import run_ranks
from weft.errors import GraphMismatch

pytestmark = pytest.mark.gloo

WRAPPERS = ["replicate", "fully_shard", "fully_shard blocks"]


def wrapped(kind: str, world: int) -> nn.Module:
    """A net whose sizes two ranks cannot share evenly."""
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    model = nn.Sequential(block(), nn.LayerNorm(5), block(), nn.Linear(5, 3, bias=False))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if kind == "replicate":
        return weft.replicate(model, mesh=mesh)
    if kind == "fully_shard blocks":
        for at in (0, 2):
            weft.fully_shard(model[at], mesh=mesh)
    return weft.fully_shard(model, mesh=mesh)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """This rank's part of parameters, gradients and optimizer state."""
    found: list[Any] = [list(model.parameters()), [p.grad for p in model.parameters()]]
    found += [list(optimizer.state[p].values()) for p in model.parameters()]
    local = lambda t: t.to_local() if isinstance(t, DTensor) else t
    return detached(torch.utils._pytree.tree_map(local, found))


def train(wrap: Callable[[Any], Any], kind: str, world: int, batches: list[torch.Tensor]) -> tuple[list[Any], Any]:
    """Five steps with accumulation over two micro-batches, clipping and a schedule; loss and norm of each."""
    model = wrapped(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + at))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros(())
        for part in x.chunk(2):
            loss = model(part).square().mean() / 2
            loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.full_tensor() if isinstance(norm, DTensor) else norm

    run = wrap(step)
    results = []
    for x in batches:
        results.append(detached(run(x)))
        schedule.step()
    return [results, state(model, optimizer)], run


def batch(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))


def run_train(rank: int, world: int, kind: str) -> tuple[Any, Any, list[str], int]:
    batches = [batch(4 + 2 * rank, 10 * at + rank) for at in range(5)]  # each rank has a size of its own
    eager, _ = train(lambda step: step, kind, world, batches)
    ours, step = train(weft.compile, kind, world, batches)
    return eager, ours, step.captures, len(step.entries[0].captured.graph.collectives())


@pytest.mark.parametrize("kind", WRAPPERS)
def test_five_steps_equal_eager_bit_for_bit(kind: str) -> None:
    ranks = run_ranks(run_train, 2, kind)
    for eager, ours, captures, collectives in ranks:
        assert_equal(ours, eager)
        assert captures == ["first call"]
        assert collectives > 0
    norms = [[norm for _, norm in ours[0]] for _, ours, _, _ in ranks]
    assert_equal(norms[0], norms[1])
    if kind == "replicate":
        assert_equal(ranks[0][1][1], ranks[1][1][1])


# ---- a batch whose size changes, on one rank before the other


def run_ragged(rank: int, world: int, kind: str) -> tuple[list[Any], list[Any], list[str]]:
    sizes = [(4, 4), (4, 6), (4, 8), (6, 8), (8, 10)]
    batches = [batch(pair[rank], at) for at, pair in enumerate(sizes)]
    eager, _ = train(lambda step: step, kind, world, batches)
    ours, step = train(weft.compile, kind, world, batches)
    return eager, ours, step.captures


@pytest.mark.parametrize("kind", ["replicate", "fully_shard"])
def test_a_size_that_changed_once_stays_symbolic(kind: str) -> None:
    for eager, ours, captures in run_ranks(run_ragged, 2, kind):
        assert_equal(ours, eager)
        assert len(captures) == 2, captures


# ---- ranks that differ


def another_kind(rank: int, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    if rank:
        dist.all_reduce(y)
    else:
        dist.broadcast(y, 0)
    return y


def another_dtype(rank: int, x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.bfloat16 if rank else torch.float16)
    dist.all_reduce(y)
    return y


def one_more(rank: int, x: torch.Tensor) -> torch.Tensor:
    for _ in range(1 + rank):
        dist.all_reduce(x)
    return x


def same(rank: int, x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


DIFFERENT = {step.__name__: step for step in (another_kind, another_dtype, one_more)}


def run_different(rank: int, world: int) -> list[tuple[str, str, float]]:
    said = []
    for name, step in DIFFERENT.items():
        x = torch.ones(4)
        started = time.monotonic()
        with pytest.raises(GraphMismatch) as caught:
            weft.compile(step)(rank, x)
        said.append((name, str(caught.value), time.monotonic() - started))
        assert x.tolist() == [1] * 4
    # The group is as good as new: nobody is left waiting in a collective.
    assert weft.compile(same)(0, torch.ones(4)).tolist() == [2] * 4
    return said


def test_every_rank_gets_the_difference_within_the_deadline() -> None:
    shown = {
        "another_kind": ["all_reduce", "broadcast"],
        "another_dtype": ["float16", "bfloat16"],
        "one_more": ["all_reduce"],
    }
    for rank, said in enumerate(run_ranks(run_different, 2)):
        assert [name for name, _, _ in said] == list(DIFFERENT)
        for name, message, seconds in said:
            assert seconds < 30
            assert f"This is rank {rank}" in message
            assert "test_two_ranks.py:" in message  # the user's line
            assert all(word in message for word in shown[name]), message
