"""``weft.explain``: what a step was captured as, in numbers."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weft import torch_adapter
from weft.capture.costs import collective_bytes, format_bytes, tensor_bytes
from weft.capture.dynamic import Specialised
from weft.capture.graph import Role, StepGraph, group_of
from weft.capture.guards import Guard
from weft.capture.opaque import OpaqueCall
from weft.capture.printer import operation
from weft.capture.tracer import CapturedStep
from weft.compile import CompiledStep
from weft.errors import NotCapturedYet

_WIDTH = 120


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind over one group; ``bytes`` sums their larger sides, None where only the data
    decides."""

    kind: str
    group: str
    count: int
    bytes: int | None


@dataclass(frozen=True)
class HookFired:
    """How often one hook ran in the capture, and so runs in each step."""

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
    """What a step was captured as. ``print`` shows it as tables.

    Attributes:
        name: of the step.
        operations_run: operations that the step dispatched while it was captured.
        operations_captured: those among them that were recorded; the others run once and not in later steps
            (making the state of an optimizer).
        nodes: calls in the graph. Views and writes add some, what nothing uses is gone.
        opaque_calls: functions marked with ``weft.opaque`` that the graph calls, in order.
        collectives: by kind and group.
        hooks: each hook that was registered.
        guards: what must hold for the graph to be used again.
        symbolic: sizes that are symbols in the graph.
        specialised: sizes that were to be, and are numbers after all.
        captures: the reason of every capture of the step so far.
        inputs: by role.
        seconds: how long this capture took.
        graph: the captured graph; prints as Python.
        program: the Python text that runs.
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

    @property
    def guards_by_kind(self) -> dict[str, int]:
        return dict(Counter(guard.kind for guard in self.guards))

    def __rich__(self) -> RenderableType:
        return Group(*_tables(self))

    def __str__(self) -> str:
        colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        console = Console(file=io.StringIO(), force_terminal=colours, no_color=not colours, width=_WIDTH)
        with console.capture() as text:
            console.print(self)
        return "\n".join(line.rstrip() for line in text.get().splitlines())


def explain(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say what a step was captured as.

    Args:
        step: a compiled step; or any function, which is then captured for the purpose and not run.
        args, kwargs: a call to explain. A compiled step that was captured in that form is not captured again;
            without arguments, the form that ran last is explained.

    Raises:
        NotCapturedYet: a compiled step never ran and no arguments were given.
    """
    compiled = step if isinstance(step, CompiledStep) else CompiledStep(step, dynamic=None, verify=False, fallback=None)
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
    )


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


def _table(title: str, columns: list[str], rows: Iterable[tuple[Any, ...]]) -> Iterator[RenderableType]:
    """A title and aligned columns, numbers to the right; nothing where there are no rows."""
    rows = list(rows)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for at, column in enumerate(columns):
        number = isinstance(rows[0][at], int) or column == "bytes"
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    yield Text(f"\n{title}", style="bold cyan")
    yield table
