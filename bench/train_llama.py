"""Train Llama shapes on all GPUs: weft beside torch's FSDP2 and DDP, in the same processes and on the same data.

    torchrun --nproc-per-node 8 bench/train_llama.py --size 8b --impl fsdp2+compile fsdp2+compile-keep-bf16 compute weft
    torchrun --nproc-per-node 8 bench/train_llama.py --size 1b --batch 2 --impl ddp+compile compute weft-replicate
    torchrun --nproc-per-node 2 bench/train_llama.py --layers 8 --length 8192 --impl tp tp+compile weft-tp

Those with ``tp`` in their name shard weights, sequence and loss over all ranks, which see one batch, in bfloat16. Those
with ``hf-tp`` train the Llama of transformers in this shape, without sequence parallelism: by a plan for torch's
styles, and by the one that weft derives.
Sharded implementations start from the same weights and all see the same batches, so that losses can be compared.
``compute`` is forward and backward of an unsharded model, with no communication and no optimizer: what communication
has to hide behind. Knobs of weft may stand behind a name: ``weft:transports=all:even_batches=1``, and a limit of memory
in GiB: ``weft:memory_limit=45``. Prints a table with ratios to the first implementation, beside weft's what it
predicted, and writes one JSON line a run to ``--out``. With ``--profile`` it says how much communication is exposed on
the rank where least is, which is the slowest GPU's: others wait for it too; and it writes that rank's trace of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor.parallel as torch_tp
from llama import SHAPES, Llama, Shape
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from weft import knobs
from weft.compile import CompiledStep
from weft.inductor.cost.chrome_trace import write_trace
from weft.inductor.cost.trace_timings import MeasuredSpan, exposed_seconds, measured_spans
from weft.inductor.runtime.graph_memory import peak_memory
from weft.inductor.transports.arena_layout import shared_bytes

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PEAK_BF16 = 989e12
WARM_UP = 5
BLOCK = 5  # steps that the host does not wait in


def main() -> None:
    options = arguments()
    device = join()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    logging.getLogger("weft").setLevel(logging.INFO)
    for size in options.size:
        rows: list[dict[str, Any]] = []
        for impl in options.impl:
            rows.append(run(impl, size, options, mesh, device))
            if dist.get_rank() == 0:
                report(rows, options.out)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", nargs="+", default=["1b"], choices=list(SHAPES))
    parser.add_argument("--impl", nargs="+", default=["fsdp2", "fsdp2+compile", "weft"], type=implementation)
    parser.add_argument("--layers", type=int, help="instead of those of the shape")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="record two more steps: what is exposed of the second")
    parser.add_argument("--no-clip", action="store_true", help="leave out the clipping of gradients by their norm")
    parser.add_argument("--out", type=Path, default=Path("out/train_llama.jsonl"))
    return parser.parse_args()


def join() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def implementation(text: str) -> str:
    """The name of an implementation and knobs, once all are known."""
    name, settings = parsed(text)
    for knob in settings:
        if name not in IMPLEMENTATIONS or (knob != "memory_limit" and knob not in knobs.KNOBS):
            raise argparse.ArgumentTypeError(f"{text}: there is no knob {knob}")
    if name not in IMPLEMENTATIONS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(IMPLEMENTATIONS)}")
    return text


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """``weft:a=1:b=x`` is ("weft", {"a": "1", "b": "x"})."""
    name, *settings = text.split(":")
    return name, dict(setting.split("=", 1) for setting in settings)


def run(impl: str, size: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    name, settings = parsed(impl)
    limit = settings.pop("memory_limit", None)
    given = {knob: knobs.KNOBS[knob].parse(text) for knob, text in settings.items()}
    with knobs.override(**given):
        shape = replace(SHAPES[size], layers=options.layers or SHAPES[size].layers)
        bench = Bench(shape, mesh, device, options, None if limit is None else float(limit))
        return {"size": size, "impl": impl, **measured(IMPLEMENTATIONS[name], bench, "tp" in re.split(r"\W", name))}


def measured(make: Callable[[Bench], Step], bench: Bench, one_batch: bool) -> dict[str, Any]:
    """Train for ``--steps`` steps, after the first ones in blocks that the host does not wait in, as a user trains; the
    time of a step is the median over the blocks."""
    options, device, shape = bench.options, bench.device, bench.shape
    started = time.perf_counter()
    reset(device)
    step = make(bench)
    synchronize(device)
    made = time.perf_counter() - started
    data = torch.Generator(device).manual_seed(1000 + (0 if one_batch else dist.get_rank()))

    def one() -> torch.Tensor:
        ids = torch.randint(0, shape.vocabulary, (options.batch, options.length + 1), device=device, generator=data)
        return step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    synchronize(device)
    losses = [one()]
    synchronize(device)
    first, since_start = time.perf_counter() - started, process_seconds()
    losses += [one() for _ in range(WARM_UP - 1)]
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, paused = [], []
    for _ in range(max(1, (options.steps - WARM_UP) // BLOCK)):
        begin = time.perf_counter()
        with collections() as pauses:
            losses += [one() for _ in range(BLOCK)]
        synchronize(device)
        times.append((time.perf_counter() - begin) / BLOCK)
        paused.append(sum(pauses))
    explained = weft.explain(step) if isinstance(step, CompiledStep) else None
    schedule = None if explained is None else explained.schedule
    shared = 0 if explained is None or explained.kernel_report is None else shared_bytes(explained.kernel_report.graph)
    exposed, longest = list[float](), []
    if options.profile and device.type == "cuda":
        spans = profiled(one, device)
        exposed, longest = by_rank(exposed_seconds(spans) * 1e3, device), by_kernel(spans)
        if dist.get_rank() == exposed.index(min(exposed)) and schedule is not None:
            write_trace(options.out.with_suffix(".trace.json"), schedule.simulation, spans)
    mean = torch.stack(losses).float()
    dist.all_reduce(mean)
    median = statistics.median(times)
    tokens = options.batch * options.length / median / (dist.get_world_size() if one_batch else 1)
    peak = (peak_memory() + shared) / 2**30 if device.type == "cuda" else 0.0
    reserved = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
    return {
        "world": dist.get_world_size(),
        "length": options.length,
        "batch": options.batch,
        "memory_limit": bench.memory_limit,
        "clip": not options.no_clip,
        "step_ms": median * 1e3,
        "exposed_ms": min(exposed, default=None),
        "exposed_by_rank_ms": exposed,
        "predicted_ms": None if schedule is None else schedule.simulation.seconds * 1e3,
        "predicted_exposed_ms": None if schedule is None else schedule.simulation.exposed_seconds * 1e3,
        "predicted_gib": None if schedule is None else schedule.simulation.peak / 2**30,
        "longest": longest,
        "best_ms": min(times) * 1e3,
        "blocks_ms": [each * 1e3 for each in times],
        "blocks_collecting_ms": [max(by_rank(each * 1e3, device)) for each in paused],
        "tokens_per_second": tokens,
        "mfu": tokens * shape.flops_per_token(options.length) / PEAK_BF16,
        "peak_gib": peak,
        "reserved_gib": reserved,
        "model_s": made,
        "first_step_s": first,
        "since_start_s": since_start,
        "capture_s": None if explained is None else explained.seconds,
        "compile_s": None if explained is None or explained.kernel_report is None else explained.kernel_report.seconds,
        "torch": torch.__version__,
        "losses": (mean / dist.get_world_size()).tolist(),
    }


@contextmanager
def collections() -> Iterator[list[float]]:
    """Seconds of each of Python's cyclic collections inside. A rank whose host collects is late for the others."""
    found: list[float] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(-time.perf_counter())
        elif found and found[-1] < 0:
            found[-1] += time.perf_counter()

    gc.callbacks.append(collecting)
    try:
        yield found
    finally:
        gc.callbacks.remove(collecting)


def process_seconds() -> float:
    """How long this process has been running."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def profiled(step: Callable[[], Any], device: torch.device) -> list[MeasuredSpan]:
    """What ran on this rank's GPU in the second of two steps; ranks begin the first when their hosts come to it."""
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        step()
        torch.cuda.synchronize()
    streams: dict[str, list[MeasuredSpan]] = {}
    for span in measured_spans(profile, device.index):
        streams.setdefault(span.stream, []).append(span)
    second = [span for spans in streams.values() for span in spans[len(spans) // 2 :]]
    first = min((span.start for span in second), default=0.0)
    rebased = [span._replace(start=span.start - first, end=span.end - first) for span in second]
    return sorted(rebased, key=lambda span: span.start)


def by_rank(number: float, device: torch.device) -> list[float]:
    """That number of every rank."""
    found = torch.empty(dist.get_world_size(), device=device)
    dist.all_gather_into_tensor(found, torch.tensor([number], device=device))
    return found.tolist()


def by_kernel(spans: list[MeasuredSpan], most: int = 40) -> list[tuple[str, str, int, float]]:
    """Stream, name, how often and milliseconds of the kernels that took most of a step."""
    times: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        times.setdefault((span.stream, span.name), []).append((span.end - span.start) * 1e3)
    found = [(stream, name, len(each), sum(each)) for (stream, name), each in times.items()]
    return sorted(found, key=lambda row: -row[3])[:most]


def reset(device: torch.device) -> None:
    if "torch._dynamo" in sys.modules:  # else this would import it, and inductor, which takes seconds
        torch.compiler.reset()
    for _ in range(3):  # what autograd's nodes held is found the next time
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def train_step(
    model: torch.nn.Module, clip: bool = True, optimize: bool = True, autocast: torch.device | None = None
) -> Step:
    """An ordinary step of ``model``; without ``optimize`` it is forward and backward only."""
    kinds = (isinstance(parameter, DTensor) for parameter in model.parameters())
    by_kind = [[each for each in model.parameters() if isinstance(each, DTensor) is kind] for kind in {*kinds}]
    optimizer = torch.optim.AdamW([{"params": each} for each in by_kind], lr=1e-5, fused=True)  # it takes no mixture

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not optimize:
            optimizer.zero_grad()  # gradients are there after the step: what nobody can see, weft does not compute
        with torch.autocast(autocast.type, torch.bfloat16) if autocast else nullcontext():
            loss = model(ids, labels)
        loss.backward()
        if clip and optimize:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if optimize:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def fill(model: torch.nn.Module, device: torch.device) -> None:
    """The same values whatever sharded the model: each rank draws its own part of each parameter."""
    model.to_empty(device=device)
    draws = torch.Generator(device).manual_seed(dist.get_rank())
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        with torch.no_grad():
            local.fill_(1.0) if parameter.dim() == 1 else local.normal_(0.0, 0.02, generator=draws)


# ---- implementations


@dataclass(frozen=True)
class Bench:
    """What an implementation makes its step from."""

    shape: Shape
    mesh: DeviceMesh
    device: torch.device
    options: argparse.Namespace
    memory_limit: float | None

    @cached_property
    def model(self) -> Llama:
        """On the meta device."""
        with torch.device("meta"):
            return Llama(self.shape)

    def sharded(self, shard: Callable[..., Any], keep: bool = False, reduce: torch.dtype = torch.float32) -> Step:
        """Block by block, gathered in bfloat16; ``keep`` holds gathered weights until backward."""
        policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        for module in (*self.model.blocks, self.model):
            shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=not keep)
        fill(self.model, self.device)
        return self.step()

    def step(self, **how: Any) -> Step:
        return train_step(self.model, clip=not self.options.no_clip, **how)


def fsdp2(bench: Bench) -> Step:
    return bench.sharded(torch_fsdp.fully_shard)


def fsdp2_compile(bench: Bench, **how: Any) -> Step:
    for block in bench.model.blocks:
        block.compile(fullgraph=True)
    return bench.sharded(torch_fsdp.fully_shard, **how)


def fsdp2_compile_keep(bench: Bench) -> Step:
    return fsdp2_compile(bench, keep=True)


def fsdp2_compile_keep_bf16(bench: Bench) -> Step:
    return fsdp2_compile(bench, keep=True, reduce=torch.bfloat16)


def ddp_compile(bench: Bench) -> Step:
    fill(bench.model, bench.device)
    on = [bench.device] if bench.device.type == "cuda" else None
    replicated = torch.nn.parallel.DistributedDataParallel(bench.model, device_ids=on, gradient_as_bucket_view=True)
    compiled: Any = torch.compile(replicated)
    return train_step(compiled, clip=not bench.options.no_clip, autocast=bench.device)


def compute(bench: Bench) -> Step:
    """Compiled block by block in bfloat16, each rank by itself."""
    bench.model.bfloat16()
    for block in bench.model.blocks:
        block.compile(fullgraph=True)
    fill(bench.model, bench.device)
    return bench.step(optimize=False)


def weft_eager(bench: Bench) -> Step:
    return bench.sharded(weft.fully_shard)


def weft_sharded(bench: Bench) -> Step:
    return weft.compile(weft_eager(bench), memory_limit=bench.memory_limit)


def weft_replicate(bench: Bench) -> Step:
    fill(bench.model, bench.device)
    weft.replicate(bench.model, mesh=bench.mesh)
    return weft.compile(bench.step(autocast=bench.device), memory_limit=bench.memory_limit)


def weft_compute(bench: Bench) -> Step:
    """What ``compute`` does, by weft's kernels."""
    bench.model.bfloat16()
    fill(bench.model, bench.device)
    return weft.compile(bench.step(optimize=False))


def tensor_parallel(bench: Bench, by: Any = torch_tp) -> Step:
    """Weights, the sequence between blocks and the loss are sharded; one gather serves query, key and value, and one
    gate and up. ``by``: whose functions and styles, PyTorch's or weft's."""
    model, mesh = bench.model.bfloat16(), bench.mesh
    whole, sequence = Replicate(), Shard(1)
    wide = by.ColwiseParallel(input_layouts=whole)
    narrow = by.RowwiseParallel(output_layouts=sequence)
    plan = {
        "embedding": by.RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        **{f"blocks.*.{name}": by.SequenceParallel() for name in ("attention_norm", "feed_norm")},
        **{f"blocks.*.{name}": wide for name in ("query", "key", "value", "gate", "up")},
        **{f"blocks.*.{name}": narrow for name in ("out", "down")},
        "norm": by.SequenceParallel(),
        "head": by.ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }
    by.parallelize_module(model, mesh, plan, src_data_rank=None)
    gathered = by.PrepareModuleOutput(output_layouts=sequence, desired_output_layouts=whole, use_local_output=False)
    by.parallelize_module(model, mesh, {f"blocks.*.{name}": gathered for name in ("attention_norm", "feed_norm")})
    fill(model, bench.device)
    step = bench.step()

    def with_sharded_loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with by.loss_parallel():
            loss = step(ids, labels)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    return with_sharded_loss


def tensor_parallel_compile(bench: Bench) -> Step:
    for block in bench.model.blocks:
        block.compile(fullgraph=True)
    return tensor_parallel(bench)


def tensor_parallel_compile_async(bench: Bench) -> Step:
    """PyTorch's own overlap of GEMMs and collectives, over symmetric memory."""
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(bench.mesh.get_group().group_name)
    return tensor_parallel_compile(bench)


def weft_tensor_parallel(bench: Bench) -> Step:
    return weft.compile(tensor_parallel(bench, weft), memory_limit=bench.memory_limit)


def weft_tensor_parallel_by_torch(bench: Bench) -> Step:
    return weft.compile(tensor_parallel(bench), memory_limit=bench.memory_limit)


class LibraryLlama(torch.nn.Module):
    """The Llama of transformers, with the loss of :class:`llama.Llama`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[missing-import]

        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
        )
        self.inner = LlamaForCausalLM(config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.inner(ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def filled(self, device: torch.device) -> LibraryLlama:
        """With random weights, and with the frequencies of its rotary embeddings, which are no parameters."""
        fill(self, device)
        rotary = self.inner.model.rotary_emb
        self.inner.model.rotary_emb = type(rotary)(self.inner.config).to(device)
        return self


def library_model(bench: Bench) -> LibraryLlama:
    with torch.device("meta"):
        return LibraryLlama(bench.shape).bfloat16()


def library_tensor_parallel_compile(bench: Bench) -> Step:
    """torch's styles for every Linear, compiled block by block."""
    model, whole = library_model(bench), Replicate()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, torch_tp.ParallelStyle] = {
        "inner.model.embed_tokens": torch_tp.RowwiseParallel(input_layouts=whole),
        **{f"inner.model.layers.*.{name}": torch_tp.ColwiseParallel() for name in columns},
        **{
            f"inner.model.layers.*.{name}": torch_tp.RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
        },
        "inner.lm_head": torch_tp.ColwiseParallel(output_layouts=whole),
    }
    torch_tp.parallelize_module(model, bench.mesh, plan, src_data_rank=None)
    for block in model.inner.model.layers:
        block.compile(fullgraph=True)
    return train_step(model.filled(bench.device), clip=False)  # torch leaves norms plain, and clips no mixture


def weft_library_tensor_parallel(bench: Bench) -> Step:
    """By the plan that weft derives."""
    model = library_model(bench)
    weft.parallelize(model.inner, bench.mesh, "auto", src_data_rank=None)
    step = train_step(model.filled(bench.device), clip=False)
    return weft.compile(step, memory_limit=bench.memory_limit)


IMPLEMENTATIONS: dict[str, Callable[[Bench], Step]] = {
    "fsdp2": fsdp2,
    "fsdp2+compile": fsdp2_compile,
    "fsdp2+compile-keep": fsdp2_compile_keep,
    "fsdp2+compile-keep-bf16": fsdp2_compile_keep_bf16,
    "ddp+compile": ddp_compile,
    "compute": compute,
    "tp": tensor_parallel,
    "tp+compile": tensor_parallel_compile,
    "tp+compile-async-tp": tensor_parallel_compile_async,
    "weft": weft_sharded,
    "weft-tp": weft_tensor_parallel,
    "weft-torch-tp": weft_tensor_parallel_by_torch,
    "hf-tp+compile": library_tensor_parallel_compile,
    "weft-hf-tp": weft_library_tensor_parallel,
    "weft-replicate": weft_replicate,
    "weft-compute": weft_compute,
    "weft-eager": weft_eager,
}


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """Write and print the last row; above the first, what was trained."""
    base, row = rows[0], rows[-1]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    if row is base:
        tokens = f"{base['batch']} x {base['length']} tokens a rank"
        print(f"{base['size']}: {tokens}, {base['world']} ranks, torch {base['torch']}")
    exposed = (
        ""
        if row["exposed_ms"] is None
        else f"  exposed {row['exposed_ms']:.1f} to {max(row['exposed_by_rank_ms']):.1f} ms"
    )
    predicted = ""
    if row["predicted_ms"] is not None:
        figures = f"{row['predicted_ms']:.1f} ms, exposed {row['predicted_exposed_ms']:.1f} ms"
        predicted = f"  (predicted {figures}, {row['predicted_gib']:.1f} GiB)"
    started = f", {row['since_start_s']:.1f} s after the process started" if row is base else ""
    apart = max(abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=True))
    print(
        f"  {row['impl']:24} {row['step_ms']:8.1f} ms ({row['step_ms'] / base['step_ms']:.3f} of {base['impl']})"
        f"  {row['tokens_per_second']:9,.0f} tok/s  MFU {row['mfu']:.1%}  peak {row['peak_gib']:.1f} GiB"
        f" (reserved {row['reserved_gib']:.1f}){exposed}{predicted}"
        f"  first step {row['first_step_s']:.1f} s, {row['model_s']:.1f} of them the model's{started}"
        f"  losses {row['losses'][0]:.4f} .. {row['losses'][-1]:.4f}, at most {apart:.2e} apart",
        flush=True,
    )


if __name__ == "__main__":
    main()
