"""What the guards of a steady call cost: CPU time of each part of the check, in microseconds.

    python bench/guard_cost.py [--parameters 300]

The model alternates Linear and RMSNorm; the optimizer is AdamW. Nothing changes between calls, so that every guard
holds. Each figure is the least of many rounds. The whole is more than the sum: a part that runs again and again finds
its data in the nearest cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import weft
from weft import state_checks, torch_adapter
from weft.capture.record.data_arguments import flat_arguments


def compiled_step(parameters: int) -> tuple[Any, torch.Tensor]:
    """A step over a model of about this many parameters, and its argument."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)) for _ in range(parameters // 3)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    @weft.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, torch.ones(4, 8)


def microseconds(check: Callable[[], Any], rounds: int = 40, calls: int = 50) -> float:
    """CPU time of one call of ``check``, the least of many rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time_ns()
        for _ in range(calls):
            check()
        best = min(best, (time.process_time_ns() - start) / calls)
    return best / 1e3


def main() -> None:
    """Print the cost of the whole check and of its parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=300)
    wanted = parser.parse_args().parameters
    compiled = state_checks.compile_now() is not None
    step, x = compiled_step(wanted)
    for _ in range(4):
        step(x)
    guards = step.entries[0].guards
    leaves, spec = flat_arguments(((x,), {}))
    assert guards.unchanged(leaves, spec), guards.failure(leaves, spec)
    found = len(guards._flags)
    way = "compiled" if compiled else "in Python"
    print(f"{found} parameters, {len(guards)} guards, {len(step.captures)} captures, checks {way}")
    parts: dict[str, Callable[[], Any]] = {
        "arguments": lambda: guards._arguments.failure(leaves, spec),
        **{name: part.holds for name, part in guards.checks.items()},
    }
    with torch_adapter.no_torch_function():
        costs = {name: microseconds(check) for name, check in parts.items()}
    print(f"{'whole check':36}{microseconds(lambda: guards.unchanged(leaves, spec)):8.1f} us")
    print(f"{'sum of its parts, each by itself':36}{sum(costs.values()):8.1f} us")
    for name, cost in costs.items():
        print(f"  {name:34}{cost:8.1f}")
    print(f"{'flattening the arguments, before it':36}{microseconds(lambda: flat_arguments(((x,), {}))):8.1f} us")


if __name__ == "__main__":
    main()
