"""Steps that replace gradients hold no others than eager does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from both_ways import assert_equal
from harness import run_ranks

Train = Callable[[Tensor], Any]


class Training:
    """A model, its optimizer and a step, from a fixed seed."""

    def __init__(self, make_step: Callable[[Training], Train], compiled: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.seen: list[Any] = []
        step = make_step(self)
        self.step: Any = weft.compile(step) if compiled else step

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.model.parameters()]

    def run(self, calls: int) -> list[Any]:
        """The result of each call, the gradients after it, and how many gradients of the calls before are alive."""
        found, made = [], []
        torch.manual_seed(1)
        for _ in range(calls):
            captured = len(getattr(self.step, "captures", ()))
            result = self.step(torch.randn(2, 4))
            if len(getattr(self.step, "captures", ())) != captured:
                gc.collect()  # a capture leaves cycles behind, which no later call does
            alive = sum(each() is not None for each in made)
            now = self.gradients()
            found.append((result, [None if g is None else g.clone() for g in now], alive))
            known = {id(each()) for each in made if each() is not None}
            made += [weakref.ref(g) for g in now if g is not None and id(g) not in known]
            del now
        return found


def zeroed_first(training: Training) -> Train:
    def step(x: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.model(x).square().mean()
        loss.backward()
        training.optimizer.step()
        return loss

    return step


def accumulated(training: Training) -> Train:
    calls = 0

    def step(x: Tensor) -> Tensor:
        nonlocal calls
        loss = training.model(x).square().mean()
        loss.backward()
        calls += 1
        if calls % 3 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()
        return loss

    return step


def returned_before_it_is_replaced(training: Training) -> Train:
    def step(x: Tensor) -> Any:
        old = training.model[0].weight.grad
        training.optimizer.zero_grad()
        training.model(x).square().mean().backward()
        return None if old is None else (old, old * 2)

    return step


def moved_to_another_parameter(training: Training) -> Train:
    def step(x: Tensor) -> Tensor:
        first, last = training.model[0].weight, training.model[2].weight
        first.grad, last.grad = last.grad, first.grad
        training.model[0].bias.grad = None
        loss = training.model[2](x).mean()
        loss.backward()
        return loss

    return step


def looked_at_by_opaque_code(training: Training) -> Train:
    @weft.opaque
    def look() -> None:
        training.seen.append([None if g is None else float(g.sum()) for g in training.gradients()])

    def step(x: Tensor) -> Tensor:
        look()
        training.optimizer.zero_grad()
        loss = training.model(x).square().mean()
        loss.backward()
        look()
        return loss

    return step


STEPS = [
    zeroed_first,
    accumulated,
    returned_before_it_is_replaced,
    moved_to_another_parameter,
    looked_at_by_opaque_code,
]


@pytest.mark.parametrize("make_step", STEPS)
def test_the_gradients_of_earlier_calls_are_as_alive_as_after_an_eager_step(make_step: Any) -> None:
    eager, compiled = Training(make_step, False), Training(make_step, True)
    for wanted, found in zip(eager.run(7), compiled.run(7), strict=True):
        assert_equal(found, wanted)
    assert compiled.seen == eager.seen


def test_gradients_that_nothing_reads_are_let_go_before_the_program_runs() -> None:
    training = Training(zeroed_first, True)
    training.run(3)
    form = training.step.entries[0]
    program, alive = form.program, []

    def watched(inputs: list[Any]) -> Any:
        alive.append([each() is not None for each in before])
        return program.boxed(inputs)

    before = [weakref.ref(g) for g in training.gradients()]
    form.program = SimpleNamespace(boxed=watched)
    training.step(torch.randn(2, 4))
    assert alive == [[False] * 4]
    assert all(g is not None for g in training.gradients())


def sharded(rank: int, world: int) -> list[list[int]]:
    """How many gradients of earlier calls are alive after each call, by torch and by weft."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for wrap, compile_ in ((fully_shard, lambda step: step), (weft.fully_shard, weft.compile)):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        wrap(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run: Any = compile_(step)
        made: list[Any] = []
        alive = []
        for _ in range(5):
            run(torch.randn(2, 4))
            gc.collect()
            alive.append(sum(each() is not None for each in made))
            made += [weakref.ref(p.grad._local_tensor) for p in model.parameters()]
        found.append(alive)
    return found


@pytest.mark.gloo
def test_gradient_shards_of_earlier_calls_are_let_go() -> None:
    for by_torch, by_weft in run_ranks(sharded, 2):
        assert by_weft == by_torch == [0] * 5
