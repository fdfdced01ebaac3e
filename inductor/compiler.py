"""From a StepGraph to a Program: the complete list of passes, in order, and what runs between them.

Stages, each a list of passes that one :class:`weft.inductor.graph.pass_runner.PassRunner` runs:

1. ``graph``: :data:`weft.inductor.passes.pipeline.KERNEL_PASSES`, or ``ATEN_PASSES`` where ATen kernels run.
2. ``kernels``: :func:`weft.inductor.fusion.kernel_stages.generation_passes`.
3. ``schedule``: ranks agree on a schedule (analysis), :func:`weft.inductor.schedule.decisions.schedule_passes` apply
   it, :func:`weft.inductor.schedule.agree_on_schedule.apply_transports` lays out what peers share. The result is cached
   on disk; that of stage 2 where nothing is scheduled. Last, collectives get their communicators.
4. ``binding``: :func:`loading_passes`, then :data:`BINDING`, which needs the GPUs and the other ranks.
5. ``program``: the Program is written, cut into CUDA graphs where that is possible. One pass runs over the pieces that
   are not recorded, :func:`weft.inductor.runtime.piecewise_cudagraph.stage_host_copies`.

A part of this that fails is left out with a warning, see :mod:`weft.inductor.graph.faults`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from weft import knobs
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph
from weft.capture.user_code import format_frame
from weft.errors import CannotWrite, NoClusterHere
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.cost.cluster import Cluster, cluster_here
from weft.inductor.fusion.kernel_stages import kernel_calls, kernel_calls_by_device, kernel_graph
from weft.inductor.graph.faults import Faults, LeftOut, Part, described, is_fault
from weft.inductor.graph.pass_runner import Pass, PassRecord, PassRunner, is_enabled, keeps_bits, required, without
from weft.inductor.graph.repro import save
from weft.inductor.lowering.lower import device_kind
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.kernels import compile_kernels
from weft.inductor.runtime.multi_tensor import multi_tensor_kernels, use_kernels
from weft.inductor.runtime.piecewise_cudagraph import Program, compile_recorded
from weft.inductor.runtime.program_file import program_file
from weft.inductor.schedule.agree_on_collectives import AgreedCollectives
from weft.inductor.schedule.agree_on_faults import Checkpoints, Objection
from weft.inductor.schedule.schedule_result import Schedule
from weft.inductor.schedule.scheduled_graph import scheduled_graph
from weft.inductor.schedule.verify import verifier
from weft.inductor.transports.instantiate import bind

log = logging.getLogger(__name__)

Mode = Literal["default", "bitwise"]
MODES: tuple[Mode, ...] = get_args(Mode)


# Attempts to compile a step without what failed, before all generated kernels are left out.
_MOST_ATTEMPTS = 12

_count = itertools.count()


@dataclass(frozen=True)
class Compilation:
    """How a program of generated kernels was compiled.

    Attributes:
        graph: what it runs, as a graph of kernels and other calls.
        seconds: CPU seconds by stage.
        passes: the passes that ran, in order. Empty for the stages whose result came from the cache.
    """

    graph: StepGraph
    seconds: dict[str, float]
    passes: list[PassRecord]


_compilations: weakref.WeakKeyDictionary[Any, Compilation] = weakref.WeakKeyDictionary()
_schedules: weakref.WeakKeyDictionary[Any, Schedule] = weakref.WeakKeyDictionary()
_left_out: weakref.WeakKeyDictionary[Any, LeftOut] = weakref.WeakKeyDictionary()


def compilation_of(program: Program) -> Compilation | None:
    """How ``program`` was compiled; None where it runs no generated kernels."""
    return _compilations.get(program)


def schedule_of(program: Program) -> Schedule | None:
    """The schedule of ``program``. None on CPUs, without a cluster description, for steps that neither communicate nor
    have a memory limit, and where the kernels of some ranks differ from those of others."""
    return _schedules.get(program)


def left_out_of(program: Program) -> LeftOut:
    """What the compilation of ``program`` left out because of faults."""
    return _left_out.get(program, LeftOut())


# ---- the list of passes


@required
@keeps_bits
class LoadKernels:
    """A pass that compiles every distinct kernel of a step once, and attaches it to the calls of it.

    Args:
        faults: gets the operations of kernels that cannot be compiled or loaded.
    """

    __name__ = "load_kernels"

    def __init__(self, faults: Faults | None = None) -> None:
        self._faults = faults or Faults()

    def __call__(self, step: StepGraph) -> StepGraph:
        """Compile and attach. Changes ``step``."""
        for device, calls in kernel_calls_by_device(step).items():
            sources = list(dict.fromkeys(call.generated.source for call in calls))
            self._with_others(step, sources, device)
            try:
                kernels = dict(zip(sources, compile_kernels(sources, device), strict=True))
            except Exception as error:
                if is_fault(error):
                    self._note_each(calls, device)
                raise
            for call in calls:
                call.attach(kernels[call.generated.source], functools.partial(compile_kernels, device=device))
        return step

    def _with_others(self, step: StepGraph, sources: list[KernelSource], device: torch.device) -> None:
        """Compile the kernels of multi-tensor calls in the same worker processes, which would start a second time for
        them, and wait a second time for the slowest of them."""
        if is_enabled(use_kernels):
            others = _failure(lambda: compile_kernels([*multi_tensor_kernels(step, device), *sources], device))
            log.debug("kernels are compiled one kind after the other: %s", others) if others is not None else None

    def _note_each(self, calls: Sequence[KernelCall], device: torch.device) -> None:
        """Compile one kernel after the other, and note all that fail: one attempt then finds all of them."""
        failed: dict[KernelSource, Exception | None] = {}
        for call in calls:
            source = call.generated.source
            if source not in failed:
                failed[source] = _failure(lambda: compile_kernels([source], device))  # noqa: B023
            if (error := failed[source]) is not None:
                lines = {o.operation: format_frame(o.frame) if o.frame else "" for o in call.origins}
                self._faults.note(error, {Part("operation", name): line for name, line in lines.items()})


def _failure(run: Callable[[], object]) -> Exception | None:
    """The fault that ``run`` ends with, if any."""
    try:
        run()
    except Exception as error:
        if not is_fault(error):
            raise
        return error
    return None


def loading_passes(faults: Faults | None = None) -> list[Pass]:
    """Compile kernels and load them. ``faults`` gets those that cannot be."""
    return [LoadKernels(faults), use_kernels]


# Makes collectives runnable. Ranks map each other's memory here.
BINDING: list[Pass] = [bind]


# ---- compilation


@garbage_collection_paused()
def compile_graph(
    step: StepGraph,
    mode: str = "default",
    memory_limit: int | None = None,
    agreed: AgreedCollectives | None = None,
    *,
    first: Sequence[Pass] = (),
) -> Program:
    """Make the program that runs ``step``, which stays as it is. With ``knobs.dump_dir``, the captured graph, the graph
    after each pass and the program are written there.

    A part of the compiler that fails is left out: ``step`` is compiled again without it, with a warning. Ranks leave
    out the same of a step that communicates.

    Collective for steps that communicate: all ranks compile them in the same order.

    Args:
        mode: "default" generates kernels for what runs on a GPU and records CUDA graphs where that is possible; what
            runs on a CPU runs as ATen kernels. "bitwise" runs ATen kernels everywhere, so that results equal those of
            the uncompiled step bit for bit.
        memory_limit: bytes that a GPU may hold at once. None: the memory of the GPU, less a reserve. Ignored on CPUs.
        agreed: the lists of collectives that ranks issue for such a step; None where ranks do not compile this step
            together.
        first: passes that run before all others.

    Raises:
        ScheduleTimeout: see :meth:`AgreedCollectives.all_issue`.
        MemoryLimitUnreachable: no schedule fits ``memory_limit``.
        NoClusterHere: ``memory_limit`` is given, and no description of a cluster fits the GPUs here.
        RankCannotCompile: another rank raised an error of its own.
        InternalFault: a part failed that the step cannot be compiled without, or any with the knob ``strict``; also
            errors of Python and torch.
    """
    on_gpu = device_kind(step.graph.nodes) != "cpu"
    communicates = bool(step.collectives())
    cluster = _cluster(memory_limit) if on_gpu and (communicates or memory_limit is not None) else None
    # A form that ranks have compiled before may be compiled again by one of them alone.
    together = cluster is not None or (agreed is not None and agreed.is_new)
    if communicates and together and agreed is not None and not agreed.is_new:
        agreed.announce()
    attempts = _Attempts(
        step,
        memory_limit,
        agreed,
        first,
        on_gpu and mode == "default",
        communicates,
        cluster,
        Checkpoints(communicates, together),
        _dump(step),
    )
    return attempts.run()


@dataclass(frozen=True)
class _Attempts:
    """Compiles a step, again without a part that fails, until nothing fails. See :func:`compile_graph`."""

    step: StepGraph
    memory_limit: int | None
    agreed: AgreedCollectives | None
    first: Sequence[Pass]
    generates: bool
    communicates: bool
    cluster: Cluster | None
    checkpoints: Checkpoints
    files: Path | None

    def run(self) -> Program:
        """The program of the first attempt that succeeds on all ranks."""
        left_out = self.agreed.left_out if self.agreed is not None else LeftOut()
        for attempt in itertools.count(1):
            runner = PassRunner(None if self.files is None else Path(f"{self.files}_passes"), left_out)
            try:
                with without(left_out), compile_pool.kept_workers():
                    program = self._compiled(runner)
                self.checkpoints.arrive()
                if self.agreed is not None:
                    self.agreed.left_out = left_out
                _left_out[program] = left_out
                return program
            except Objection as objection:
                chosen = objection
            except Exception as error:
                more = self._without(error, runner, attempt)
                if more is None:
                    self.checkpoints.give_up(error)
                    raise
                chosen = self.checkpoints.object(more)
                if more.parts and chosen.rank == self.checkpoints.rank:
                    _warn(runner.faults.report(more))  # the forms of a step have the same faults
            left_out |= chosen.left_out
            log.info("compiling again without %s", described(left_out) or "a change, to find the pass that failed")
        raise AssertionError

    def _without(self, error: Exception, runner: PassRunner, attempt: int) -> LeftOut | None:
        """What to leave out in addition after an attempt that failed; None where nothing helps, or nothing may be left
        out."""
        if knobs.strict or self.checkpoints.alone or not is_fault(error):
            return None
        runner.faults.ended("", error)
        kinds = ["kernels", "inlining", "fusion", "recording"] if self._generates(runner) else []
        kinds += ["passes", *(["transports"] if kinds and self.communicates else [])]
        # Without a schedule no limit of memory is kept.
        kinds += ["schedule"] if self.cluster is not None and self.memory_limit is None else []
        if attempt >= _MOST_ATTEMPTS and "kernels" in kinds:
            return LeftOut(frozenset([Part("kernels")]))
        return runner.faults.more(runner.left_out, frozenset(kinds))

    def _generates(self, runner: PassRunner) -> bool:
        return self.generates and "kernels" not in runner.left_out

    def _compiled(self, runner: PassRunner) -> Program:
        """One attempt."""
        generates, arrive = self._generates(runner), self.checkpoints.arrive
        cluster = None if "schedule" in runner.left_out else self.cluster
        step = runner.run("graph", self.step.copy(), self.first) if self.first else self.step
        graph, found = scheduled_graph(step, cluster, self.memory_limit, generates, runner, self.agreed, arrive=arrive)
        if generates:
            checks = verifier(graph)
            verify = checks.check if checks is not None else None
            graph = runner.run("binding", graph, loading_passes(runner.faults), verify)
            if cluster is not None:
                arrive()  # what follows, ranks do together
            graph = runner.run("binding", graph, BINDING, verify)
            _log_kernels(graph, runner)
        recorded = generates and knobs.cuda_graphs and (knobs.record_collectives or not graph.collectives())
        make = (lambda: compile_recorded(graph, runner=runner)) if recorded else (lambda: compile_aten(graph))
        program: Program = runner.timed("program", make)
        if generates:
            _compilations[program] = Compilation(graph, runner.seconds, runner.records)
        if found is not None:
            _schedules[program] = found.without_nodes()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("passes\n%s", runner.table())
        log.debug("%s", program.source)
        if self.files is not None:
            Path(f"{self.files}_program.py").write_text(program_file(graph, planned=recorded))
        return program


def _cluster(memory_limit: int | None) -> Cluster | None:
    """The description of this cluster. None where there is none and no limit is given: the step then runs in the order
    of :mod:`weft.inductor.passes.schedule_waits`, and a warning says so once."""
    try:
        return cluster_here()
    except NoClusterHere as error:
        if memory_limit is not None:
            raise
        _warn(f"communication is not scheduled: {error}")
        return None


@functools.cache
def _warn(message: str) -> None:
    log.warning("%s", message)


def make_kernels(step: StepGraph) -> StepGraph:
    """The step with generated kernels, compiled, in place of all operations that have a lowering."""
    runner = PassRunner()
    graph = runner.run("binding", kernel_graph(step, runner), [LoadKernels()])
    _log_kernels(graph, runner)
    return graph


def _log_kernels(step: StepGraph, runner: PassRunner) -> None:
    calls = kernel_calls(step)
    different = len({call.generated.source for call in calls})
    operations = sum(len(call.origins) for call in calls)
    seconds = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in runner.seconds.items())
    log.info("%d kernels (%d different) of %d operations; seconds: %s", len(calls), different, operations, seconds)


def _dump(step: StepGraph) -> Path | None:
    """Write the captured graph to ``knobs.dump_dir``. Returns the start of the paths of this step's files."""
    if not knobs.dump_dir:
        return None
    files = Path(knobs.dump_dir).expanduser() / f"step_{os.getpid()}_{next(_count)}"
    try:
        files.parent.mkdir(parents=True, exist_ok=True)
        save(step, f"{files}_graph.py")
    except OSError as error:
        raise CannotWrite("WEFT_DUMP_DIR", files, error) from error
    return files
