"""What the guards of a steady call cost: CPU time of each part of the check, in microseconds.

    python bench/guard_cost.py [--parameters 300]

The model alternates Linear and RMSNorm; the optimizer is AdamW. Nothing changes between calls, so that every guard
holds. Each figure is the least of many rounds.
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
    leaves, spec = torch_adapter.flatten(((x,), {}))
    assert guards.unchanged(leaves, spec), guards.failure(leaves, spec)
    found = len(guards._flags)
    way = "compiled" if compiled else "in Python"
    print(f"{found} parameters, {len(guards)} guards, {len(step.captures)} captures, checks {way}")
    print(f"{'whole check':32}{microseconds(lambda: guards.unchanged(leaves, spec)):8.1f} us")
    with torch_adapter.no_torch_function():
        print(f"  {'arguments':30}{microseconds(lambda: guards._arguments.failure(leaves, spec)):8.1f}")
        for name, check in guards.checks.items():
            print(f"  {name:30}{microseconds(check):8.1f}")


if __name__ == "__main__":
    main()
