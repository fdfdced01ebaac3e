"""Cost of a NaN guard in a step, ``if not torch.isfinite(loss): ...``, and of a step with no branch.

Prints for weft and for eager the milliseconds a step and the number of device-to-host reads a step, as the profiler
counts them. The default sizes give a step of about 10 ms on a large GPU:

    python bench/branch_cost.py
    python bench/branch_cost.py --device cpu --width 64 --layers 2 --batch 8 --steps 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import weft

Step = Callable[[torch.Tensor], Any]
# `item()` and branches on tensors end in this operation: one read of a value, which waits for the device.
READ = "aten::_local_scalar_dense"


def make_step(arguments: argparse.Namespace, *, guarded: bool) -> Step:
    """A step of training of a multi-layer perceptron."""
    torch.manual_seed(0)
    width = arguments.width
    layers = [layer for _ in range(arguments.layers) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        if guarded and not torch.isfinite(loss):
            optimizer.zero_grad()
            return None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(step: Step, arguments: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds and device-to-host reads a step."""
    x = torch.randn(arguments.batch, arguments.width, device=arguments.device)
    on_gpu = torch.device(arguments.device).type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(3):
        step(x)
    wait()
    started = time.perf_counter()
    for _ in range(arguments.steps):
        step(x)
    wait()
    seconds = time.perf_counter() - started
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]) as profile:
        for _ in range(arguments.steps):
            step(x)
        wait()
    copied = "Memcpy DtoH" if on_gpu else READ  # a CPU has no copy to count; its fused AdamW reads step counts
    reads = sum(event.count for event in profile.key_averages() if event.key.startswith(copied))
    return 1e3 * seconds / arguments.steps, reads / arguments.steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    for name, value in (("width", 4096), ("layers", 12), ("batch", 4096), ("steps", 50)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    for guarded in (False, True):
        for name, wrap in (("eager", lambda step: step), ("weft", weft.compile)):
            milliseconds, reads = measure(wrap(make_step(arguments, guarded=guarded)), arguments)
            kind = "with a NaN guard" if guarded else "with no branch"
            print(f"{kind:<18}{name:<7}{milliseconds:9.3f} ms a step{reads:7.2f} reads a step", flush=True)


if __name__ == "__main__":
    main()
