"""Train library models (``zoo.py``) one way and another: eager, torch.compile and weft, in the same run.

    python bench/models.py --impl eager compile weft --out out/models.jsonl
    python bench/models.py --models gpt2 resnet50 --check            # errors of gradients instead of times
    python bench/models.py --tiny --no-dropout --impl eager weft     # toy sizes, on a CPU

The step is the field's ordinary one: forward under bfloat16 autocast, backward, fused AdamW. Every implementation
starts from a fresh model with the same seed and sees the same batches. Writes one JSON line a model and implementation
as soon as it is measured, and prints ratios at the end (``--report`` prints them from what ``--out`` holds). All run in
one worker process, which is replaced when an implementation breaks it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from zoo import WORKLOADS, Batch, Workload

import weft

Row = dict[str, Any]
Step = Callable[[Batch], torch.Tensor]
COMPARED = 5  # losses of the first steps that are compared with eager's
LOSS_TOLERANCE = 0.02
GRADIENT_TOLERANCE = 2.0  # times eager's own error


@dataclass(frozen=True)
class Options:
    """What a worker must know of the command line."""

    steps: int
    warmup: int
    tiny: bool
    dropout: bool
    check: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- one implementation of one model


def train_step(workload: Workload, model: Callable[..., Any], optimizer: torch.optim.Optimizer, device: str) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def gradient_step(workload: Workload, model: Callable[..., Any], *_: Any) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        loss = workload.loss(model, batch)
        loss.backward()
        return loss

    return step


MakeStep = Callable[[Callable[..., Any]], Step]


def reduce_overhead(model: torch.nn.Module, make_step: MakeStep) -> Step:
    inner = make_step(torch.compile(model, mode="reduce-overhead"))

    def step(batch: Batch) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return inner(batch)

    return step


IMPLEMENTATIONS: dict[str, Callable[[torch.nn.Module, MakeStep], Step]] = {
    "eager": lambda model, make_step: make_step(model),
    "compile": lambda model, make_step: make_step(torch.compile(model)),
    "reduce-overhead": reduce_overhead,
    "weft": lambda model, make_step: weft.compile(make_step(model)),
}


def fresh_model(workload: Workload, options: Options) -> torch.nn.Module:
    torch.manual_seed(0)
    with options.device:
        return workload.build(tiny=options.tiny, dropout=options.dropout and not options.check)


def measure(workload: Workload, impl: str, options: Options) -> Row:
    """Times, memory and first losses of one implementation."""
    device = options.device
    left = torch.cuda.memory_reserved() if device.type == "cuda" else 0
    model = fresh_model(workload, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = workload.batches(4, device, tiny=options.tiny)
    step = IMPLEMENTATIONS[impl](model, lambda forward: train_step(workload, forward, optimizer, device.type))
    torch.manual_seed(1)
    began = time.perf_counter()
    losses = [step(batches[0]).item()]
    first = time.perf_counter() - began
    losses += [step(batches[at % len(batches)]).item() for at in range(1, COMPARED)]
    for at in range(options.warmup):
        step(batches[at % len(batches)])
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = timed(step, batches, options.steps, device)
    gib = 2**30
    return {
        "step_ms": statistics.median(times),
        "best_ms": min(times),
        "peak_gib": torch.cuda.max_memory_allocated() / gib if device.type == "cuda" else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / gib if device.type == "cuda" else 0.0,
        "left_gib": left / gib,  # what the one before has not given back
        "first_step_s": first,
        "losses": losses,
        **captured(step),
    }


def timed(step: Step, batches: list[Batch], steps: int, device: torch.device) -> list[float]:
    """Milliseconds from the end of each step to the end of the next, none waited for until all are issued."""
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for at in range(steps):
            step(batches[at % len(batches)])
            moments.append(time.perf_counter())
        return [(after - before) * 1e3 for before, after in itertools.pairwise(moments)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for at, event in enumerate(events[1:]):
        step(batches[at % len(batches)])
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def captured(step: Step) -> Row:
    """What weft says of its capture, nothing for the others."""
    if not isinstance(step, weft.CompiledStep):
        return {}
    seen = [entry.captured for entry in step.entries]
    return {"captures": len(seen), "nodes": len(seen[0].graph), "capture_s": seen[0].seconds}


def check(workload: Workload, impl: str, options: Options) -> Row:
    """Relative error (2-norm over all parameters) of gradients against eager ones in the next wider dtype.

    No dropout and no autocast: a float32 model is compared with itself in float64, a bfloat16 one in float32.
    """
    device = options.device
    torch.backends.cudnn.allow_tf32 = False
    (batch,) = workload.batches(1, device, tiny=options.tiny)
    wider = torch.float64 if workload.dtype == torch.float32 else torch.float32

    def gradients(impl: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], float]:
        model = fresh_model(workload, options).to(dtype)
        step = IMPLEMENTATIONS[impl](model, lambda forward: gradient_step(workload, forward))
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
        loss = step(cast).item()
        return [p.grad.to(wider) for p in model.parameters() if p.grad is not None], loss

    exact, _ = gradients("eager", wider)
    found, loss = gradients(impl, workload.dtype)
    norm = torch.stack([g.norm() for g in exact]).norm()
    apart = torch.stack([(g - e).norm() for g, e in zip(found, exact, strict=True)]).norm()
    return {"gradient_error": (apart / norm).item(), "losses": [loss]}


# ---- the worker process


def serve(jobs: Connection, options: Options) -> None:
    """Answer (model, implementation) with a row, until None."""
    by_name = {workload.name: workload for workload in WORKLOADS}
    while (job := jobs.recv()) is not None:
        model, impl = job
        try:
            row = (check if options.check else measure)(by_name[model], impl, options)
        except Exception as error:  # noqa: BLE001 - whatever went wrong is a result
            row = {"error": f"{type(error).__name__}: {error}"}
        jobs.send(row)
        if "error" in row and _broken():
            return
        torch.compiler.reset()
        gc.collect()  # of what the caches held too
        torch.cuda.empty_cache()


def _broken() -> bool:
    """Whether the GPU answers nothing any more in this process."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Worker:
    """A process that measures; started when first needed, and again after it broke or took longer than ``limit``."""

    def __init__(self, options: Options, limit: float) -> None:
        self.options = options
        self.limit = limit
        self.process: Any = None
        self.jobs: Any = None

    def run(self, model: str, impl: str) -> Row:
        if self.process is None or not self.process.is_alive():
            self._start()
        self.jobs.send((model, impl))
        try:
            if self.jobs.poll(self.limit):
                return self.jobs.recv()
            self.process.kill()
            row = {"error": f"took longer than {self.limit:.0f} s"}
        except (EOFError, ConnectionError):
            row = {"error": "the process died"}
        self.process.join()
        return row

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.jobs, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.options), daemon=True)
        self.process.start()
        theirs.close()


# ---- all of them


def main() -> None:
    options = arguments()
    if not options.report:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="inductor-"))  # a cold start
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            for row in rows(options):
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(_line(row), flush=True)
    print(table([json.loads(line) for line in options.out.read_text().splitlines()]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="MODEL")
    parser.add_argument("--impl", nargs="+", default=["eager", "compile", "weft"], choices=list(IMPLEMENTATIONS))
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=5, help=f"steps before those, after the first {COMPARED}")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--no-dropout", action="store_true", help="no dropout, so that losses can be compared")
    parser.add_argument("--check", action="store_true", help="error of gradients instead of times")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="start nothing after this long")
    parser.add_argument("--limit-seconds", type=float, default=300, help="give up on one run after this long")
    parser.add_argument("--out", type=Path, default=Path("out/models.jsonl"), help="rows are added to this file")
    parser.add_argument("--report", action="store_true", help="run nothing, print the table of --out")
    return parser.parse_args()


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure every model with every implementation, one model after another."""
    by_name = {workload.name: workload for workload in WORKLOADS}
    until = time.monotonic() + options.budget_seconds
    worker = Worker(
        Options(options.steps, options.warmup, options.tiny, not options.no_dropout, options.check),
        options.limit_seconds,
    )
    for model in options.models:
        for impl in options.impl:
            if time.monotonic() > until:
                return
            about = {"model": model, "family": by_name[model].family, "impl": impl, "torch": torch.__version__}
            yield {**about, "dropout": not options.no_dropout, **worker.run(model, impl)}


# ---- what is printed


def _line(row: Row) -> str:
    if "error" in row:
        return f"{row['model']:18} {row['impl']:16} FAILED {row['error'].splitlines()[0][:160]}"
    if "gradient_error" in row:
        return f"{row['model']:18} {row['impl']:16} gradients {row['gradient_error']:.2e} from exact"
    capture = f"  {row['nodes']} nodes in {row['capture_s']:.1f} s" if "nodes" in row else ""
    left = f" ({row['left_gib']:.1f} of the one before)" if row["left_gib"] > 0.1 else ""
    return (
        f"{row['model']:18} {row['impl']:16} {row['step_ms']:8.2f} ms  reserved {row['reserved_gib']:5.1f} GiB{left}"
        f"  first step {row['first_step_s']:5.1f} s  losses {row['losses'][0]:.4f} .. {row['losses'][-1]:.4f}{capture}"
    )


def table(found: Iterable[Row]) -> str:
    """One line a model: times, ratios, memory and first steps of each implementation beside eager's and the peer's.

    Of several rows of one model and implementation the last counts.
    """
    models: dict[str, dict[str, Row]] = {}
    for row in found:
        models.setdefault(row["model"], {})[row["impl"]] = row
    if any("gradient_error" in row for impls in models.values() for row in impls.values()):
        return "\n".join(_checked(model, impls) for model, impls in models.items())
    impls = list(dict.fromkeys(impl for rows in models.values() for impl in rows))
    lines = [f"{'model':18}" + "".join(f"{impl + ' ms (GiB, first s)':>32}" for impl in impls) + "  speed-ups, losses"]
    for model, rows in models.items():
        cells = "".join(f"{_cell(rows.get(impl)):>32}" for impl in impls)
        lines.append(f"{model:18}{cells}  {'; '.join(_against(rows, impl) for impl in impls if impl in rows)}")
    return "\n".join([*lines, *_means(models, impls)])


def _cell(row: Row | None) -> str:
    if row is None or "error" in row:
        return "-" if row is None else "failed"
    return f"{row['step_ms']:.2f} ({row['reserved_gib']:.1f}, {row['first_step_s']:.1f})"


def _against(rows: dict[str, Row], impl: str) -> str:
    """How one implementation compares with those before it, and whether it learns what eager does."""
    row, eager = rows[impl], rows.get("eager", {})
    if "error" in row or impl == "eager":
        return f"{impl} {row.get('error', 'is 1').splitlines()[0][:60]}"
    ratios = [f"{peer} {_ratio(rows, impl, peer):.2f}x" for peer in ("eager", "compile") if _ratio(rows, impl, peer)]
    if "losses" in eager:
        apart = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], eager["losses"], strict=True))
        ratios.append(f"losses {apart:.1e}" + ("" if apart <= LOSS_TOLERANCE or row["dropout"] else " WRONG"))
    return f"{impl}: {', '.join(ratios)}"


def _ratio(rows: dict[str, Row], impl: str, peer: str, key: str = "step_ms") -> float:
    """How many times less of ``key`` the implementation takes than the peer; 0 where one of them has none."""
    if impl == peer or not all(rows.get(name, {}).get(key) for name in (impl, peer)):
        return 0.0
    return rows[peer][key] / rows[impl][key]


def _means(models: dict[str, dict[str, Row]], impls: list[str]) -> Iterator[str]:
    """Geometric means over the models of a family that both ran."""
    family = {model: next(iter(rows.values()))["family"] for model, rows in models.items()}
    for name in dict.fromkeys(family.values()):
        for impl in [impl for impl in impls if impl != "eager"]:
            for peer in ("eager", "compile"):
                own = [rows for model, rows in models.items() if family[model] == name]
                speed = [ratio for rows in own if (ratio := _ratio(rows, impl, peer))]
                if speed:
                    means = [f"{statistics.geometric_mean(speed):.3f}x speed, lowest {min(speed):.2f}x"]
                    compared = {
                        "reserved_gib": "memory",
                        **({"first_step_s": "first step"} if peer == "compile" else {}),
                    }
                    for key, what in compared.items():
                        less = [1 / ratio for rows in own if (ratio := _ratio(rows, impl, peer, key))]
                        means += [f"{statistics.geometric_mean(less):.3f} of its {what}"] if less else []
                    yield f"{name}: {impl} against {peer}, {len(speed)} models: {', '.join(means)}"


def _checked(model: str, impls: dict[str, Row]) -> str:
    eager = impls.get("eager", {}).get("gradient_error", 0.0)
    cells = []
    for impl, row in impls.items():
        if "error" in row:
            cells.append(f"{impl} failed")
        else:
            bad = impl != "eager" and eager and row["gradient_error"] > GRADIENT_TOLERANCE * eager
            cells.append(f"{impl} {row['gradient_error']:.2e}{' WRONG' if bad else ''}")
    return f"{model:18} {'  '.join(cells)}"


if __name__ == "__main__":
    main()
