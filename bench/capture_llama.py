"""How long it takes to capture a whole training step, and how large the graph is: Llama shapes on fakes, no GPU.

    python bench/capture_llama.py --size 8b 70b --world 8 4096

The step is forward, loss, backward, clipping and fused AdamW over ``weft.fully_shard`` with bf16 parameters and fp32
reduction. Each row is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

import torch
from llama import SHAPES, Llama
from torch.distributed.device_mesh import init_device_mesh
from train_llama import train_step

import weft


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", nargs="+", default=["8b", "70b"], choices=list(SHAPES))
    parser.add_argument("--world", nargs="+", type=int, default=[8, 4096])
    parser.add_argument("--length", type=int, default=8192)
    options = parser.parse_args()
    for size in options.size:
        for world in options.world:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measure, (size, world, options.length))
            print(json.dumps(row), flush=True)


def measure(size: str, world: int, length: int) -> dict[str, Any]:
    """Capture one step as rank 0 of ``world``."""
    began = time.perf_counter()
    with weft.fake_world(world):
        mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
        policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with torch.device("meta"):
            model = Llama(SHAPES[size])
        for block in model.blocks:
            weft.fully_shard(block, mesh=mesh, mp_policy=policy)
        weft.fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device="cuda")
        step = train_step(model)
        ids = torch.zeros(1, length, dtype=torch.long, device="cuda")
        built = time.perf_counter()
        graph = weft.capture(step, ids, torch.zeros_like(ids))
        captured = time.perf_counter()
    return {
        "size": size,
        "world": world,
        "length": length,
        "nodes": len(graph),
        "collectives": len(graph.collectives()),
        "wrap_s": round(built - began, 2),
        "capture_s": round(captured - built, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
