"""Silent corruption: one value of one operation is changed, in one of the two runs of a replayed call.

python bench/replay.py --faults 200        # how many are found, and what replays cost
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.errors import ReplayDiffers


class CorruptedOperation(TorchDispatchMode):
    """Adds one to one element of the result of the operation with this number, counted over those that compute."""

    def __init__(self, at: int, draw: random.Random) -> None:
        super().__init__()
        self.at, self.draw, self.count, self.where = at, draw, 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or _moves(func):
            return result
        if self.count == self.at:
            self.where = str(func)
            flat = result.view(-1) if result.is_contiguous() else result.t().view(-1)
            flat[self.draw.randrange(flat.numel())] += 1.0
        self.count += 1
        return result


def _moves(func: Any) -> bool:
    """Whether an operation computes no values: a view, an allocation, or a copy."""
    name = func._schema.name
    return func.is_view or any(part in name for part in ("empty", "copy", "clone", "detach", "alias", "lift"))


def make_step(width: int = 16) -> Any:
    """A step without a part that masks values, so that each one matters: the loss has no dropout and no ReLU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def corrupt(faults: int, seed: int = 0) -> tuple[int, list[str]]:
    """Plant faults. Returns how many were found, and the operations of those that were not."""
    step, draw = weft.compile(make_step(), replay_every=1), random.Random(seed)
    x = torch.randn(4, 16)
    for _ in range(3):
        with CorruptedOperation(-1, draw) as counted:
            step(x)
    found, missed = 0, []
    for _ in range(faults):
        with CorruptedOperation(draw.randrange(counted.count), draw) as planted:
            try:
                step(x)
                missed.append(planted.where)
            except ReplayDiffers:
                found += 1
    return found, missed


def cost(every: int | None, width: int = 256, calls: int = 50) -> float:
    """Mean milliseconds of a call."""
    step = weft.compile(make_step(width), replay_every=every)
    x = torch.randn(256, width)
    for _ in range(3):
        step(x)
    times = []
    for _ in range(calls):
        begun = time.perf_counter()
        step(x)
        times.append(time.perf_counter() - begun)
    # Replays are part of the mean; the median of each kind keeps other programs of the machine out.
    if every is None:
        return statistics.median(times) * 1e3
    replayed = [each for at, each in enumerate(times, 4) if at % every == 0]
    plain = [each for at, each in enumerate(times, 4) if at % every]
    return (statistics.median(replayed) + (every - 1) * statistics.median(plain)) / every * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, missed = corrupt(options.faults)
    print(f"corruptions found: {found} of {options.faults}; missed: {missed or 'none'}")
    plain = cost(None)
    for every in (10,):
        print(f"replay_every={every}: {cost(every) / plain - 1:+.1%} of a step of {plain:.1f} ms")


if __name__ == "__main__":
    main()
