"""Llama shapes on one GPU beside the least that a step can take: its products and its attention as they are, and all
other bytes at the speed of a copy. And the memory of the step with and without loss chunking.

    python bench/llama_floor.py                       # 1B at 2 x 2048, 8B of 8 layers at 1 x 8192
    python bench/llama_floor.py --impl eager compile weft --shapes 1b:2:2048

Weights and AdamW's states are bfloat16. Products and attention are timed where they run, in a profile of the step; the
bytes are those that generated kernels have to read and write, and seven of each weight's size for AdamW.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llama import SHAPES, Llama
from train_llama import BLOCK, train_step

import weft
from weft import knobs
from weft.inductor.cost.measure_gpu import seconds_of
from weft.inductor.cost.trace_timings import MeasuredSpan, measured_spans
from weft.inductor.runtime.graph_memory import peak_memory

# Parts of the names of kernels of products and of attention: cuBLAS's, cuDNN's, flash attention's.
LIBRARIES = ("nvjet", "gemm", "cutlass", "cudnn", "flash", "fmha")
SKIPPED = {"weft": ("", "chunk_loss")}  # passes to leave out, one after the other
ADAMW = 7  # a gradient read; a weight and two states read and written
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["1b:2:2048", "8b:1:8192:8"], help="size:batch:length[:layers]")
    parser.add_argument("--impl", nargs="+", default=["weft"], choices=["eager", "compile", "weft"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("out/llama_floor.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    copied = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    bandwidth = 2 * copied.numel() / seconds_of(copied.clone, DEVICE)
    del copied
    for shape in options.shapes:
        runs = [(impl, skipped) for impl in options.impl for skipped in SKIPPED.get(impl, ("",))]
        for impl, skipped in runs:
            with knobs.override(disable_passes=skipped):
                row = {"shape": shape, "impl": impl, "without": skipped}
                row |= measured(shape, impl, options.steps, bandwidth)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            show(row)


def show(row: dict[str, Any]) -> None:
    name = row["impl"] + (f" without {row['without']}" if row["without"] else "")
    floor = f"{row['step_ms'] / row['floor_ms']:.3f} of {row['floor_ms']:.1f} ms" if row["floor_ms"] else ""
    print(
        f"{row['shape']:14} {name:24} {row['step_ms']:8.2f} ms  {floor}  products and attention"
        f" {row['library_ms']:.1f} ms, all else {row['rest_ms']:.1f} ms  peak {row['peak_gib']:.1f} GiB",
        flush=True,
    )


def measured(shape: str, impl: str, steps: int, bandwidth: float) -> dict[str, Any]:
    size, batch, length, *layers = shape.split(":")
    sizes = SHAPES[size] if not layers else replace(SHAPES[size], layers=int(layers[0]))
    for _ in range(3):
        gc.collect()
    torch.cuda.empty_cache()
    with DEVICE:
        model = Llama(sizes).bfloat16()
        ids = torch.randint(0, sizes.vocabulary, (int(batch), int(length) + 1))
    if impl == "compile":
        for block in model.blocks:
            block.compile(fullgraph=True)
    step = train_step(model, clip=False)
    if impl == "weft":
        step = weft.compile(step)
    given = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    began = time.perf_counter()
    step(*given).item()
    first = time.perf_counter() - began
    blocks = max(1, steps // BLOCK)
    run_block(step, given)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(blocks):
        began = time.perf_counter()
        run_block(step, given)
        times.append((time.perf_counter() - began) * 1e3 / BLOCK)
    peak = peak_memory(DEVICE) / 2**30
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        # As many as were timed, behind one that is not: a GPU that comes from rest has a higher clock.
        for _ in range(1 + blocks):
            run_block(step, given)
    spans = sorted(measured_spans(profile), key=lambda span: span.start)
    each = len(spans) // (1 + blocks)
    profiled = [spans[at : at + each] for at in range(each, len(spans), each)][:blocks]
    library = statistics.median(milliseconds(block, LIBRARIES) for block in profiled)
    rest = statistics.median(milliseconds(block) for block in profiled) - library
    floor = moved = None
    if impl == "weft":
        kernels = weft.explain(step).kernel_report
        assert kernels is not None
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        moved = sum(use.bytes * use.count for use in kernels.kernels) + ADAMW * weights
        floor = library + moved / bandwidth * 1e3
    return {
        "step_ms": statistics.median(times),
        "best_ms": min(times),
        "library_ms": library,
        "rest_ms": rest,
        "rest_bytes": moved,
        "floor_ms": floor,
        "copy_bandwidth": bandwidth,
        "peak_gib": peak,
        "first_step_s": first,
        "longest": longest(profiled[-1]),
        "torch": torch.__version__,
    }


def run_block(step: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> None:
    for _ in range(BLOCK):
        step(*given)
    torch.cuda.synchronize()


def milliseconds(block: list[MeasuredSpan], names: tuple[str, ...] = ("",)) -> float:
    """What kernels with one of these parts in their names take of a step; ``block`` is what a block of steps ran."""
    return sum(span.end - span.start for span in block if any(name in span.name for name in names)) * 1e3 / BLOCK


def longest(spans: list[MeasuredSpan], most: int = 30) -> list[tuple[str, int, float]]:
    """Name, how often and milliseconds in a step of the kernels that took most of it; ``spans`` are of a block."""
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.name, []).append((span.end - span.start) * 1e3)
    found = [(name, len(each) // BLOCK, sum(each) / BLOCK) for name, each in times.items()]
    return sorted(found, key=lambda row: -row[2])[:most]


if __name__ == "__main__":
    main()
