"""From a StepGraph to a program: passes, loop nests, fusion, kernels, a CUDA graph of the whole where it can be one."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft import knobs
from weft.capture.garbage import no_collections
from weft.capture.graph import StepGraph
from weft.inductor.clock import Clock
from weft.inductor.codegen.kernel import supports
from weft.inductor.emit import emit
from weft.inductor.fuse import fuse
from weft.inductor.graph_cache import cached
from weft.inductor.inline import inline
from weft.inductor.kernel_call import KernelCall
from weft.inductor.lower import Lowered, device_kind, lower
from weft.inductor.multi_tensor.launcher import use_kernels
from weft.inductor.passes.pipeline import EVERY_PASS, run_passes
from weft.inductor.program_file import program_file
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.kernels import compile_kernels
from weft.inductor.runtime.pieces import Program, compile_recorded
from weft.inductor.saved import save

log = logging.getLogger(__name__)

MODES = ("default", "bitwise")


_count = itertools.count()


@dataclass(frozen=True)
class Compilation:
    """How a program of generated kernels came to be.

    Attributes:
        graph: what it runs, as a graph of kernels and other calls.
        seconds: how long each stage took.
    """

    graph: StepGraph
    seconds: dict[str, float]


_compilations: weakref.WeakKeyDictionary[Any, Compilation] = weakref.WeakKeyDictionary()


def compilation_of(program: Program) -> Compilation | None:
    """How ``program`` came to be; None where it runs no generated kernels."""
    return _compilations.get(program)


@no_collections()
def compile_graph(step: StepGraph, mode: str = "default") -> Program:
    """Make the program that runs ``step``. With ``knobs.dump_dir`` the graph and the program are written there.

    Args:
        mode: "default" generates kernels for what runs on a GPU, and records as CUDA graphs what of it can be; what
            runs on a CPU runs as ATen kernels. "bitwise" runs ATen kernels everywhere, so that results are the
            uncompiled step's to the bit.
    """
    place = _dump(step)
    if mode == "bitwise" or device_kind(step.graph.nodes) == "cpu":
        made = run_passes(step)
        program: Program = compile_aten(made)
    else:
        clock = Clock()
        made = cached(step, lambda graph: kernel_graph(clock("passes", lambda: run_passes(graph, EVERY_PASS)), clock))
        made = use_kernels(with_compiled_kernels(made, clock))
        recorded = knobs.cuda_graphs and (knobs.record_collectives or not made.collectives())
        program = clock("program", lambda: compile_recorded(made) if recorded else compile_aten(made))
        _compilations[program] = Compilation(made, clock.seconds)
    log.debug("%s", program.source)
    if place is not None:
        Path(f"{place}_program.py").write_text(program_file(made))
    return program


def make_kernels(step: StepGraph) -> StepGraph:
    """The step with generated kernels, compiled, in place of all the operations that have a lowering."""
    clock = Clock()
    return with_compiled_kernels(kernel_graph(step, clock), clock)


def with_compiled_kernels(made: StepGraph, clock: Clock) -> StepGraph:
    """``made``, a graph of kernels, with every kernel compiled."""
    calls = _kernel_calls(made)
    clock("compile", lambda: _compile(calls))
    counts = Counter(call.generated.source for call in calls)
    operations = sum(len(call.origins) for call in calls)
    log.info("%d kernels (%d different) of %d operations; seconds: %s", len(calls), len(counts), operations, clock)
    return made


def kernel_graph(step: StepGraph, clock: Clock) -> StepGraph:
    """The step with generated kernels, not compiled yet, in place of all the operations that have a lowering."""
    lowered = clock("lower", lambda: lower(step, list(step.graph.nodes)))
    inlined = clock("inline", lambda: inline(lowered))
    items = clock("fuse", lambda: fuse(inlined, supports))
    made = clock("generate", lambda: emit(inlined, items).check())
    if log.isEnabledFor(logging.DEBUG):
        _tell(lowered, _kernel_calls(made))
    return made


def _tell(lowered: Lowered, calls: list[KernelCall]) -> None:
    for name, count in lowered.reasons.most_common():
        log.debug("not lowered: %d x %s", count, name)
    counts = Counter(call.generated.source for call in calls)
    for source, call in {call.generated.source: call for call in reversed(calls)}.items():
        log.debug("kernel %s, %d x, from\n%s\n%s", source.name, counts[source], "\n".join(call.origins), source.text)


def _dump(step: StepGraph) -> Path | None:
    """Write the graph where ``knobs.dump_dir`` says; returns the start of the names of this step's files."""
    if not knobs.dump_dir:
        return None
    place = Path(knobs.dump_dir).expanduser() / f"step_{os.getpid()}_{next(_count)}"
    place.parent.mkdir(parents=True, exist_ok=True)
    save(step, f"{place}_graph.py")
    return place


def _kernel_calls(step: StepGraph) -> list[KernelCall]:
    return [node.target for node in step.graph.nodes if isinstance(node.target, KernelCall)]


def _compile(calls: list[KernelCall]) -> None:
    """Compile every different kernel once, and hand it to the calls of it."""
    by_device: dict[torch.device, list[KernelCall]] = {}
    for call in calls:
        by_device.setdefault(call.device, []).append(call)
    for device, here in by_device.items():
        sources = list(dict.fromkeys(call.generated.source for call in here))
        kernels = dict(zip(sources, compile_kernels(sources, device), strict=True))
        for call in here:
            call.attach(kernels[call.generated.source], functools.partial(compile_kernels, device=device))
