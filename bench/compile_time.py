"""Where the seconds of a compilation go: a whole training step on fakes, its kernels compiled for sm_90, no GPU.

    python bench/compile_time.py --model llama-8b llama-8b-fsdp gpt2 resnet50
    python bench/compile_time.py --model llama-8b --profile fuse     # what one stage spends its time on

Each model is a process of its own with an empty cache of its own. The step is forward, loss, backward, clipping (Llama)
and fused AdamW. Seconds are those of the CPU (this process and those that compile for it), which other work on the
machine does not lengthen; ``wall_s`` is the clock. ``warm_after_capture_s`` is what a second process spends after its
capture.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from llama import SHAPES, Llama
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import knobs
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph
from weft.inductor.cache.graph_cache import cached
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.aten import compile_aten

ARCH = 90
LLAMAS = {f"llama-{size}{kind}": (size, kind) for size in SHAPES for kind in ("", "-fsdp")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=["llama-1b", "llama-8b", "gpt2", "resnet50"])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a Llama's batch")
    parser.add_argument("--layers", type=int, help="another number of layers of Llamas")
    parser.add_argument("--profile", nargs="+", default=[], help="stages to print the profile of")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compilation of kernels")
    options = parser.parse_args()
    for name in options.model:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(row_of, (name, options)), flush=True)


def row_of(name: str, options: argparse.Namespace) -> str:
    try:
        return json.dumps(measure(name, options))
    except weft.WeftError as error:  # which cannot travel between processes
        return f"{name} failed: {error}"


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every stage of one model."""
    with tempfile.TemporaryDirectory() as cache, knobs.override(cache_dir=cache):
        runner = _Profiled(options.profile)
        with weft.fake_world(8 if name.endswith("-fsdp") else 1):
            step, arguments = llama(name, options) if name in LLAMAS else library(name)
            began = time.perf_counter()
            graph = runner.timed("capture", lambda: weft.capture(step, *arguments))
        with garbage_collection_paused():
            made = compiled(graph, runner)
            write_s = cpu_seconds(lambda: cached(graph, lambda step: kernel_graph(run_passes(step, KERNEL_PASSES))))
            warm_s = cpu_seconds(lambda: compile_aten(cached(graph, unexpected), planned=True))
        row: dict[str, Any] = {"model": name, "nodes": len(graph), "seconds": rounded(runner)}
        kernels = [node.target for node in made.graph.nodes if isinstance(node.target, KernelCall)]
        if not options.no_compile:
            sources = [*(call.generated.source for call in kernels), *multi_tensor_sources(made)]
            row["compile_s"] = round(cpu_seconds(lambda: compile_pool.build(sources, ARCH)), 2)
            row["compile_again_s"] = round(cpu_seconds(lambda: compile_pool.build(sources, ARCH)), 2)
            row["different"] = len(set(sources))
        row["total_s"] = round(sum(runner.seconds.values()) + row.get("compile_s", 0.0), 2)
        row["after_capture_s"] = round(sum(runner.seconds.values()) - runner.seconds["capture"], 2)
        row["write_cache_s"] = round(write_s, 2)
        row["warm_after_capture_s"] = round(warm_s + row.get("compile_again_s", 0.0), 2)
        row["wall_s"] = round(time.perf_counter() - began, 2)
        row |= {"kernels": len(kernels), "torch": torch.__version__}
    return row


def compiled(graph: StepGraph, runner: PassRunner) -> StepGraph:
    """Everything that ``weft.compile`` does after the capture but for compiling and loading kernels."""
    step = runner.timed("copy", graph.copy)
    for pass_ in KERNEL_PASSES:
        step = runner.run(pass_.__name__, step, [pass_])
    made = kernel_graph(step, runner)
    runner.timed("program", lambda: compile_aten(made, planned=True))
    return made


def unexpected(step: StepGraph) -> StepGraph:
    raise AssertionError("the step should have been in the cache")


def multi_tensor_sources(step: StepGraph) -> Iterator[KernelSource]:
    for node in step.graph.nodes:
        if isinstance(node.target, MultiTensor):
            fakes: Any = torch.fx.node.map_arg(node.args, lambda used: used.meta["val"])
            yield from (launch.kernel for launch in node.target.plan(fakes).launches)


def llama(name: str, options: argparse.Namespace) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Of bfloat16 weights on one GPU, or sharded over eight."""
    size, kind = LLAMAS[name]
    shape = SHAPES[size]
    if options.layers:
        shape = type(shape)(**{**vars(shape), "layers": options.layers})
    with torch.device("meta"):
        model = Llama(shape)
    if kind == "-fsdp":
        mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
        policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            weft.fully_shard(block, mesh=mesh, mp_policy=policy)
        weft.fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        model = model.bfloat16()
    model.to_empty(device="cuda")
    ids = torch.zeros(1, options.length, dtype=torch.long, device="cuda")
    return llama_step(model), (ids, torch.zeros_like(ids))


def llama_step(model: torch.nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)  # which is the default on GPUs only
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def library(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A model of the zoo under bfloat16 autocast, as ``bench/models.py`` trains it."""
    from models import train_step as library_step
    from zoo import WORKLOADS

    workload = next(workload for workload in WORKLOADS if workload.name == name)
    device = torch.device("cuda")
    with device:
        model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return library_step(workload, model, optimizer, device.type), tuple(workload.batches(1, device))


# ---- measuring


class _Profiled(PassRunner):
    """A runner that prints the profile of some stages."""

    def __init__(self, stages: list[str]) -> None:
        super().__init__()
        self.stages = stages

    def timed(self, stage: str, run: Callable[[], Any]) -> Any:
        """As a runner's, with the profile of some stages."""
        if stage not in self.stages:
            return super().timed(stage, run)
        with cProfile.Profile() as profile:
            result = super().timed(stage, run)
        print(stage)
        for order in ("tottime", "cumtime"):
            pstats.Stats(profile).sort_stats(order).print_stats(35)
        return result


def cpu_seconds(run: Callable[[], Any]) -> float:
    began = os.times()
    run()
    ended = os.times()
    return sum(ended[:4]) - sum(began[:4])


def rounded(runner: PassRunner) -> dict[str, float]:
    return {name: round(seconds, 2) for name, seconds in runner.seconds.items()}


if __name__ == "__main__":
    main()
