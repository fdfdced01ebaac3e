"""Collectives with a root, and batches of sends and receives, in compiled steps against eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import P2POp
from torch.distributed import irecv as imported_irecv
from torch.distributed import isend as imported_isend
from torch.distributed.optim import ZeroRedundancyOptimizer

import weft
from both_ways import detached
from harness import run_ranks
from weft import errors
from weft.capture.record.intercept_collectives import functional_collectives

Tensor = torch.Tensor
Step = Callable[[Tensor], Any]


def rows(rank: int, at: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * at + rank))
    return x.cuda() if dist.get_backend() == "nccl" else x


def exchange(operations: list[P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


# ---- steps, made for a rank


def reduced(rank: int, world: int) -> Step:
    def step(x: Tensor) -> Any:
        total, most, count = x * 2, x.sum(), (x > 0).sum()
        dist.reduce(total, 1)
        dist.reduce(most, group_dst=0, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
        work = dist.reduce(count, dst=world - 1, async_op=True)
        work.wait()
        # What others hold after a reduction is not defined.
        return (total if rank == 1 else 0, most if rank == 0 else 0, count if rank == world - 1 else 0)

    return step


def metrics_of_rank_0(rank: int, world: int) -> Step:
    seen: list[float] = []

    def step(x: Tensor) -> Any:
        values = torch.stack([x.mean(), x.abs().max()])
        dist.reduce(values, dst=0)
        if rank:
            return 0.0
        values /= world
        seen.append(values[0].item())
        return values[1].item()

    return step


def gathered(rank: int, world: int) -> Step:
    def step(x: Tensor) -> Any:
        out = [torch.zeros_like(x) for _ in range(world)] if rank == world - 1 else None
        dist.gather(x + 1, out, dst=world - 1)
        sums = [x.new_zeros(()) for _ in range(world)] if rank == 0 else None
        dist.gather(x.sum(), sums)
        return out, sums

    return step


def scattered(rank: int, world: int) -> Step:
    def step(x: Tensor) -> Any:
        out = x.new_empty(2, 3)
        parts = [x[:2, :3] * each for each in range(world)] if rank == 1 else None
        work = dist.scatter(out, parts, src=1, async_op=True)
        work.wait()
        first = x.new_empty(6)
        dist.scatter(first, list(x.repeat(world, 1)[:world]) if rank == 0 else [])
        return out, first

    return step


def ring(rank: int, world: int) -> Step:
    """Two tensors one way, one of another dtype the other way, with references that were imported before."""

    def step(x: Tensor) -> Any:
        following, previous = (rank + 1) % world, (rank - 1) % world
        key, value, count = x.new_empty(4, 6), x.new_empty(4, 6), x.new_empty((), dtype=torch.int64)
        exchange(
            [
                P2POp(imported_isend, x, following),
                P2POp(imported_irecv, key, previous),
                P2POp(dist.isend, x.t().contiguous().view(4, 6), following),
                P2POp(dist.isend, (x > 0).sum(), previous),
                P2POp(dist.irecv, value, previous),
                P2POp(dist.irecv, count, following),
            ]
        )
        return key, value, count

    return step


def works_in_any_order(rank: int, world: int) -> Step:
    """One work for each operation, in their order, whatever the dtypes; messages are matched by tags."""

    def step(x: Tensor) -> Any:
        following, previous = (rank + 1) % world, (rank - 1) % world
        key, value, count = x.new_empty(4, 6), x.new_empty(4, 6), x.new_empty((), dtype=torch.int64)
        tags = (0, 0) if x.is_cuda else (7, 3)  # NCCL has no tags
        operations = [
            P2POp(dist.isend, (x > 0).sum(), following),
            P2POp(dist.isend, x, following, tag=tags[0]),
            P2POp(dist.irecv, value, previous, tag=tags[1]),
            P2POp(dist.irecv, count, previous),
            P2POp(dist.isend, x * 2, following, tag=tags[1]),
            P2POp(dist.irecv, key, previous, tag=tags[0]),
        ]
        if x.is_cuda:  # NCCL matches messages by their order
            operations = [operations[at] for at in (0, 1, 3, 5, 4, 2)]
        works = dist.batch_isend_irecv(operations)
        seen = []
        for at in (3, 0, 5, 2, 4, 1) if len(works) == len(operations) else range(len(works)):
            works[at].wait()
            if at in (2, 3, 5):
                seen.append(operations[at].tensor + 1)
        # On a GPU a wait blocks the stream, and nobody knows when it has ended.
        return key, value, count, seen, len(works), [x.is_cuda or work.is_completed() for work in works]

    return step


def stages(rank: int, world: int) -> Step:
    """Activations to the next rank: the first rank only sends, the last one only receives."""

    def step(x: Tensor) -> Any:
        received = torch.zeros_like(x)
        operations = [P2POp(dist.isend, x, rank + 1)] if rank + 1 < world else []
        operations += [P2POp(dist.irecv, received, rank - 1)] if rank else []
        exchange(operations)
        return received + x

    return step


def ring_attention(rank: int, world: int) -> Step:
    """Keys go round, and the gradients of keys come back, in an autograd.Function."""
    weight = nn.Parameter(torch.eye(6, device=rows(rank, 0).device))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def rotate(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        following, previous = (rank + 1) % world, (rank - 1) % world
        exchange([P2POp(dist.isend, x.contiguous(), following), P2POp(dist.irecv, out, previous)])
        return out

    class Rotate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return rotate(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            for _ in range(world - 1):
                gradient = rotate(gradient)
            return gradient

    def step(x: Tensor) -> Any:
        query, key = x @ weight, x @ weight
        scores = []
        for _ in range(world):
            scores.append(query @ key.T)
            key = Rotate.apply(key)
        loss = torch.cat(scores, 1).softmax(1).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), weight.detach().clone()

    return step


STEPS = (reduced, metrics_of_rank_0, gathered, scattered, ring, works_in_any_order, stages, ring_attention)


def both_ways(rank: int, world: int, mode: str) -> dict[str, bool]:
    """By step, whether three compiled calls return what eager ones do."""
    equal = {}
    for make in STEPS:
        eager, compiled = make(rank, world), weft.compile(make(rank, world), mode=mode)
        calls = [(detached(eager(rows(rank, at))), detached(compiled(rows(rank, at)))) for at in range(3)]
        equal[make.__name__] = all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for pair in calls
            for a, b in zip(*map(torch.utils._pytree.tree_leaves, pair), strict=True)
        )
    return equal


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 4])
def test_compiled_steps_return_what_eager_ones_do(world: int) -> None:
    assert run_ranks(both_ways, world, "default", timeout=120) == [{make.__name__: True for make in STEPS}] * world


@pytest.mark.gpu(2)
def test_compiled_steps_return_what_eager_ones_do_on_gpus() -> None:
    expected = {make.__name__: True for make in STEPS}
    assert run_ranks(both_ways, 2, "bitwise", timeout=120, backend="nccl") == [expected] * 2


def in_a_subgroup(rank: int, world: int) -> list[Tensor]:
    """Pairs of ranks, which are given as ranks of the world or of the group."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, other = pairs[rank % 2], (rank + 2) % 4

    def step(x: Tensor) -> list[Tensor]:
        received, by_group, part = torch.empty_like(x), torch.empty_like(x), torch.empty(6)
        exchange([P2POp(dist.isend, x, other, pair), P2POp(dist.irecv, received, other, pair)])
        mine = rank // 2
        exchange(
            [
                P2POp(dist.isend, x * 2, group=pair, group_peer=1 - mine),
                P2POp(dist.irecv, by_group, group=pair, group_peer=1 - mine),
            ]
        )
        dist.scatter(part, list(x[:2]) if mine else None, group=pair, group_src=1)
        return [received, by_group, part]

    x = rows(rank, 0)
    return [torch.stack([a, b]) for a, b in zip(weft.compile(step)(x), step(x), strict=True)]


@pytest.mark.gloo
def test_peers_are_ranks_of_the_group() -> None:
    for found in run_ranks(in_a_subgroup, 4, timeout=120):
        assert all(torch.equal(*pair) for pair in found)


def on_some_ranks(rank: int, world: int) -> str:
    def step(x: Tensor) -> Tensor:
        if rank < 2:
            y = torch.empty_like(x)
            exchange([P2POp(dist.isend, x, 1 - rank), P2POp(dist.irecv, y, 1 - rank)])
            return y
        return x

    try:
        weft.compile(step)(rows(rank, 0))
    except errors.GraphMismatch as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_a_rank_that_does_not_take_part_is_named() -> None:
    assert all("What rank 2 captured differs" in said for said in run_ranks(on_some_ranks, 3))


def unmatched(rank: int, world: int) -> str:
    def step(x: Tensor) -> Tensor:
        y = torch.empty(3 if rank else 4, 6)
        exchange([P2POp(dist.isend, x, 1 - rank), P2POp(dist.irecv, y, 1 - rank)])
        return y

    try:
        weft.compile(step)(rows(rank, 0))
    except errors.GroupMismatch as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_a_receive_of_another_size_than_is_sent_is_named() -> None:
    assert all("rank 0 sends 24 elements to rank 1, which expects 18" in said for said in run_ranks(unmatched, 2))


def mistakes(rank: int, world: int) -> dict[str, str]:
    t, said = torch.ones(4), {}

    def expect(name: str, act: Callable[[], Any]) -> None:
        with pytest.raises(errors.InvalidCollective) as caught, functional_collectives():
            act()
        said[name] = str(caught.value)

    own = [t, t] if rank == 0 else None
    expect("no destination", lambda: dist.reduce(t))
    expect("destination", lambda: dist.reduce(t, 5))
    expect("short list", lambda: dist.gather(t, [t] if rank == 0 else [t, t], dst=0))
    expect("list elsewhere", lambda: dist.scatter(t, own, src=1))
    expect("sizes", lambda: dist.gather(t, [t, torch.ones(3)] if rank == 0 else [t], dst=0))
    expect("nothing", lambda: dist.batch_isend_irecv([]))
    expect("operation", lambda: P2POp(dist.all_reduce, t, 1))
    return said


@pytest.mark.gloo
def test_mistakes_name_the_line_and_the_argument() -> None:
    first, second = run_ranks(mistakes, 2)
    for said in (first, second):
        assert all("test_rooted_collectives.py" in text for text in said.values())
        assert "give exactly one of dst and group_dst" in said["no destination"]
        assert "rank 5 is not in the group" in said["destination"]
        assert "it has no operations" in said["nothing"]
        assert "neither dist.isend nor dist.irecv" in said["operation"]
    assert "gather_list has 1 tensors for 2 ranks" in first["short list"]
    assert "gather_list is given on a rank that is not dst" in second["short list"]
    assert "scatter_list is given on a rank that is not src" in first["list elsewhere"]
    assert "scatter_list has 0 tensors for 2 ranks" in second["list elsewhere"]
    assert "other sizes" in first["sizes"]


def redundancy_free(rank: int, world: int) -> bool:
    """torch's ZeroRedundancyOptimizer, with a learning rate that changes: its owner of a parameter broadcasts it."""

    def trained(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = weft.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run, losses = weft.compile(step) if compiled else step, []
        for at in range(4):
            losses.append(run(rows(rank, at)))
            scheduler.step()
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    return all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.gloo
def test_an_optimizer_of_torchs_that_shares_its_state_among_ranks() -> None:
    assert run_ranks(redundancy_free, 2) == [True, True]
