"""What an asynchronous save adds to the demo's training step beside it.

    torchrun --nproc-per-node 2 bench/save_overhead.py --saves 20

Each save is followed by steps until it is on the disk, and by as many without one: other programs of the machine slow
both. The time of a step is the slowest rank's. The median step beside a save is compared with the median of those after
it; prints the median of these ratios, and what a save adds in all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from lm.data import read_corpus
from lm.model import Config
from lm.trainer import Settings, Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=100, help="steps, for the share of saves in the whole time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    trainer = Trainer("compiled", Config(), Settings(), read_corpus(), mesh, device)
    state = weft.TrainState(model=trainer.model, optimizer=trainer.optimizer)
    folder: list[str] = [tempfile.mkdtemp(prefix="weft")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    for _ in range(5):
        trainer.train()
    alone: list[float] = []
    beside: list[float] = []
    calls: list[float] = []
    ratios: list[float] = []
    added: list[float] = []  # seconds of all steps beside one save, less those of as many steps without
    for number in range(options.saves):
        calls.append(timed(lambda number=number: state.save(folder[0], number)))
        with_save = []
        while slowest(float(state.saving)):
            with_save.append(timed(trainer.train))
        state.wait()
        without = [timed(trainer.train) for _ in with_save]
        beside += with_save
        alone += without
        ratios.append(statistics.median(with_save) / statistics.median(without) - 1)
        added.append(sum(with_save) - sum(without))
    if dist.get_rank() == 0:
        step, call = statistics.median(alone), statistics.median(calls)
        share = (call + statistics.median(added)) / (options.save_every * step)
        print(
            f"step {step * 1e3:.1f} ms; beside a save {statistics.median(ratios):+.1%} (median of {len(ratios)} "
            f"saves, {len(beside) / len(calls):.1f} steps each); the call of save {call * 1e3:.1f} ms; "
            f"a save adds {(call + statistics.median(added)) * 1e3:.0f} ms in all, "
            f"{share:.2%} at one in {options.save_every} steps"
        )
    dist.destroy_process_group()


def timed(action: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    action()
    return slowest(time.perf_counter() - begun)


def slowest(mine: float) -> float:
    """The largest number of a rank."""
    largest = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


if __name__ == "__main__":
    main()
