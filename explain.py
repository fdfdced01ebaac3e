"""``weft.explain``: what a step was captured as, its kernels, its schedule, and their numbers.

Printed, it is a summary; the sections are methods.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import RenderableType
from rich.text import Text

from weft import knobs, torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.capture.graph import StepGraph
from weft.capture.guards.guards import Guard
from weft.capture.node_kinds import group_of
from weft.capture.printer import operation
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.dynamic_sizes import Specialised
from weft.capture.record.opaque import OpaqueCall
from weft.capture.sizes_in_bytes import collective_bytes, format_bytes, tensor_bytes
from weft.capture.step_interface import Role
from weft.compile import CompiledStep
from weft.errors import CannotWrite, NoGeneratedKernels, NotCapturedYet, NotScheduled
from weft.explain_tables import (
    Section,
    aten_section,
    bucket_rows,
    graph_section,
    kernels_section,
    least_seconds,
    pairs,
    plain_collective,
    plain_operation,
    seconds_text,
    table,
)
from weft.inductor.compiler import compilation_of, schedule_of
from weft.inductor.cost.chrome_trace import write_trace
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.kernel_report import KernelReport, report
from weft.inductor.cost.roofline import gpu_called, gpu_of
from weft.inductor.cost.trace_timings import measured_spans
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.graph.retarget import retarget
from weft.inductor.lowering.lower import device_kind
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.cudagraph_partition import partition_step
from weft.inductor.runtime.piecewise_cudagraph import Program
from weft.inductor.runtime.program_file import program_file
from weft.inductor.schedule.planner import Schedule
from weft.inductor.schedule.scheduled_graph import predicted_schedule
from weft.short_tracebacks import methods_shorten_tracebacks, shortens_tracebacks
from weft.shown_values import counted

_CHECKS = ArgumentChecks("weft.explain")


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind over one group; ``bytes`` sums their larger sides, None if sizes depend on
    data."""

    kind: str
    group: str
    count: int
    bytes: int | None


@dataclass(frozen=True)
class HookFired:
    """How often one hook ran in the capture; it runs as often in each step."""

    owner: str
    kind: str
    name: str
    count: int


@dataclass(frozen=True)
class SymbolicSize:
    """A size (``args[0].size(0)``) or stride that is a symbol in the graph, from ``low`` to ``high`` (None:
    no bound)."""

    size: str
    symbol: str
    low: int
    high: int | None


@dataclass(frozen=True)
class InputBytes:
    """Inputs of one role: how many, and their bytes on this rank."""

    role: Role
    count: int
    bytes: int


@methods_shorten_tracebacks
@dataclass(frozen=True)
class Explanation:
    """The captured form of a step. ``print`` shows it as tables.

    Attributes:
        name: of the step.
        operations_run: operations that the step dispatched while it was captured.
        operations_captured: operations that were recorded. The others run once only: they create optimizer
            state.
        nodes: calls in the graph. Views and writes add nodes; unused results are removed.
        opaque_calls: functions marked with ``weft.opaque`` that the graph calls, in order.
        collective_counts: by kind and group.
        hooks: every registered hook.
        guard_list: conditions for a later call to use this graph.
        symbolic: sizes that are symbols in the graph.
        specialised: sizes that were to be symbolic and became numbers.
        captures: the reason of every capture of the step so far.
        inputs: by role.
        seconds: how long this capture took.
        step_graph: the captured graph; prints as Python.
        program: the Python text of the Program.
        kernel_report: the generated kernels on a GPU; None if ATen kernels run. :meth:`on` predicts them.
        schedule: the schedule of the collectives on GPUs; None without collectives and on CPUs. :meth:`scheduled`
            predicts it.
        memory_limit: bytes, that of the compiled step; :meth:`scheduled` keeps it.
        world_size, rank: of the process group, or of the fake world, that the step was captured in.
    """

    name: str
    operations_run: int
    operations_captured: int
    nodes: int
    opaque_calls: list[str]
    collective_counts: list[CollectiveCount]
    hooks: list[HookFired]
    guard_list: list[Guard]
    symbolic: list[SymbolicSize]
    specialised: list[Specialised]
    captures: list[str]
    inputs: list[InputBytes]
    seconds: float
    step_graph: StepGraph
    program: str
    kernel_report: KernelReport | None = None
    schedule: Schedule | None = None
    memory_limit: int | None = None
    world_size: int = 1
    rank: int = 0

    def on(self, gpu: str = "H200") -> Explanation:
        """The same, with the kernels that would run on a kind of GPU ("H200", or a cluster of such: "h200x8", see
        docs/clusters.md), compiled for it. No GPU is needed: a step that was captured on a CPU, or in a fake world, is
        moved to one (:mod:`weft.inductor.graph.retarget` says what that leaves out).

        Raises:
            UnknownOption: a GPU that weft does not know.
            TritonMissing: kernels cannot be compiled.
        """
        _CHECKS.kind("gpu", gpu, str, "the name of a GPU", 'Write "H200" or another name of docs/clusters.md')
        runner = PassRunner()
        kind = gpu_called(gpu)
        on_cpu = device_kind(self.step_graph.graph.nodes) == "cpu"
        graph = retarget(self.step_graph.copy()) if on_cpu else self.step_graph
        graph = kernel_graph(runner.run("graph", graph.copy(), KERNEL_PASSES), runner)
        kernels = runner.timed("compile", lambda: report(graph, kind, runner.seconds))
        return replace(self, kernel_report=replace(kernels, seconds=runner.seconds))

    def scheduled(self, cluster: str = "h200x8", memory_limit: float | None = None) -> Explanation:
        """The same, with the schedule that it would have on a cluster, predicted: no GPU is needed. The process groups
        of the step have to be there: inside the ``weft.fake_world`` it was captured in.

        Args:
            cluster: a name of docs/clusters.md, the name of a GPU ("H200"), or the path of a description.
            memory_limit: GiB that a rank may hold, as in ``weft.compile``; by default that of the compiled step.

        Raises:
            UnknownOption: a cluster that weft does not know.
            MemoryLimitUnreachable: no schedule fits.
            GroupGone: a process group of the step is not there any more.
        """
        limit = _CHECKS.gibibytes("memory_limit", memory_limit) or self.memory_limit
        description = load_cluster(cluster)
        graph = self.step_graph.copy()
        graph = retarget(graph) if device_kind(graph.graph.nodes) == "cpu" else graph
        return replace(self, schedule=predicted_schedule(graph, description, limit), memory_limit=limit)

    def write_trace(self, path: str | Path, profile: torch.profiler.profile | None = None) -> None:
        """Write the predicted schedule as a Chrome trace, which Perfetto opens: computation, each communicator, memory.

        Args:
            path: of the file.
            profile: of one call of the step on this process's GPU, stopped. Its kernels and copies are a second process
                of the same file, "measured", with the user's lines of generated kernels.

        Raises:
            NotScheduled: the step has no schedule.
            InvalidArgument: ``profile`` has nothing that ran on a GPU.
            CannotWrite: there can be no such file.
        """
        if self.schedule is None:
            raise NotScheduled(self.name)
        measured = [] if profile is None else measured_spans(profile)
        if profile is not None and not measured:
            wanted, remedy = (
                "of a step on a GPU",
                "Record it with ProfilerActivity.CUDA around one call, and stop it first",
            )
            raise _CHECKS.invalid("profile", "one without kernels", wanted, remedy)
        uses = () if self.kernel_report is None else self.kernel_report.kernels
        lines = {use.name: use.lines[0] for use in uses if use.lines}
        with _written(path):
            write_trace(path, self.schedule.simulation, measured, lines)

    def measured(self) -> Explanation:
        """The same, with the time that each kernel takes on this machine's GPU.

        Raises:
            NoGeneratedKernels: it has none.
            NotOnGpu: they were generated for another GPU, by :meth:`on`.
        """
        if self.kernel_report is None:
            raise NoGeneratedKernels(self.name)
        return replace(self, kernel_report=self.kernel_report.measured())

    def write(self, path: str | Path) -> None:
        """Write what runs as one Python file: kernels, what launches them, what calls them.

        Raises:
            CannotWrite: there can be no such file.
        """
        with _written(path):
            graph = self.kernel_report.graph if self.kernel_report is not None else run_passes(self.step_graph)
            Path(path).write_text(program_file(graph))

    @property
    def guards_by_kind(self) -> dict[str, int]:
        """Number of guards by kind, such as ``tensor`` or ``number``."""
        return dict(Counter(guard.kind for guard in self.guard_list))

    # ---- what is printed

    def graph(self) -> Section:
        """The captured graph by stage and module; layers that are alike have one row. :attr:`step_graph` is all."""
        return graph_section(self.step_graph)

    def kernels(self) -> Section:
        """Generated kernels, what libraries run beside them, and their times.

        Where ATen runs the step, on a CPU or with ``mode="bitwise"``: its operations. :meth:`on` says what a GPU would
        run.
        """
        return aten_section(self.step_graph) if self.kernel_report is None else kernels_section(self.kernel_report)

    def collectives(self, why: bool = False) -> Section:
        """Collectives by kind and group; with a schedule its buckets, too.

        Args:
            why: add the numbers that decided each bucket.
        """
        _CHECKS.boolean("why", why)
        rows = [
            (plain_collective(c.kind), c.group, c.count, "data decides" if c.bytes is None else format_bytes(c.bytes))
            for c in self.collective_counts
        ]
        parts = table("collectives", ["kind", "group", "count", "bytes"], rows)
        if self.schedule is not None:
            columns = ["at", "bucket", "bytes", "by", "took", "exposed", "of"]
            parts += table("\nbuckets", columns, bucket_rows(self.schedule.reports))
            for bucket in self.schedule.reports if why else ():
                parts.append(Text(f"{bucket.kind} of {', '.join(bucket.members[:2])}: {bucket.why}"))
        return Section(parts or [Text("The step does not communicate.")])

    def memory(self) -> Section:
        """Inputs by role; with a schedule the predicted peak and where it is."""
        rows = [(i.role.value, i.count, format_bytes(i.bytes)) for i in self.inputs]
        parts = table("inputs of this rank", ["role", "count", "bytes"], rows)
        if self.schedule is not None:
            simulation = self.schedule.simulation
            at = simulation.task_graph.tasks[simulation.order[simulation.peak_at]].name if simulation.order else "none"
            aside = simulation.task_graph.set_aside
            limit = "" if self.memory_limit is None else f", limit {format_bytes(self.memory_limit)}"
            parts.append(Text(f"\npredicted peak {format_bytes(simulation.peak)} at {at}{limit}"))
            if aside:
                parts.append(Text(f"{format_bytes(aside)} of it for collectives over symmetric memory"))
        return Section(parts)

    def guards(self) -> Section:
        """What a later call must meet to run this form: symbolic and specialised sizes, conditions by kind, and why the
        step was captured so often. :attr:`guard_list` has every condition."""
        sizes = [(s.size, s.symbol, s.low, "any" if s.high is None else s.high) for s in self.symbolic]
        fixed = [(s.size, s.value, s.line) for s in self.specialised]
        return Section(
            [
                *table("guards", ["kind", "count"], self.guards_by_kind.items()),
                *table("\nsymbolic sizes", ["size", "symbol", "from", "to"], sizes),
                *table("\nspecialised sizes", ["size", "value", "by"], fixed),
                *table("\ncaptures", ["", "reason"], list(enumerate(self.captures, 1))),
            ]
        )

    def hooks_and_calls(self) -> Section:
        """Every registered hook and how often it fired; functions marked with ``weft.opaque``."""
        hooks = [(h.owner, h.kind, h.count, h.name) for h in self.hooks]
        calls = Counter(self.opaque_calls).items()
        return Section(
            table("hooks", ["owner", "kind", "fired", "function"], hooks)
            + table("\nopaque calls", ["function", "count"], calls)
        )

    def summary(self) -> Section:
        """What ``print`` shows."""
        title = f"{self.name}: {counted(self.nodes, 'operation')}, captured in {seconds_text(self.seconds)}"
        return Section(pairs(title, _summary(self)))

    def __rich__(self) -> RenderableType:
        return self.summary()

    def __str__(self) -> str:
        return str(self.summary())

    def __repr__(self) -> str:
        return f"<weft explanation of {self.name}: {self.nodes} operations>"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


@contextlib.contextmanager
def _written(path: str | Path) -> Iterator[None]:
    """Inside, errors of the file system are those of the file that the user named."""
    _CHECKS.kind("path", path, (str, os.PathLike), "the path of a file", 'Write "step.py"')
    try:
        yield
    except OSError as error:
        raise CannotWrite("weft.explain", path, error) from error


@shortens_tracebacks
def explain(step: Callable[..., object], *args: object, **kwargs: object) -> Explanation:
    """Say what a step was captured as.

    Args:
        step: a compiled step; or any function, which is then captured for the purpose and not run.
        *args: of a call to explain. A compiled step that was captured in that form is not captured again;
            without arguments, the form that ran last is explained. An iterator among them gives the items of a call.
        **kwargs: of that call.

    Raises:
        NotCapturedYet: a compiled step never ran and no arguments were given.
        InvalidArgumentType: ``step`` cannot be called.
    """
    _CHECKS.function_or_callable("step", step, "Pass a compiled step, or a function and its arguments")
    compiled = step if isinstance(step, CompiledStep) else CompiledStep(step)
    given = bool(args or kwargs) or not isinstance(step, CompiledStep)
    if not given and not compiled.entries:
        raise NotCapturedYet(compiled.__name__)
    entry = compiled.entry_for(args, kwargs) if given else compiled.entries[0]
    captured, graph = entry.captured, entry.captured.graph
    return Explanation(
        name=compiled.__name__,
        operations_run=captured.recorded + captured.passed,
        operations_captured=captured.recorded,
        nodes=sum(node.op == "call_function" for node in graph.graph.nodes),
        opaque_calls=[
            operation(n.target).removeprefix("opaque_") for n in graph.graph.nodes if isinstance(n.target, OpaqueCall)
        ],
        collective_counts=_collectives(graph),
        hooks=[HookFired(count.owner, count.kind, count.name, count.fired) for count in captured.hooks.counts],
        guard_list=entry.guards.listed(),
        symbolic=list(_symbolic(captured)),
        specialised=list(captured.specialised),
        captures=list(compiled.captures),
        inputs=_inputs(graph),
        seconds=captured.seconds,
        step_graph=graph,
        program=entry.program.source,
        kernel_report=_kernels(entry.program),
        schedule=schedule_of(entry.program),
        memory_limit=compiled.memory_limit,
        world_size=torch_adapter.world_size(),
        rank=dist.get_rank() if dist.is_initialized() else 0,
    )


def _kernels(program: Program) -> KernelReport | None:
    """What a program runs on its GPU; None where it runs ATen's kernels."""
    compilation = compilation_of(program)
    if compilation is None:
        return None
    graph = compilation.graph
    recorded: list[tuple[int, str | None]] = [(len(graph), "WEFT_CUDA_GRAPHS=0")]
    if knobs.cuda_graphs:
        recorded = [(len(partition.step), partition.why_not) for partition in partition_step(graph)]
    vals = (node.meta.get("val") for node in graph.graph.nodes)
    device = next(val.device for val in vals if isinstance(val, torch.Tensor) and val.is_cuda)
    return report(graph, gpu_of(device), compilation.seconds, recorded)


def _collectives(graph: StepGraph) -> list[CollectiveCount]:
    counts: dict[tuple[str, str], list[int | None]] = {}
    for node in graph.collectives():
        kind = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
        counts.setdefault((kind, group_of(node)), []).append(collective_bytes(node))
    return [
        CollectiveCount(kind, group, len(sizes), None if None in sizes else sum(size or 0 for size in sizes))
        for (kind, group), sizes in sorted(counts.items())
    ]


def _symbolic(captured: CapturedStep) -> Iterator[SymbolicSize]:
    for size in captured.sizes.sizes:
        value = torch_adapter.replaced(captured.shape_env, size.symbol)
        if not value.is_number:
            low, high = torch_adapter.range_of(captured.shape_env, size.symbol)
            yield SymbolicSize(str(size), str(value), low, high)


def _inputs(graph: StepGraph) -> list[InputBytes]:
    sizes: dict[Role, list[int]] = {}
    for entry, node in zip(graph.inputs, graph.placeholders, strict=True):
        sizes.setdefault(entry.role, []).append(tensor_bytes(node.meta["val"]) or 0)
    return [InputBytes(role, len(sizes[role]), sum(sizes[role])) for role in Role if role in sizes]


def _summary(explained: Explanation) -> Iterator[tuple[str, str]]:
    """Names and values of the summary; what is unknown has no row, or says how to find out."""
    if explained.world_size > 1:
        yield "runs on", f"rank {explained.rank} of {explained.world_size}"
    sizes = (f"{i.role.value} {format_bytes(i.bytes)} in {i.count}" for i in explained.inputs if i.bytes)
    yield "this rank", ", ".join(sizes) or "holds no tensors"
    collectives = (
        f"{counted(c.count, plain_collective(c.kind))} over {c.group}, "
        f"{'of sizes that data decides' if c.bytes is None else f'{format_bytes(c.bytes)} together'}"
        for c in explained.collective_counts
    )
    yield "communicates", "; ".join(collectives) or "not at all"
    yield from _predicted(explained)
    report_ = explained.kernel_report
    if report_ is None:
        yield "kernels", 'ATen runs all operations here; .on("H200") says what a GPU would run'
    else:
        launches = sum(use.count for use in report_.kernels)
        on = f"on {report_.gpu.name}, at least {seconds_text(least_seconds(report_, report_.kernels))}"
        yield "kernels", f"{len(report_.kernels)} generated, launched {counted(launches, 'time')} {on}"
        others = Counter[str]()
        for calls in report_.calls:
            others[plain_operation(calls.operation)] += calls.count if calls.why != "communicates" else 0
        yield "other calls", ", ".join(f"{count} {name}" for name, count in others.most_common(5) if count) or "nothing"
    if explained.hooks or explained.opaque_calls:
        fired = sum(hook.count for hook in explained.hooks)
        text = (
            f"{counted(len(explained.hooks), 'hook')} fired {counted(fired, 'time')}, "
            f"{counted(len(explained.opaque_calls), 'opaque call')}"
        )
        yield "hooks", f"{text}: .hooks_and_calls()"
    times = "once" if len(explained.captures) <= 1 else f"{len(explained.captures)} times"
    yield "guards", f"{counted(len(explained.guard_list), 'condition')}; captured {times}"
    if explained.symbolic or explained.specialised:
        yield "sizes", f"{len(explained.symbolic)} symbolic, {len(explained.specialised)} specialised: .guards()"
    yield "more", ".graph() .kernels() .collectives() .memory() .guards(), print(explained.step_graph)"


def _predicted(explained: Explanation) -> Iterator[tuple[str, str]]:
    if explained.schedule is None:
        if explained.collective_counts:
            yield "step time", '.scheduled("h200x8") predicts it, exposed communication and memory'
        return
    simulation = explained.schedule.simulation
    exposed = simulation.exposed_seconds
    share = f" ({exposed / simulation.seconds:.1%})" if simulation.seconds else ""
    communication = f"{seconds_text(exposed)} of it exposed communication{share}"
    yield "step time", f"{seconds_text(simulation.seconds)} predicted, {communication}"
    limit = "" if explained.memory_limit is None else f", limit {format_bytes(explained.memory_limit)}"
    yield "peak memory", f"{format_bytes(simulation.peak)} predicted{limit}"
