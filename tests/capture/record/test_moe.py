"""A mixture-of-experts layer routed over 4 processes: one graph for all splits, equal to the layer on one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import weft
from both_ways import assert_equal, detached
from harness import run_ranks
from weft.errors import RuntimeCheckFailed

pytestmark = pytest.mark.gloo

EXPERTS, WIDTH, TOKENS, STEPS = 4, 8, 6, 5


class Experts(nn.Module):
    """Each token goes to the expert its router prefers. Expert `i` lives on rank `i`, or all on one."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(experts if world == 1 else [experts[rank]])
        self.world = world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(0, expert, torch.ones_like(expert))
        y = self._here(x[order], counts) if self.world == 1 else self._routed(x[order], counts)
        return torch.zeros_like(x).index_copy(0, order, y) * gate.unsqueeze(1)

    def _here(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])

    def _routed(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sizes, theirs = counts.tolist(), received.tolist()
        tokens = funcol.all_to_all_single_autograd(x, theirs, sizes, dist.group.WORLD)
        return funcol.all_to_all_single_autograd(self.experts[0](tokens), sizes, theirs, dist.group.WORLD)


def training(rank: int, world: int) -> tuple[Any, nn.Module]:
    """A step over the tokens of one rank; the router, which all hold, gets the sum of their gradients."""
    model = Experts(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = model(x)
        loss = y.square().sum()
        loss.backward()
        if world > 1:
            for p in model.router.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss, y

    return step, model


def tokens(rank: int) -> list[torch.Tensor]:
    """One batch a step: other splits each time, in the third all tokens of all ranks to one expert."""
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(STEPS)]
    found[2] = torch.ones(TOKENS, WIDTH)
    return found


def run_routed(rank: int, world: int) -> tuple[Any, Any, list[str]]:
    left = []
    captures: list[str] = []
    for compiled in (False, True):
        step, model = training(rank, world)
        if compiled:
            step = weft.compile(step)
            captures = step.captures
        results = [detached(step(x)) for x in tokens(rank)]
        left.append((results, detached(dict(model.state_dict()))))
    return left[0], left[1], captures


def test_a_moe_step_over_four_ranks_equals_one_process() -> None:
    ranks = run_ranks(run_routed, EXPERTS)
    step, model = training(0, 1)
    alone = [detached(step(torch.cat(parts))) for parts in zip(*map(tokens, range(EXPERTS)), strict=True)]

    for rank, (eager, ours, captures) in enumerate(ranks):
        assert_equal(ours, eager)
        # Gradients and momentum exist from the second call on: that is a second graph. Splits never are.
        assert len(captures) == 2, captures
        results, state = ours
        for (_, y), (_, whole) in zip(results, alone, strict=True):
            torch.testing.assert_close(y, whole[rank * TOKENS : (rank + 1) * TOKENS], rtol=1e-5, atol=1e-6)
        for name, value in model.state_dict().items():
            if not name.startswith("experts"):
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        for name in ("weight", "bias"):
            whole = model.get_parameter(f"experts.{rank}.{name}")
            torch.testing.assert_close(state[f"experts.0.{name}"], whole.detach(), rtol=1e-5, atol=1e-6)
    for at, (loss, _) in enumerate(alone):
        torch.testing.assert_close(sum(ours[0][at][0] for _, ours, _ in ranks), loss, rtol=1e-5, atol=1e-6)


def test_the_batches_cover_empty_and_full_splits() -> None:
    """The pattern of zeros that the test above is about."""
    model = Experts(0, 1)
    splits = set()
    for rank in range(EXPERTS):
        for x in tokens(rank):
            splits.add(tuple(model.router(x).argmax(-1).bincount(minlength=EXPERTS).tolist()))
    assert len(splits) > 10
    assert any(split.count(0) == EXPERTS - 1 for split in splits)


# ---- splits that cannot be


def exchange(x: torch.Tensor, send: torch.Tensor, receive: torch.Tensor, differentiable: bool) -> torch.Tensor:
    sizes, theirs = send.tolist(), receive.tolist()
    if differentiable:
        return funcol.all_to_all_single_autograd(x, theirs, sizes, dist.group.WORLD) * 2  # HERE
    out = x.new_empty(sum(theirs), x.shape[1])
    dist.all_to_all_single(out, x, theirs, sizes)  # OR HERE
    return out * 2


SPLITS = [[3, 2], [4, 4], [-1, 7], [0, 0]]


def run_impossible(rank: int, world: int, differentiable: bool) -> tuple[list[str], list[str]]:
    step = weft.compile(exchange)
    said = []
    for splits in SPLITS:
        send, receive = torch.full((world,), 3), torch.full((world,), 3)
        assert step(torch.ones(6, 4), send, receive, differentiable).tolist() == [[2.0] * 4] * 6
        with pytest.raises(RuntimeCheckFailed) as caught:
            step(torch.ones(6, 4), torch.tensor(splits), receive, differentiable)
        said.append(str(caught.value))
    return said, step.captures


@pytest.mark.parametrize("differentiable", [False, True])
def test_impossible_splits_raise_with_the_line(differentiable: bool) -> None:
    marked = "# HERE" if differentiable else "# OR HERE"
    lines, first = inspect.getsourcelines(exchange)
    line = first + next(at for at, text in enumerate(lines) if text.rstrip().endswith(marked))
    for said, captures in run_ranks(run_impossible, 2, differentiable, timeout=30):
        assert captures == ["first call"]
        for splits, message in zip(SPLITS, said, strict=True):
            assert f"test_moe.py:{line} in exchange" in message
            assert all(f"= {size}" in message for size in splits if size < 0 or sum(splits) != 6), message
