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

from weft import knobs, torch_adapter
from weft.capture.garbage import no_collections
from weft.capture.graph import StepGraph
from weft.errors import MemoryLimitUnreachable, NoClusterHere
from weft.inductor.clock import Clock
from weft.inductor.codegen.kernel import supports
from weft.inductor.comm.bind import bind
from weft.inductor.comm.cluster import Cluster, cluster_here
from weft.inductor.comm.consensus import number, scheduled
from weft.inductor.comm.schedule import Schedule
from weft.inductor.emit import emit
from weft.inductor.fuse import fuse
from weft.inductor.graph_cache import cached
from weft.inductor.inline import inline
from weft.inductor.kernel_call import KernelCall
from weft.inductor.lower import Lowered, device_kind, lower
from weft.inductor.multi_tensor.launcher import use_kernels
from weft.inductor.passes.pipeline import every_pass, run_passes
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.program_file import program_file
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.kernels import compile_kernels
from weft.inductor.runtime.pieces import Program, compile_recorded
from weft.inductor.saved import save
from weft.inductor.tune import tune_products

log = logging.getLogger(__name__)

MODES = ("default", "bitwise")


# What the kernels of a step may hold, as parts of what the step may: communication holds the rest.
_BUDGETS = (1.0, 0.85, 0.7)

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
_schedules: weakref.WeakKeyDictionary[Any, Schedule] = weakref.WeakKeyDictionary()


def compilation_of(program: Program) -> Compilation | None:
    """How ``program`` came to be; None where it runs no generated kernels."""
    return _compilations.get(program)


def schedule_of(program: Program) -> Schedule | None:
    """The schedule of the collectives of ``program``; None where it has none: on one GPU, on CPUs, and on ranks whose
    kernels differ from each other's."""
    return _schedules.get(program)


@no_collections()
def compile_graph(step: StepGraph, mode: str = "default", memory_limit: int | None = None) -> Program:
    """Make the program that runs ``step``. With ``knobs.dump_dir`` the graph and the program are written there.

    Collective for steps that communicate: all ranks compile them in the same order.

    Args:
        mode: "default" generates kernels for what runs on a GPU, and records as CUDA graphs what of it can be; what
            runs on a CPU runs as ATen kernels. "bitwise" runs ATen kernels everywhere, so that results are the
            uncompiled step's to the bit.
        memory_limit: bytes that a GPU may hold at once; None for what it has, less a reserve. Steps on a CPU take what
            they need.

    Raises:
        MemoryLimitUnreachable: no schedule fits ``memory_limit``.
        NoClusterHere: ``memory_limit`` is given, and no description of a cluster fits the GPUs here.
    """
    place, clock = _dump(step), Clock()
    on_gpu = device_kind(step.graph.nodes) != "cpu"
    generates = on_gpu and mode == "default"
    number(step)
    cluster = _cluster(memory_limit) if on_gpu and (step.collectives() or memory_limit is not None) else None
    made, schedule = planned(step, cluster, memory_limit, generates, clock)
    if generates:
        ready = with_compiled_kernels(made, clock)
        made = clock("bind", lambda: bind(use_kernels(ready)))
        made = clock("tune", lambda: tune_products(made, bool(step.collectives())))
    recorded = generates and knobs.cuda_graphs and (knobs.record_collectives or not made.collectives())
    program: Program = clock("program", lambda: compile_recorded(made) if recorded else compile_aten(made))
    if generates:
        _compilations[program] = Compilation(made, clock.seconds)
    if schedule is not None:
        _schedules[program] = schedule
    log.debug("%s", program.source)
    if place is not None:
        Path(f"{place}_program.py").write_text(program_file(made, planned=recorded))
    return program


def planned(
    step: StepGraph, cluster: Cluster | None, memory_limit: int | None, generates: bool, clock: Clock
) -> tuple[StepGraph, Schedule | None]:
    """The graph that a program runs, its kernels not compiled yet, and its schedule, None without a ``cluster``.

    Where no schedule fits a limit that was asked for, backward computes again what forward would keep: first as much as
    the limit seems to want, then more, since what communication holds is known only when it is scheduled.

    Raises:
        MemoryLimitUnreachable: nothing fits ``memory_limit``.
    """
    if cluster is None:
        return _graph(step, generates, None, clock), None
    shrinks = generates and memory_limit is not None
    budgets = [None, *(int(memory_limit * part) for part in _BUDGETS if shrinks and memory_limit is not None)]
    for budget in budgets:
        made = _graph(step, generates, budget, clock)
        try:
            return clock("schedule", lambda: scheduled(made, cluster, memory_limit, keep_bits=not generates))  # noqa: B023
        except MemoryLimitUnreachable as error:
            if budget == budgets[-1]:
                raise
            log.info("more is computed again: %s", error)
    raise AssertionError


def _graph(step: StepGraph, generates: bool, budget: int | None, clock: Clock) -> StepGraph:
    """The step after all passes, with kernels where it ``generates`` any."""
    if not generates:
        return run_passes(step)
    passes = every_pass(budget)
    make = lambda graph: kernel_graph(clock("passes", lambda: run_passes(graph, passes)), clock)
    return cached(step, make, f"within {budget}")


def _cluster(memory_limit: int | None) -> Cluster | None:
    """The description of this cluster; None where there is none and nobody asked for a limit: then a step runs in the
    order that it has without a schedule, which is said once."""
    try:
        return cluster_here()
    except NoClusterHere as error:
        if memory_limit is not None:
            raise
        _warn(f"communication is not scheduled: {error}")
        return None


@functools.cache
def _warn(what: str) -> None:
    log.warning("%s", what)


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


@torch_adapter.only_mode()  # as run_passes
def kernel_graph(step: StepGraph, clock: Clock) -> StepGraph:
    """The step with generated kernels, not compiled yet, in place of all the operations that have a lowering, its nodes
    in the order in which they are issued."""
    lowered = clock("lower", lambda: lower(step, list(step.graph.nodes)))
    inlined = clock("inline", lambda: inline(lowered))
    items = clock("fuse", lambda: fuse(inlined, supports))
    made = clock("generate", lambda: schedule_waits(emit(inlined, items)).check())
    if log.isEnabledFor(logging.DEBUG):
        _tell(lowered, _kernel_calls(made))
    return made


def _tell(lowered: Lowered, calls: list[KernelCall]) -> None:
    for name, count in lowered.reasons.most_common():
        log.debug("not lowered: %d x %s", count, name)
    counts = Counter(call.generated.source for call in calls)
    for source, call in {call.generated.source: call for call in reversed(calls)}.items():
        log.debug(
            "kernel %s, %d x, from\n%s\n%s", source.name, counts[source], "\n".join(map(str, call.origins)), source.text
        )


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
