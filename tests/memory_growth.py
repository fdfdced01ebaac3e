"""Memory of long runs: many steps on two ranks, and many captured forms: ``make memory STEPS=20000 FORMS=300``.

A training step allocates as much at its last call as at its first ones, and forms beyond ``knobs.form_limit`` leave
nothing behind. What is compared is the memory of the process, and the number of Python objects.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import sys
import time
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from weft import knobs

RANKS = 2
# What may be added from the earlier half of the readings to the later one, in MiB and objects: arenas of the allocator,
# where in the filling of a cache a reading falls, and what torch's own caches of 256 entries keep of a capture.
SPARE_MIB = 8.0
SPARE_OBJECTS = 5_000


class Memory(NamedTuple):
    """What a process holds: MiB in memory, and objects that Python tracks."""

    mib: float
    objects: int

    def grew_from(self, before: Memory) -> bool:
        """Whether it is more than before, by more than chance."""
        return self.mib > before.mib + SPARE_MIB or self.objects > before.objects + SPARE_OBJECTS


def held() -> Memory:
    """What this process holds once garbage is collected and free memory is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return Memory(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(gc.get_objects()))


def steps(rank: int, world: int, count: int) -> list[tuple[int, Memory]]:
    """Train on so many batches; what is held after a tenth of them, and after each further tenth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 8))
    weft.fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    @weft.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    found = []
    for done in range(1, count + 1):
        loss = step(torch.randn(4, 32))
        if done % max(count // 10, 1) == 0:
            found.append((done, held()))
    assert torch.isfinite(loss)
    assert len(step.captures) == 1
    return found


def forms(count: int, every: int = 10) -> list[tuple[int, Memory]]:
    """Call a step with so many sizes, each of which is a form of its own; what is held once no more forms are kept,
    and after each 10 further ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step, found = weft.compile(train, dynamic=False), []
    full = min(knobs.form_limit + 2, count)
    for rows in range(1, count + 1):
        step(torch.ones(rows, 16))
        if rows in (full, count) or (rows > full and rows % every == 0):
            found.append((rows, held()))
    assert len(step.captures) == count
    assert len(step.entries) == min(knobs.form_limit, count)
    return found


def report(what: str, found: list[tuple[int, Memory]]) -> bool:
    """Print the readings; returns whether the later half reached more than the earlier one.

    Caches of bounded size grow, are emptied and grow again: single readings may differ by as much.
    """
    for done, memory in found:
        print(f"{what} {done:,}: {memory.mib:.1f} MiB, {memory.objects:,} objects", flush=True)
    half = (len(found) + 1) // 2
    earlier, later = ([memory for _, memory in part] for part in (found[:half], found[half:] or found))
    most = lambda part: Memory(max(each.mib for each in part), max(each.objects for each in part))
    grew = most(later).grew_from(most(earlier))
    print(f"{what}: memory {'GREW' if grew else 'is flat'}", flush=True)
    return grew


def main() -> int:
    """The command line; 1 where memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--forms", type=int, default=300)
    options = parser.parse_args()
    started, grew = time.monotonic(), False
    if options.forms:
        grew |= report("forms", forms(options.forms))
    if options.steps:
        train = importlib.import_module("memory_growth").steps  # the ranks import it, and do not run this command
        for rank, found in enumerate(run_ranks(train, RANKS, options.steps, timeout=60 + options.steps / 5)):
            grew |= report(f"rank {rank} of {RANKS}, steps", found)
    print(f"{time.monotonic() - started:.0f} s")
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
