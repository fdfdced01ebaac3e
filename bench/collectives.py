"""Collectives alone, by size: NCCL beside weft's transports, and what the cost model says of each.

    torchrun --nproc-per-node 8 -m weft.launch calibrate
    torchrun --nproc-per-node 8 bench/collectives.py

A size is that of the whole tensor in bfloat16. weft's gathers cast from float32 shards on their way, its
reduce-scatters read bfloat16 and sum in float32; NCCL's gather moves bfloat16 as it is, and its reduce-scatter takes
float32 to sum in float32. Each line gives microseconds, the speed relative to NCCL's, and predicted over measured.
Sizes between those that a description was fitted to are among them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.inductor.cost.calibrate import collective_benchmarks
from weft.inductor.cost.cluster import Cluster, cluster_here
from weft.inductor.cost.collective_cost import Collective, transfer
from weft.inductor.cost.measure_gpu import seconds_of
from weft.inductor.cost.nccl_benchmarks import BenchmarkGroup
from weft.inductor.transports.symmetric_memory import refuse_multicast

KIB = (64, 256, 1024, 2048, 4096, 8192, 16384, 65536, 262144, 524288)
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kib", nargs="+", type=int, default=KIB)
    parser.add_argument("--out", type=Path, default=Path("out/collectives.jsonl"))
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    refuse_multicast()
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    peers = BenchmarkGroup(dist.group.WORLD, tuple(range(dist.get_world_size())), device)
    cluster = cluster_here()
    rows = [row for kind in KINDS for kib in options.kib for row in timed(kind, kib << 10, peers, cluster)]
    if dist.get_rank() == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        report(rows, cluster.name)
    dist.destroy_process_group()


def timed(kind: str, size: int, peers: BenchmarkGroup, cluster: Cluster) -> list[dict[str, Any]]:
    """Time ``kind`` on ``size`` bytes of bfloat16 over every transport; the first is NCCL."""
    rows: list[dict[str, Any]] = []
    for benchmark in (benchmark for benchmark in collective_benchmarks("nccl") if benchmark.kind == kind):
        given = size // torch.bfloat16.itemsize * benchmark.dtype.itemsize
        start = benchmark.prepare(peers, given, 1)
        dist.barrier(peers.group)
        seconds = seconds_of(lambda start=start: start()(), peers.device, ahead=True)
        predicted = transfer(
            cluster, Collective(kind, peers.ranks, "", given, benchmark.dtype), benchmark.transport
        ).seconds
        rows.append(
            {
                "kind": kind,
                "transport": f"{benchmark.transport} {benchmark.dtype}".replace("torch.", ""),
                "size": size,
                "us": seconds * 1e6,
                "speed": rows[0]["us"] / (seconds * 1e6) if rows else 1.0,
                "predicted": predicted / seconds,
            }
        )
    return rows


def report(rows: list[dict[str, Any]], description: str) -> None:
    for row in rows:
        size = f"{row['size'] / 2**20:g} MiB"
        print(
            f"{row['kind']:15} {row['transport']:20} {size:>11} {row['us']:9.1f} us"
            f"  {row['speed']:5.2f} of NCCL's speed  predicted {row['predicted']:.2f}"
        )
    errors = [abs(row["predicted"] - 1) for row in rows]
    print(f"predicted by {description}: median error {statistics.median(errors):.1%} of {len(rows)}")


if __name__ == "__main__":
    main()
