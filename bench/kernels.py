"""Memory-bound operations on one GPU: eager, torch.compile and weft in the same run, against a plain copy.

    python bench/kernels.py --out out/kernels.jsonl
    python bench/kernels.py --cases RMSNorm softmax --impl eager weft
    python bench/kernels.py --inspect                 # no GPU: weft's kernels at full size, as compiled for sm_90
    python bench/kernels.py --tiny --impl eager weft  # no GPU: toy sizes, weft's kernels in triton's interpreter
    python bench/kernels.py --sweep --cases softmax   # weft's kernels with other numbers of warps and stages

Everything is bfloat16 and runs as a CUDA graph, so that launches cost all alike next to nothing; compilation is not
timed. Tensors are several times the L2. ``minimum`` is every input read once and every output written once; rates
are over that. Results are compared with float64's: ``error`` is relative, in the 2-norm, and weft's may not be larger
than eager's. ``AdamW`` is in ``optimizer.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from kernel_cases import Case, Make, Tensors, cases

import weft
from weft import knobs
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.compiler import make_kernels
from weft.inductor.cost.measure_gpu import seconds_of
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.kernels import compile_kernels, inspect_kernel
from weft.inductor.runtime.multi_tensor import use_kernels

Row = dict[str, Any]
Run = Callable[[], Tensors]

REPLAYS = 30
CALLS = 4  # in one CUDA graph: what starting a graph takes is shared by them
ALLOWED = 1.05  # times eager's error
TINY_ERROR = 1e-6


def main() -> None:
    options = arguments()
    chosen = [case for case in cases() if any(part.lower() in case.name.lower() for part in options.cases)]
    if options.inspect:
        inspect(chosen)
        return
    device = torch.device("cpu" if options.tiny else "cuda")
    if options.sweep:
        for case in chosen:
            sweep(case, device)
        return
    started = time.perf_counter()
    # Forward is run once and backward many times: what it keeps must not be reused.
    torch._functorch.config.donated_buffer = False
    copied = copy_rate(device)
    print(f"copy: {copied / 1e9:.0f} GB/s", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with options.out.open("a") as file:
        for case in chosen:
            if time.perf_counter() - started > options.budget_seconds:
                print(f"out of time: {case.name} was not measured")
                continue
            row = measure(case, device, options.impl, copied)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(_line(row), flush=True)
    report(rows)
    print(f"{time.perf_counter() - started:.0f} s")
    if wrong := [row["case"] for row in rows if row.get("error_ratio", 0.0) > ALLOWED]:
        sys.exit(f"weft's error is larger than eager's: {', '.join(wrong)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the names of those to run")
    parser.add_argument("--impl", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--out", type=Path, default=Path("out/kernels.jsonl"))
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="no case is started later than that")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--inspect", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    return parser.parse_args()


# ---- the implementations


@dataclasses.dataclass
class Problem:
    """A case with its tensors, and what is known after the forward that is not timed."""

    case: Case
    inputs: Tensors
    gradients: Tensors = ()
    held: Tensors = ()

    @staticmethod
    def of(case: Case, make: Make) -> Problem:
        inputs = case.inputs(make)
        if case.run != "backward":
            return Problem(case, inputs, held=inputs)
        with torch.no_grad():
            results = case.forward(*inputs)
        gradients = tuple(torch.empty_like(result).normal_(generator=make.generator) for result in results)
        return Problem(case, inputs, gradients, case.held(inputs, results, gradients))

    @property
    def read(self) -> list[torch.Tensor]:
        return [tensor for at, tensor in enumerate(self.held) if at not in self.case.unread]


def eager(problem: Problem) -> Run:
    return _with_autograd(problem, problem.case.forward)


def compiled(problem: Problem) -> Run:
    return _with_autograd(problem, torch.compile(problem.case.forward, dynamic=False))


def _with_autograd(problem: Problem, forward: Callable[..., Tensors]) -> Run:
    """What eager and torch.compile run: autograd calls what it recorded of ``forward``."""
    wanted = problem.case.wanted
    inputs = [t.detach().requires_grad_() if at in wanted else t for at, t in enumerate(problem.inputs)]
    leaves = [inputs[at] for at in wanted]
    if problem.case.run == "backward":
        results = forward(*inputs)
        return lambda: torch.autograd.grad(results, leaves, problem.gradients, retain_graph=True)

    def both() -> Tensors:
        (loss,) = forward(*inputs)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def only() -> Tensors:
        with torch.no_grad():
            return forward(*inputs)

    return both if problem.case.run == "both" else only


def weft_kernels(problem: Problem) -> Run:
    step, held = problem.case.step, problem.held
    if held[0].is_cuda:
        compiled_step = weft.compile(step, dynamic=False)
        with knobs.override(cuda_graphs=False):  # all are recorded here, in the same way
            compiled_step(*held)
        return lambda: compiled_step(*held)
    return _program(weft_graph(problem), held)


def weft_graph(problem: Problem) -> weft.StepGraph:
    return make_kernels(run_passes(weft.capture(problem.case.step, *problem.held), KERNEL_PASSES))


def _program(graph: weft.StepGraph, held: Tensors) -> Run:
    program = compile_aten(use_kernels(graph))
    arguments = [held[position(entry.path)] for entry in graph.inputs]
    return lambda: tuple(program(*arguments))


def position(path: str) -> int:
    """Which argument an input of a captured step is."""
    return int(path.removeprefix("args[").removesuffix("]"))


IMPLEMENTATIONS: dict[str, Callable[[Problem], Run]] = {"eager": eager, "compile": compiled, "weft": weft_kernels}


# ---- measuring


def measure(case: Case, device: torch.device, names: list[str], copied: float) -> Row:
    """Microseconds of each implementation, and weft's error beside eager's."""
    problem = Problem.of(case, Make(device, tiny=device.type == "cpu"))
    _wait(device)
    row: Row = {"case": case.name}
    errors = {}
    for name in names:
        try:
            stream = torch.cuda.Stream() if device.type == "cuda" else None
            # A backward runs on the stream of its forward, and that must be the one that is recorded.
            with torch.cuda.stream(stream):
                run = IMPLEMENTATIONS[name](problem)
                results = run()
            _wait(device)
        except Exception as error:  # noqa: BLE001 - one that fails must not keep the others from being measured
            row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:400]
            continue
        row.setdefault("minimum", sum(_bytes(tensor) for tensor in (*problem.read, *results)))
        if name != "compile":
            errors[name] = relative_error(problem, results)
        del results
        row[name] = seconds(run, device, stream) * 1e6
        del run
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return row | _compared(row, errors, copied)


def _compared(row: Row, errors: dict[str, float], copied: float) -> Row:
    more: Row = {f"error_{name}": error for name, error in errors.items()}
    if len(errors) == 2:
        more["error_ratio"] = errors["weft"] / (errors["eager"] + TINY_ERROR)
    if "weft" in row:
        more["GB/s"] = row["minimum"] / row["weft"] / 1e3
        more["of_copy"] = row["minimum"] / (row["weft"] * 1e-6) / copied
        more |= {f"over_{name}": row[name] / row["weft"] for name in ("compile", "eager") if name in row}
    return more


def relative_error(problem: Problem, results: Tensors) -> float:
    """The largest over the results of |result - exact| / |exact|, in the 2-norm."""
    case = problem.case
    held = tuple(t.double() if t.is_floating_point() else t for t in problem.held)
    if case.expected is not None:
        exact = case.expected(held, tuple(result.double() for result in results))
    else:
        exact = case.step(*held)
    return max(
        float((result.double() - wanted).norm() / wanted.norm()) for result, wanted in zip(results, exact, strict=True)
    )


def seconds(run: Callable[[], Any], device: torch.device, stream: Any) -> float:
    """Median seconds of a call, over replays of a CUDA graph of some calls."""
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            run()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    _wait(device)
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / CALLS / 1e3


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy of 2 GiB reads and writes (16 MiB on a CPU).

    Outside a CUDA graph, where copies of a GPU's memory are left to engines that are a third slower than its kernels.
    """
    source = torch.zeros(1 << (29 if device.type == "cuda" else 22), device=device)
    return 2 * _bytes(source) / seconds_of(source.clone, device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def sweep(case: Case, device: torch.device) -> None:
    """Time a case with each of weft's kernels in other shapes, the others as they are."""
    problem = Problem.of(case, Make(device, tiny=device.type == "cpu"))
    graph = weft_graph(problem)
    run = _program(graph, problem.held)
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    run()
    print(f"{case.name}: {seconds(run, device, stream) * 1e6:.1f} us", flush=True)
    for node in graph.graph.nodes:
        if not isinstance(node.target, KernelCall) or _moved(node) < SWEPT_BYTES[device.type]:
            continue
        call, chosen = node.target, node.target.kernel
        for source in _variants(call.generated.source):
            (call.kernel,) = compile_kernels([source], problem.held[0].device)
            run()
            took = seconds(run, device, stream) * 1e6
            stages = STAGES.search(source.text)
            print(
                f"    {took:9.1f} us {source.name}: {source.num_warps} warps {stages[0] if stages else ''}", flush=True
            )
        call.kernel = chosen


SWEPT_BYTES = {"cuda": 32 << 20, "cpu": 0}
STAGES = re.compile(r"num_stages=(\d)")


def _variants(source: KernelSource) -> Iterator[KernelSource]:
    texts = [source.text]
    if STAGES.search(source.text):
        texts = [STAGES.sub(f"num_stages={count}", source.text) for count in (1, 2, 3, 4)]
    warps = [w for w in (source.num_warps // 2, source.num_warps, source.num_warps * 2) if 1 <= w <= 32]
    for text, count in itertools.product(texts, warps):
        if (text, count) != (source.text, source.num_warps):
            yield dataclasses.replace(source, text=text, num_warps=count)


# ---- what is printed


COLUMNS = (
    "case",
    "minimum",
    "eager",
    "compile",
    "weft",
    "GB/s",
    "of_copy",
    "over_compile",
    "over_eager",
    "error_ratio",
)


def report(rows: list[Row]) -> None:
    print("\n" + " ".join(f"{column:>12}" if at else f"{column:32}" for at, column in enumerate(COLUMNS)))
    for row in rows:
        print(_line(row))
    for name in ("over_compile", "over_eager", "of_copy"):
        found = [row[name] for row in rows if name in row]
        if found:
            mean = math.exp(statistics.fmean(map(math.log, found)))
            print(f"{name}: geometric mean {mean:.3f}, least {min(found):.3f}, of {len(found)}")


def _line(row: Row) -> str:
    cells = [f"{row['case']:32}", f"{row.get('minimum', 0) / 1e6:9.1f} MB"]
    for column in COLUMNS[2:]:
        value = row.get(column)
        cells.append(f"{'':>12}" if value is None else f"{value:12.1f}" if value >= 100 else f"{value:12.3f}")
    failed = [f"{name}: {row[f'{name}_failed']}" for name in IMPLEMENTATIONS if f"{name}_failed" in row]
    return "\n    ".join([" ".join(cells), *failed])


# ---- without a GPU


def inspect(chosen: Iterable[Case]) -> None:
    """Print weft's kernels of each case at full size: what they move, and what they need of a GPU."""
    for case in chosen:
        with weft.fake_world(1):
            problem = Problem.of(case, Make("cpu", tiny=False))
            graph = weft_graph(problem)
        minimum = sum(map(_bytes, problem.read)) + sum(
            _bytes(n.meta["val"]) for n in graph.results if isinstance(n, torch.fx.Node)
        )
        lines = list(_inspected(graph))
        print(f"{case.name}: minimum {minimum / 1e6:.1f} MB, {sum(moved for moved, _ in lines) / minimum:.3f} moved")
        for moved, line in lines:
            print(f"    {moved / 1e6:9.1f} MB {line}")
        sys.stdout.flush()


def _inspected(graph: weft.StepGraph) -> Iterator[tuple[float, str]]:
    for node in graph.graph.nodes:
        if isinstance(node.target, KernelCall):
            generated = node.target.generated
            needs = inspect_kernel(generated.source)
            source = generated.source
            yield (
                _moved(node),
                f"{source.name}: {math.prod(generated.grid(()))} programs, {source.num_warps} warps,"
                f" {source.constants}, {needs.registers} registers, {needs.spills} B spills,"
                f" {needs.vector_loads} vector loads",
            )
        elif isinstance(node.target, torch._ops.OpOverload) and not looks_into(node):
            tensors = [n.meta["val"] for n in (*node.all_input_nodes, node)]
            yield sum(map(_bytes, tensors)), f"ATen {node.target}"


def _moved(node: torch.fx.Node) -> float:
    """Bytes of the tensors that a kernel reads and writes, each once."""
    tensors = [n.meta["val"] for n in node.all_input_nodes] + list(node.meta["val"])
    return sum(_bytes(tensor) for tensor in tensors)


if __name__ == "__main__":
    main()
