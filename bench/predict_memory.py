"""How fast a sharded Llama trains with how much memory, by the cost model. No GPU is needed.

    python bench/predict_memory.py                                 # 8B at 1 x 8192 on 8 H200, minutes of CPU
    python bench/predict_memory.py --size 1b --length 2048 --layers 4
    python bench/predict_memory.py --limits 52 56 60               # GiB

The step is forward, loss, backward, clipping and fused AdamW, per-parameter FSDP in bfloat16 with gradients reduced in
float32, in a fake world. Without ``--limits`` they go from the least memory that any schedule needs to what it takes to
gather every parameter once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from compile_time import llama
from llama import SHAPES
from rich.console import Console
from rich.table import Table

import weft
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph
from weft.errors import MemoryLimitUnreachable
from weft.inductor.cost.cluster import Cluster, load_cluster
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.schedule.planner import Schedule, schedule

GIB = 2**30
COLUMNS = ["limit GiB", "peak GiB", "step ms", "tok/s/GPU", "exposed ms", "slowed ms", "gathers", "calls", "nodes/s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=list(SHAPES), default="8b")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a rank's batch")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--cluster", default="h200x8", help="a shipped cluster, or a path to a TOML file")
    parser.add_argument("--limits", nargs="+", type=float, help="GiB")
    options = parser.parse_args()
    table = Table(*COLUMNS, title=f"Llama {options.size}, 1 x {options.length} a rank, 8 ranks of {options.cluster}")
    for column in table.columns:
        column.justify = "right"
    cluster = load_cluster(options.cluster)
    with weft.fake_world(8), garbage_collection_paused():
        step, arguments = llama(f"llama-{options.size}-fsdp", options)
        made = kernel_graph(run_passes(retarget(weft.capture(step, *arguments)), KERNEL_PASSES))
        for limit, found, seconds in schedules(made, cluster, options.limits):
            table.add_row(*row(limit, found, options.length), f"{len(made) / seconds:,.0f}")
    Console(width=120).print(table)


def schedules(step: StepGraph, cluster: Cluster, limits: list[float] | None) -> Iterator[tuple[int, Schedule, float]]:
    """Limits in bytes, their schedules, and how long these took to make."""
    if limits is None:
        most = least = schedule(step, cluster).simulation.peak
        try:
            schedule(step, cluster, 1)
        except MemoryLimitUnreachable as error:
            least = error.peak
        wanted = [least + (most - least) * part // 6 for part in range(7)]
    else:
        wanted = [int(limit * GIB) for limit in limits]
    for limit in wanted:
        started = time.process_time()
        found = schedule(step, cluster, limit)
        yield limit, found, time.process_time() - started


def row(limit: int, found: Schedule, tokens: int) -> list[str]:
    simulation = found.simulation
    gathers = sum(len(report.members) for report in found.reports if report.kind == "all_gather")
    return [
        f"{limit / GIB:.2f}",
        f"{simulation.peak / GIB:.2f}",
        f"{simulation.seconds * 1e3:.1f}",
        f"{tokens / simulation.seconds:,.0f}",
        f"{simulation.exposed_seconds * 1e3:.1f}",
        f"{sum(simulation.slowed_seconds.values()) * 1e3:.1f}",
        str(gathers),
        str(len(found.reports)),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
