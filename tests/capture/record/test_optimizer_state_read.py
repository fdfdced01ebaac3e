"""Steps that look at the state of their optimizer before its first step has made it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from harness import run_ranks

OPTIMIZERS = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}
HOW = [
    "number of entries",
    "a parameter among them",
    "a counter",
    "the state dict",
    "an entry that reading makes",
    "in a hook before the step",
    "after a branch",
    "cleared between calls",
    "with a number that changes",
]


class Trained:
    """A model, its optimizer and what its step has seen of the optimizer's state."""

    def __init__(self, make: Any, how: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.optimizer = make(self.model.parameters())
        self.how, self.calls, self.seen = how, 0, list[float]()
        if how == "in a hook before the step":
            self.optimizer.register_step_pre_hook(lambda optimizer, *_: self.seen.append(len(optimizer.state)))

    def look(self) -> None:
        if self.how in ("in a hook before the step", "never"):
            return
        state = self.optimizer.state
        if self.how == "a parameter among them":
            self.seen.append(float(self.model.weight in state))
        elif self.how == "a counter":
            self.seen.append(sum(float(entry["step"]) for entry in state.values() if "step" in entry))
        elif self.how == "the state dict":
            self.seen.append(len(self.optimizer.state_dict()["state"]))
        elif self.how == "an entry that reading makes":
            self.seen.append(len(state[self.model.weight]))
        else:
            self.seen.append(len(state))

    def step(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "with a number that changes":
            self.calls += 1
        self.look()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.how == "after a branch" and loss > 0:
            self.look()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", HOW)
def test_a_step_sees_the_state_of_its_optimizer_as_in_eager(optimizer: str, how: str) -> None:
    runs = []
    for compiled in (False, True):
        run = Trained(OPTIMIZERS[optimizer], how)
        step = weft.compile(run.step) if compiled else run.step
        losses = []
        for call in range(5):
            if how == "cleared between calls" and call == 3:
                run.optimizer.state.clear()
            losses.append(step(torch.full((2, 3), call + 1.0)).clone())
        runs.append((run, losses))
    (eager, expected), (ours, got) = runs
    assert ours.seen == eager.seen
    assert all(map(torch.equal, expected, got))
    for a, b in zip(eager.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for entry, other in zip(eager.optimizer.state.values(), ours.optimizer.state.values(), strict=True):
        assert entry.keys() == other.keys()
        assert all(entry[key] is other[key] is None or torch.equal(entry[key], other[key]) for key in entry)


@pytest.mark.parametrize(("how", "captures"), [("never", 1), ("number of entries", 2)])
def test_reading_the_state_costs_one_more_capture(how: str, captures: int) -> None:
    run = Trained(OPTIMIZERS["AdamW"], how)
    step = weft.compile(run.step)
    for _ in range(5):
        step(torch.ones(2, 3))
    assert len(step.captures) == captures
    assert "state" not in vars(torch.optim.Optimizer)


def _trained_on_rank(rank: int, compiled: bool) -> tuple[list[float], list[torch.Tensor]]:
    """What rank 0 alone has seen of the optimizer's state, and the parameters after training."""
    torch.manual_seed(0)
    model = weft.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[float] = []

    def step(x: torch.Tensor) -> None:
        if rank == 0:
            seen.append(sum(float(entry["step"]) for entry in optimizer.state.values()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = weft.compile(step) if compiled else step
    for call in range(4):
        run(torch.full((2, 4), rank + call + 1.0))
    return seen, [p.full_tensor().detach() for p in model.parameters()]


def _both_ways(rank: int, world: int) -> list[tuple[list[float], list[torch.Tensor]]]:
    return [_trained_on_rank(rank, compiled) for compiled in (False, True)]


def test_a_rank_that_looks_alone_trains_with_the_others() -> None:
    for rank, ((expected, parameters), (got, ours)) in enumerate(run_ranks(_both_ways, 2)):
        assert got == expected == ([0.0, 2.0, 4.0, 6.0] if rank == 0 else [])
        assert all(map(torch.equal, parameters, ours))


def test_an_optimizer_that_the_step_makes_begins_without_state_in_each_call() -> None:
    def trained(compiled: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = nn.Linear(3, 4)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            return loss.detach()

        run = weft.compile(step) if compiled else step
        losses = [run(torch.full((2, 3), call + 1.0)).clone() for call in range(4)]
        return losses, len(run.captures) if isinstance(run, weft.CompiledStep) else 1

    (expected, _), (got, captures) = trained(False), trained(True)
    assert all(map(torch.equal, expected, got))
    assert captures == 1
