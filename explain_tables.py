"""What ``weft.explain`` prints: the summary and the sections, as text that fits the terminal, 80 columns where there is
none. Sections show in notebooks, too."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from torch.fx import Node

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective
from weft.capture.printer import operation
from weft.capture.sizes_in_bytes import format_bytes
from weft.inductor.cost.compute_cost import ComputeCosts
from weft.inductor.cost.kernel_report import KernelReport, KernelUse
from weft.inductor.schedule.schedule_tables import BucketReport
from weft.shown_values import counted

_NARROW = 80  # columns where no terminal says how many there are
_LONGEST = 34  # letters of a name in a table
_LONGEST_OPERATION = 22  # letters of an operation in the short graph: its column is at least 27 wide
_SMALL = 0.01  # rows with less than this part of the total are added up
_MOST_OPS = 3  # operations that a row of the short graph names
_COMPUTE_NOTHING = ("getitem", "wait_tensor")  # named last there


def seconds_text(seconds: float) -> str:
    """A time with the unit in which its number reads: ``1.20 s``, ``110 ms``, ``12.3 us``, ``400 ns``, ``<1 ns``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= scale:
            value = seconds / scale
            digits = 0 if unit == "ns" or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    return "<1 ns" if seconds else "0"


def shortened(name: str, longest: int = _LONGEST) -> str:
    """A name that fits a column: its beginning and its end."""
    if len(name) <= longest:
        return name
    end = (longest - 3) // 3
    return f"{name[: longest - 3 - end]}...{name[-end:]}"


@dataclass(frozen=True)
class Section:
    """A part of an explanation; ``print`` shows it, and so does a notebook."""

    parts: Sequence[RenderableType] = field(repr=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.parts

    def __str__(self) -> str:
        return as_text(Group(*self.parts))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(Group(*self.parts))


def as_text(shown: RenderableType) -> str:
    """As text, as wide as the terminal; without colours where standard output is none."""
    terminal = sys.stdout.isatty()
    colours = terminal and "NO_COLOR" not in os.environ
    width = max(_NARROW, shutil.get_terminal_size((_NARROW, 24)).columns) if terminal else _NARROW
    console = _console(force_terminal=colours, no_color=not colours, width=width)
    with console.capture() as text:
        console.print(shown)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def as_html(shown: RenderableType) -> str:
    """As an HTML fragment of fixed-width text, for notebooks."""
    console = _console(record=True, width=120, force_terminal=True)
    console.print(shown)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:normal">{code}</pre>')


def _console(**options: Any) -> Console:
    """A console that shows nothing: in a notebook, Rich's own would show what it prints, beside the notebook."""
    return Console(file=io.StringIO(), force_jupyter=False, **options)


def pairs(title: str, rows: Iterable[tuple[str, str]]) -> list[RenderableType]:
    """A title, and names with their values below it, which wrap at spaces."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return [Text(title, style="bold"), table]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[RenderableType]:
    """A title and aligned columns, numbers to the right; nothing without rows. Only the last column wraps."""
    rows = [[cell if isinstance(cell, str) else str(cell) for cell in row] for row in rows]
    if not rows:
        return []
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for at, column in enumerate(columns):
        number = all(re.match(r"[-<]?[\d.]+( ?[a-zA-Z%]+)?$", row[at]) for row in rows if row[at])
        last = at == len(columns) - 1 and not number and column != "from"
        made.add_column(column, justify="right" if number else "left", no_wrap=not last, overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return [Text(title, style="bold cyan"), made]


# ---- the graph by modules


@dataclass
class _Part:
    """Nodes of one stage and one module; ``count`` modules have the same."""

    stage: str
    module: str
    operations: Counter[str]
    count: int = 1


def short_graph(graph: StepGraph) -> list[_Part]:
    """The graph by stage and module, in order. Modules that differ in their number alone and have equal operations are
    one part."""
    found: dict[tuple[str, str], _Part] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            key = str(node.meta.get("stage") or ""), str(node.meta.get("module") or "")
            part = found.setdefault(key, _Part(*key, Counter()))
            part.operations[_operation_of(node)] += 1
    folded: dict[tuple[Any, ...], _Part] = {}
    for part in found.values():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", part.module)
        key = part.stage, pattern, tuple(sorted(part.operations.items()))
        if key in folded:
            folded[key].count += 1
            folded[key].module = pattern
        else:
            folded[key] = part
    return list(folded.values())


def _operation_of(node: Node) -> str:
    """``mul`` of ``aten.mul.Tensor``, ``pad_shard`` of ``weft.pad_shard``."""
    return operation(node.target).split(".")[:2][-1]


def graph_section(graph: StepGraph) -> Section:
    """The short form of the graph: by stage and module."""
    rows, parts = [], short_graph(graph)
    for part in parts:
        counts = sorted(part.operations.items(), key=lambda item: (item[0] in _COMPUTE_NOTHING, -item[1]))[:_MOST_OPS]
        named = [f"{count} {shortened(name, _LONGEST_OPERATION)}" for name, count in counts]
        more = sum(part.operations.values()) - sum(count for _, count in counts)
        module = shortened(part.module or "(the step)") + (f" x{part.count}" if part.count > 1 else "")
        named += [f"{more} more"] * (more > 0)
        rows.append((part.stage, module, sum(part.operations.values()), ", ".join(named)))
    operations = sum(sum(part.operations.values()) * part.count for part in parts)
    title = f"{counted(operations, 'operation')}; print(explained.step_graph) shows all"
    return Section(table(title, ["stage", "module", "each", "operations"], rows))


# ---- kernels


def least_seconds(report: KernelReport, uses: Iterable[KernelUse]) -> float:
    """Time of all launches of generated kernels, at least: that of their bytes at the GPU's copy bandwidth. No kernel
    takes less than the shortest one."""
    return sum(use.count * max(use.roofline_us * 1e-6, report.gpu.launch_latency) for use in uses)


def library_seconds(report: KernelReport) -> dict[str, float]:
    """Estimated seconds, by operation, of the calls that no generated kernel computes; collectives are left out."""
    costs = ComputeCosts(report.gpu)
    seconds: dict[str, float] = {}
    named = {calls.operation for calls in report.calls}
    for node in report.graph.graph.nodes:
        name = str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", "")
        if node.op == "call_function" and name in named and not is_collective(node):
            seconds[name] = seconds.get(name, 0.0) + costs.seconds(node)
    return seconds


def kernels_section(found: KernelReport) -> Section:
    """Kernels with their times, what libraries run, and what it adds up to."""
    gpu = f"{found.gpu.name}, {found.gpu.copy_bandwidth / 1e12:g} TB/s"
    library = library_seconds(found)
    times = {name: seconds_text(seconds) for name, seconds in library.items()}
    generated = least_seconds(found, found.kernels)
    launches, calls = sum(use.count for use in found.kernels), sum(call.count for call in found.calls)
    total = (
        f"{counted(len(found.kernels), 'generated kernel')}, launched {counted(launches, 'time')}: "
        f"at least {seconds_text(generated)}; "
        f"{counted(calls, 'other call')}: about {seconds_text(sum(library.values()))}"
    )
    measured = any(use.measured_us is not None for use in found.kernels)
    columns = ["kernel", "count", "bytes", "least", *(["measured"] if measured else []), "regs", "from"]
    parts = [
        Text(f"on {gpu}", style="bold"),
        Text(total),
        *table("\nkernels (regs: registers + spilled)", columns, _kernel_rows(found, measured)),
        *table(
            "\nnot generated",
            ["operation", "count", "about", "why"],
            [
                (shortened(plain_operation(c.operation)), c.count, times.get(c.operation, ""), c.why)
                for c in found.calls
            ],
        ),
        *table("\ncompiling", ["stage", "time"], [(s, seconds_text(t)) for s, t in found.seconds.items() if t >= 5e-3]),
        *table(
            "\nCUDA graphs",
            ["nodes", "recorded, or why not"],
            [(nodes, "recorded" if why is None else why) for nodes, why in found.recorded],
        ),
    ]
    return Section(parts)


def aten_section(graph: StepGraph) -> Section:
    """What ATen runs where no kernels are generated: operations by count, without collectives."""
    called = (node for node in graph.graph.nodes if node.op == "call_function" and not is_collective(node))
    counts = Counter(name for name in map(_operation_of, called) if name not in _COMPUTE_NOTHING)
    operations = counted(sum(counts.values()), "operation")
    title = f'ATen runs {operations} here; .on("H200").kernels() shows what a GPU would run'
    return Section([Text(title, style="bold"), *table("\noperations", ["operation", "count"], counts.most_common())])


def plain_operation(name: str) -> str:
    """``mm`` of ``aten.mm.default``, ``all_gather`` of torch's functional collective. Attention that was captured on a
    CPU and has no dtype of the GPU's fast kernels runs as memory-efficient attention there."""
    name = name.removeprefix("aten.").removeprefix("_c10d_functional.").removesuffix(".default")
    return name.replace("_flash_attention_for_cpu", "_efficient_attention").removeprefix("_scaled_dot_product_")


def _column(name: str) -> str:
    return shortened(plain_operation(name))


def plain_collective(kind: str) -> str:
    """``all-gather`` of ``all_gather_into_tensor``."""
    return kind.removesuffix("_into_tensor").removesuffix("_tensor").replace("_", "-")


def _kernel_rows(report: KernelReport, measured: bool) -> Iterator[tuple[Any, ...]]:
    uses, total = report.kernels, least_seconds(report, report.kernels)
    shown = [use for use in uses if least_seconds(report, [use]) >= _SMALL * total or use.measured_us is not None]
    for use in shown:
        needs = "" if use.resources is None else str(use.resources.registers)
        if use.resources is not None and use.resources.spills:
            needs += f"+{use.resources.spills}"
        time = seconds_text(least_seconds(report, [replace(use, count=1)]))
        found = [] if not measured else ["" if use.measured_us is None else seconds_text(use.measured_us * 1e-6)]
        yield shortened(use.name, 28), use.count, format_bytes(use.bytes), time, *found, needs, first_line(use.lines)
    others = [use for use in uses if use not in shown]
    if others:
        time = seconds_text(least_seconds(report, others))
        moved = format_bytes(sum(use.bytes * use.count for use in others))
        count = sum(use.count for use in others)
        yield counted(len(others), "other"), count, moved, time, *([""] if measured else []), "", ""


def first_line(lines: Sequence[str]) -> str:
    """``train.py:12`` of lines with their paths and functions; ``train.py:12, +2`` where there are two more."""
    if not lines:
        return ""
    more = f", +{len(lines) - 1}" if len(lines) > 1 else ""
    return shortened(os.path.basename(lines[0].rsplit(" in ", 1)[0]), 20) + more


# ---- the schedule


def _together(members: Sequence[str]) -> str:
    """``blocks.*`` for parameters of a block, their number where they have nothing in common."""
    if len(members) == 1:
        return shortened(members[0], 16)
    paths = zip(*(member.split(".")[:-1] for member in members), strict=False)
    common = [part for part, *others in takewhile(lambda same: len(set(same)) == 1, paths)]
    return shortened(".".join(common), 16) if len(common) > 1 else f"{len(members)} tensors"


def bucket_rows(buckets: Sequence[BucketReport]) -> Iterator[tuple[Any, ...]]:
    """Buckets in order of their start; those of repeated layers that are alike have one row."""
    alike: dict[tuple[Any, ...], list[BucketReport]] = {}
    for bucket in sorted(buckets, key=lambda bucket: bucket.began):
        members = tuple(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", member) for member in bucket.members)
        alike.setdefault((bucket.kind, bucket.group, members, bucket.bytes, bucket.transport), []).append(bucket)
    for (kind, _, members, size, transport), same in alike.items():
        times = f" x{len(same)}" if len(same) > 1 else ""
        exposed = sum(bucket.exposed for bucket in same)
        took = sum(bucket.took for bucket in same)
        at = seconds_text(same[0].began)
        lasts = seconds_text(took), seconds_text(exposed)
        yield at, kind + times, format_bytes(size), transport, *lasts, _together(members)
