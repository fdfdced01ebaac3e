"""What ``weft.metrics`` after every call of a step costs, as a part of the step.

    python bench/metrics_cost.py [--width 512] [--layers 4]

The step trains a stack of linear layers with AdamW on a CPU. Times are CPU times of the process, medians of many calls;
caches of the processor hold what the step left there, as in a loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import weft

ROUNDS = 200


def milliseconds(*calls: Callable[[], object]) -> list[float]:
    """CPU time of each call, the median of many rounds in which they take turns."""
    times: list[list[int]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, taken in zip(calls, times, strict=True):
            start = time.process_time_ns()
            call()
            taken.append(time.process_time_ns() - start)
    return [statistics.median(taken) / 1e6 for taken in times]


def main() -> None:
    """Train, ask after every call, print both times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(options.layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    @weft.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(64, width)
    for _ in range(3):
        step(x)
    stepped, asked = milliseconds(lambda: step(x), lambda: weft.metrics(step))
    print(f"step {stepped:.3f} ms, weft.metrics {asked:.3f} ms, {asked / stepped:.2%}")


if __name__ == "__main__":
    main()
