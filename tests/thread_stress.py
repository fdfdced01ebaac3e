"""Threads that train eagerly, make first calls and call shared compiled steps at the same time.

Each worker repeats rounds from a fixed start and compares every result, bit for bit, with what one thread computed
eagerly before. One worker alone draws from torch's global generator, which is one for all threads.

    python tests/thread_stress.py --seconds 1200
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import weft
from both_ways import assert_equal, detached, mlp, sgd, snapshot

Round = Callable[[random.Random], None]


class Stress:
    """Runs workers in threads for a while.

    Attributes:
        rounds: finished rounds of each worker.
        wrong: what went wrong: the name of the worker, and the error with its traceback and causes.
    """

    def __init__(self) -> None:
        self.rounds: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, workers: dict[str, Round], seconds: float) -> None:
        """Repeat each worker's round in a thread of its own until the time is over."""
        end = time.monotonic() + seconds
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        threads = [
            threading.Thread(target=self._work, args=(name, worker, end), name=name, daemon=True)
            for name, worker in workers.items()
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()) + 120)
                if thread.is_alive():
                    self.wrong.append(f"{thread.name}: still in its round after 120 s")
        finally:
            sys.setswitchinterval(interval)

    def _work(self, name: str, worker: Round, end: float) -> None:
        draw = random.Random(name)
        while time.monotonic() < end:
            try:
                worker(draw)
            except Exception as error:  # noqa: BLE001, reported with the name of the worker
                self.wrong.append(f"{name}: {''.join(traceback.format_exception(error))}")
            self.rounds[name] += 1


def eager_training() -> Round:
    """Dropout, checkpointing, numbers read from tensors, collectives of one rank and a data loader; nothing of weft."""
    start = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))
    data = TensorDataset(torch.randn(12, 8), torch.randn(12, 8))

    def train() -> Any:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        fired: list[float] = []
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[4].register_forward_hook(lambda module, args, output: fired.append(output.sum().item()))
        torch.manual_seed(3)
        losses = []
        for x, y in DataLoader(data, batch_size=4, shuffle=True):
            hidden = checkpoint(model[:2], x, use_reentrant=False)
            loss = (model[2:](hidden) - y).square().mean()
            dist.all_reduce(loss.detach())
            gathered = [torch.empty(4, 8)]
            dist.all_gather(gathered, x)
            (loss + gathered[0].sum() * 1e-3).backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.item(), total.item()))
        return losses, fired, snapshot(model), detached(optimizer.state_dict()["state"])

    return _repeated(train)


def eager_autocast() -> Round:
    """Eager training under autocast, with a scheduler."""
    start = mlp()
    x = torch.randn(4, 8)

    def train() -> Any:
        model = copy.deepcopy(start)
        optimizer = sgd(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return snapshot(model), scheduler.get_last_lr()

    return _repeated(train)


def _repeated(train: Callable[[], Any]) -> Round:
    expected = train()
    return lambda draw: assert_equal(train(), expected)


def first_calls() -> Round:
    """Steps of several kinds, made and captured anew in each round."""
    x = torch.randn(4, 8)
    kinds = []
    for optimizer in (sgd, torch.optim.AdamW, lambda p: torch.optim.Adam(p, lr=0.05, foreach=True)):
        for autocast in (False, True):
            start = mlp()
            expected = _trained(copy.deepcopy(start), optimizer, autocast, x, lambda step: step)
            kinds.append((start, optimizer, autocast, expected))

    def round_(draw: random.Random) -> None:
        start, optimizer, autocast, expected = draw.choice(kinds)
        assert_equal(_trained(copy.deepcopy(start), optimizer, autocast, x, weft.compile), expected)

    return round_


def _trained(model: nn.Module, make: Any, autocast: bool, x: torch.Tensor, wrap: Callable[..., Any]) -> Any:
    optimizer = make(model.parameters())
    fired: list[int] = []
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[2].weight.register_hook(lambda grad: grad.clamp(-1, 1))

    @weft.opaque
    def log(loss: torch.Tensor) -> None:
        fired.append(loss.item())

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log(loss)
        return loss

    step = wrap(step)
    losses = [step(x + at).item() for at in range(3)]
    return losses, fired, snapshot(model)


def shared_step(workers: int) -> list[Round]:
    """Threads that call one compiled step, each with its own arguments, of several shapes."""
    model = mlp()
    calls = []

    def step(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = model(x) * scale
        (grad,) = torch.autograd.grad(y.square().sum(), model[0].weight)
        return y, grad

    compiled = weft.compile(step)
    for at in range(24):
        args = torch.randn(2 + at % 3, 8), torch.randn(8)
        calls.append((args, detached(step(*args))))

    def round_(draw: random.Random) -> None:
        for args, expected in draw.sample(calls, 6):
            assert_equal(detached(compiled(*args)), expected)

    return [round_] * workers


def shared_model() -> tuple[Round, Round]:
    """One thread trains a model in a compiled step; another evaluates it, by a step that it captures anew each time."""
    model, start, x = mlp(), {}, torch.randn(4, 8)
    start.update(detached(dict(model.state_dict())))
    optimizer = sgd(model.parameters())

    def train() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(x).square().mean()

    @torch.no_grad()
    def reset() -> None:
        for name, value in model.state_dict().items():
            value.copy_(start[name])

    losses, states = [], [evaluate().item()]
    for _ in range(5):
        losses.append(train().item())
        states.append(evaluate().item())
    reset()
    compiled, restart = weft.compile(train), weft.compile(reset)

    between_updates = (
        threading.Lock()
    )  # captures need no lock, but reading a model while another thread updates it does

    def trains(draw: random.Random) -> None:
        with between_updates:
            restart()
        found = []
        for _ in losses:
            with between_updates:
                found.append(compiled().item())
        assert found == losses

    def evaluates(draw: random.Random) -> None:
        fresh = weft.compile(evaluate)
        fresh.entry_for((), {})
        for _ in range(3):
            with between_updates:
                assert fresh().item() in states

    return trains, evaluates


def fake_worlds() -> Round:
    """Captures for eight ranks, while the process has a group of one."""

    def graph() -> str:
        with weft.fake_world(8, rank=3):
            model = nn.Linear(8, 8).to("cuda")
            assert torch.cuda.is_available()
            assert dist.get_world_size() == 8
            return str(weft.capture(lambda x: model(x).sum().backward(), torch.ones(4, 8)))

    return _repeated(graph)


def workers() -> dict[str, Round]:
    """All workers by name, with what one thread computes for each."""
    trains, evaluates = shared_model()
    first = first_calls()
    shared = {f"shared {at}": worker for at, worker in enumerate(shared_step(3))}
    return {
        "eager": eager_training(),
        "autocast": eager_autocast(),
        "first calls 0": first,
        "first calls 1": first,
        "trains": trains,
        "evaluates": evaluates,
        **shared,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    seconds = parser.parse_args().seconds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stress = Stress()
    stress.run(workers(), seconds)
    for name, count in sorted(stress.rounds.items()):
        print(f"{name}: {count} rounds")
    for error in stress.wrong[:20]:
        print(f"wrong in {error}")
    print(f"{sum(stress.rounds.values())} rounds, {len(stress.wrong)} wrong")
    dist.destroy_process_group()
    return bool(stress.wrong)


if __name__ == "__main__":
    sys.exit(main())
