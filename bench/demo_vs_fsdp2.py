"""The demo's step, three ways in the same processes: weft compiled, weft eager, torch's FSDP2 eager.

    torchrun --nproc-per-node 2 bench/demo_vs_fsdp2.py --rounds 10 --block 5 --out out/demo_vs_fsdp2.json

The three take turns in blocks of a few steps, so that what else the machine does falls on all of them alike.
A round's ratio is that of its blocks' medians; the figure to read is the median of the rounds' ratios. The
time of a step is the slowest rank's. The three start from the same weights and see the same batches: the
largest difference of their losses is printed beside the times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from lm.data import read_corpus
from lm.model import Config
from lm.trainer import Kind, Settings, Trainer
from train_lm import join_ranks

KINDS: tuple[Kind, ...] = ("compiled", "eager", "peer")
NAMES = {"compiled": "weft, compiled", "eager": "weft, eager", "peer": "torch FSDP2, eager"}


def main() -> None:
    options = parse_arguments()
    device = join_ranks()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    corpus = read_corpus()
    settings = Settings(batch=options.batch)
    trainers = {kind: Trainer(kind, Config(), settings, corpus, mesh, device) for kind in KINDS}
    first: dict[Kind, float] = {kind: timed_block(trainers[kind], 1)[0] for kind in KINDS}
    for kind in KINDS:
        timed_block(trainers[kind], options.warmup)
    rounds: list[dict[Kind, list[float]]] = [
        {kind: timed_block(trainers[kind], options.block) for kind in turn(number)} for number in range(options.rounds)
    ]
    differences = loss_differences(trainers)
    rows = [summary(kind, first[kind], rounds, differences[kind]) for kind in KINDS]
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        title = f"the demo's step on {dist.get_world_size()} x {where}, torch {torch.__version__}"
        report(title, rows)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"title": title, "rows": [asdict(row) for row in rows]}, indent=1))
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="how often each of the three has its turn")
    parser.add_argument("--block", type=int, default=5, help="steps in a turn")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each that are not counted")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="sequences of a rank in a step")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


def turn(number: int) -> tuple[Kind, ...]:
    """Who goes in which order in a round: each goes first equally often."""
    start = number % len(KINDS)
    return KINDS[start:] + KINDS[:start]


def timed_block(trainer: Trainer, steps: int) -> list[float]:
    """Seconds of each step, the slowest rank's."""
    seconds = []
    for _ in range(steps):
        synchronize(trainer.device)
        dist.barrier()
        start = time.perf_counter()
        trainer.train()
        synchronize(trainer.device)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=trainer.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Row:
    """One of the three: medians over all rounds, ratios to torch's FSDP2 of the same round."""

    name: str
    first_step_ms: float
    step_ms: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    loss_difference: float


def summary(kind: Kind, first: float, rounds: list[dict[Kind, list[float]]], difference: float) -> Row:
    ratios = [statistics.median(turns[kind]) / statistics.median(turns["peer"]) for turns in rounds]
    return Row(
        name=NAMES[kind],
        first_step_ms=1e3 * first,
        step_ms=1e3 * statistics.median(seconds for turns in rounds for seconds in turns[kind]),
        ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        highest_ratio=max(ratios),
        loss_difference=difference,
    )


def loss_differences(trainers: dict[Kind, Trainer]) -> dict[Kind, float]:
    """The next step's loss against the peer's, the largest over ranks: all have taken the same steps."""
    losses = {kind: trainer.train()[0].double() for kind, trainer in trainers.items()}
    found: dict[Kind, float] = {}
    for kind in KINDS:
        difference = (losses[kind] - losses["peer"]).abs()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        found[kind] = difference.item()
    return found


def report(title: str, rows: list[Row]) -> None:
    table = Table(title=title)
    for heading in ("", "first step ms", "step ms", "ratio to FSDP2", "range over rounds", "loss difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.first_step_ms:.0f}",
            f"{row.step_ms:.1f}",
            f"{row.ratio:.3f}",
            f"{row.lowest_ratio:.3f} to {row.highest_ratio:.3f}",
            f"{row.loss_difference:g}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
