"""``weft.explain``: the captured graph of a step, its kernels, its schedule, and their numbers."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
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
from weft.errors import CannotWrite, NotCapturedYet, NotOnGpu, NotScheduled
from weft.inductor.compiler import compilation_of, kernel_graph, schedule_of, scheduled_graph
from weft.inductor.cost.chrome_trace import write_trace
from weft.inductor.cost.cluster import load_cluster
from weft.inductor.cost.kernel_report import KernelReport, KernelUse, report
from weft.inductor.cost.roofline import gpu_called, gpu_of
from weft.inductor.graph.pass_runner import PassRunner
from weft.inductor.graph.retarget import retarget
from weft.inductor.lowering.lower import device_kind
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.cudagraph_partition import partition_step
from weft.inductor.runtime.piecewise_cudagraph import Program
from weft.inductor.runtime.program_file import program_file
from weft.inductor.schedule import schedule_tables
from weft.inductor.schedule.planner import Schedule

_WIDTH = 120
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
        collectives: by kind and group.
        hooks: every registered hook.
        guards: conditions for a later call to use this graph.
        symbolic: sizes that are symbols in the graph.
        specialised: sizes that were to be symbolic and became numbers.
        captures: the reason of every capture of the step so far.
        inputs: by role.
        seconds: how long this capture took.
        graph: the captured graph; prints as Python.
        program: the Python text of the Program.
        kernels: the generated kernels on a GPU; None if ATen kernels run. :meth:`on` predicts them.
        schedule: the schedule of the collectives on GPUs; None without collectives and on CPUs. :meth:`scheduled`
            predicts it.
    """

    name: str
    operations_run: int
    operations_captured: int
    nodes: int
    opaque_calls: list[str]
    collectives: list[CollectiveCount]
    hooks: list[HookFired]
    guards: list[Guard]
    symbolic: list[SymbolicSize]
    specialised: list[Specialised]
    captures: list[str]
    inputs: list[InputBytes]
    seconds: float
    graph: StepGraph
    program: str
    kernels: KernelReport | None = None
    schedule: Schedule | None = None

    def on(self, gpu: str = "H200") -> Explanation:
        """The same, with the kernels that would run on a kind of GPU ("H200": those of docs/clusters.md), compiled for
        it. No GPU is needed: a step that was captured on a CPU, or in a fake world, is moved to one
        (:mod:`weft.inductor.graph.retarget` says what that leaves out).

        Raises:
            UnknownOption: a GPU that weft does not know.
            TritonMissing: kernels cannot be compiled.
        """
        _CHECKS.kind("gpu", gpu, str, "the name of a GPU", 'Write "H200" or another name of docs/clusters.md')
        runner = PassRunner()
        kind = gpu_called(gpu)
        on_cpu = device_kind(self.graph.graph.nodes) == "cpu"
        graph = retarget(self.graph.copy()) if on_cpu else self.graph
        graph = kernel_graph(runner.run("graph", graph.copy(), KERNEL_PASSES), runner)
        kernels = runner.timed("compile", lambda: report(graph, kind, runner.seconds))
        return replace(self, kernels=replace(kernels, seconds=runner.seconds))

    def scheduled(self, cluster: str = "h200x8", memory_limit: float | None = None) -> Explanation:
        """The same, with the schedule that it would have on a cluster, predicted: no GPU is needed. The process groups
        of the step have to be there: inside the ``weft.fake_world`` it was captured in.

        Args:
            cluster: a name of docs/clusters.md, or the path of a description.
            memory_limit: GiB that a rank may hold, as in ``weft.compile``.

        Raises:
            UnknownOption: a cluster that weft does not know.
            MemoryLimitUnreachable: no schedule fits.
            GroupGone: a process group of the step is not there any more.
        """
        limit = _CHECKS.gibibytes("memory_limit", memory_limit)
        description = load_cluster(cluster)
        graph = self.graph.copy()
        graph = retarget(graph) if device_kind(graph.graph.nodes) == "cpu" else graph
        _, found = scheduled_graph(graph, description, limit, True, PassRunner())
        return replace(self, schedule=found)

    def write_trace(self, path: str | Path) -> None:
        """Write the predicted schedule as a Chrome trace, which Perfetto opens: computation, each communicator, memory.

        Raises:
            NotScheduled: the step has no schedule.
            CannotWrite: there can be no such file.
        """
        if self.schedule is None:
            raise NotScheduled(self.name)
        with _written(path):
            write_trace(path, self.schedule.simulation)

    def measured(self) -> Explanation:
        """The same, with the time that each kernel takes on this machine's GPU.

        Raises:
            NotOnGpu: the step runs on none.
        """
        if self.kernels is None:
            raise NotOnGpu("of this step")
        return replace(self, kernels=self.kernels.measured())

    def write(self, path: str | Path) -> None:
        """Write what runs as one Python file: kernels, what launches them, what calls them.

        Raises:
            CannotWrite: there can be no such file.
        """
        with _written(path):
            graph = self.kernels.graph if self.kernels is not None else run_passes(self.graph)
            Path(path).write_text(program_file(graph))

    @property
    def guards_by_kind(self) -> dict[str, int]:
        """Number of guards by kind, such as ``tensor`` or ``number``."""
        return dict(Counter(guard.kind for guard in self.guards))

    def __rich__(self) -> RenderableType:
        return Group(*_tables(self))

    def __str__(self) -> str:
        colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        console = Console(file=io.StringIO(), force_terminal=colours, no_color=not colours, width=_WIDTH)
        with console.capture() as text:
            console.print(self)
        return "\n".join(line.rstrip() for line in text.get().splitlines())


@contextlib.contextmanager
def _written(path: str | Path) -> Iterator[None]:
    """Inside, errors of the file system are those of the file that the user named."""
    _CHECKS.kind("path", path, (str, os.PathLike), "the path of a file", 'Write "step.py"')
    try:
        yield
    except OSError as error:
        raise CannotWrite("weft.explain", path, error) from error


def explain(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say what a step was captured as.

    Args:
        step: a compiled step; or any function, which is then captured for the purpose and not run.
        args, kwargs: a call to explain. A compiled step that was captured in that form is not captured again;
            without arguments, the form that ran last is explained.

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
        collectives=_collectives(graph),
        hooks=[HookFired(count.owner, count.kind, count.name, count.fired) for count in captured.hooks.counts],
        guards=entry.guards.listed(),
        symbolic=list(_symbolic(captured)),
        specialised=list(captured.specialised),
        captures=list(compiled.captures),
        inputs=_inputs(graph),
        seconds=captured.seconds,
        graph=graph,
        program=entry.program.source,
        kernels=_kernels(entry.program),
        schedule=schedule_of(entry.program),
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


# ---- tables


def _tables(explained: Explanation) -> Iterator[RenderableType]:
    yield Text(
        f"{explained.name}: {explained.operations_captured} of {explained.operations_run} operations "
        f"captured as {explained.nodes} nodes in {explained.seconds:.2f} s",
        style="bold",
    )
    yield from _table(
        "inputs",
        ["role", "count", "bytes"],
        [(i.role.value, i.count, format_bytes(i.bytes)) for i in explained.inputs],
    )
    yield from _table(
        "collectives",
        ["kind", "group", "count", "bytes"],
        [
            (c.kind, c.group, c.count, "data decides" if c.bytes is None else format_bytes(c.bytes))
            for c in explained.collectives
        ],
    )
    yield from _table(
        "hooks",
        ["owner", "kind", "function", "fired"],
        [(h.owner, h.kind, h.name, h.count) for h in explained.hooks],
    )
    yield from _table("opaque calls", ["function", "count"], Counter(explained.opaque_calls).items())
    yield from _table(
        "symbolic sizes",
        ["size", "symbol", "from", "to"],
        [(s.size, s.symbol, s.low, "any" if s.high is None else s.high) for s in explained.symbolic],
    )
    yield from _table(
        "specialised sizes",
        ["size", "value", "by"],
        [(s.size, s.value, s.line) for s in explained.specialised],
    )
    yield from _table("guards", ["kind", "count"], explained.guards_by_kind.items())
    yield from _table("captures", ["", "reason"], list(enumerate(explained.captures, 1)))
    if explained.kernels is not None:
        yield from _kernel_tables(explained.kernels)
    if explained.schedule is not None:
        yield Text(schedule_tables.summary(explained.schedule.simulation), style="bold")
        for rows in schedule_tables.tables(explained.schedule):
            yield from _table(*rows)


def _kernel_tables(found: KernelReport) -> Iterator[RenderableType]:
    measured = ["measured us"] if any(use.measured_us is not None for use in found.kernels) else []
    yield from _table(
        f"kernels on {found.gpu.name}, {found.gpu.copy_bandwidth / 1e12:g} TB/s",
        ["kernel", "count", "ops", "bytes", "roofline us", *measured, "regs", "spills", "shared", "from"],
        [_kernel_row(use) for use in found.kernels],
    )
    calls = [(calls.operation, calls.count, calls.why) for calls in found.calls]
    yield from _table("not generated", ["operation", "count", "why"], calls)
    seconds = [(stage, f"{seconds:.2f}") for stage, seconds in found.seconds.items()]
    yield from _table("seconds of compiling", ["stage", "s"], seconds)
    recorded = [(nodes, "recorded" if why is None else why) for nodes, why in found.recorded]
    yield from _table("CUDA graphs", ["nodes", "recorded, or why not"], recorded)


def _kernel_row(use: KernelUse) -> tuple[Any, ...]:
    measured = [] if use.measured_us is None else [f"{use.measured_us:.1f}"]
    needs: list[Any] = ["", "", ""]
    if use.resources is not None:
        needs = [use.resources.registers, use.resources.spills, format_bytes(use.resources.shared)]
    roofline = f"{use.roofline_us:.1f}"
    return use.name, use.count, use.operations, format_bytes(use.bytes), roofline, *measured, *needs, _short(use.lines)


def _short(lines: Iterable[str]) -> str:
    """``train.py:12, 14`` of lines with their paths and functions."""
    numbers: dict[str, dict[int, None]] = {}
    for line in lines:
        file, _, number = line.rsplit(" in ", 1)[0].rpartition(":")
        numbers.setdefault(os.path.basename(file), {})[int(number)] = None
    return "; ".join(f"{file}:{', '.join(map(str, sorted(found)))}" for file, found in numbers.items())


def _table(title: str, columns: list[str], rows: Iterable[tuple[Any, ...]]) -> Iterator[RenderableType]:
    """A title and aligned columns, numbers to the right; nothing where there are no rows."""
    rows = list(rows)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for at, column in enumerate(columns):
        number = isinstance(rows[0][at], int) or column in ("bytes", "shared", "s") or column.endswith((" us", " ms"))
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=column == "kernel")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    yield Text(f"\n{title}", style="bold cyan")
    yield table
