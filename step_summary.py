"""What the ``repr`` of a compiled step says: its captured forms, and what each runs."""

from __future__ import annotations

import functools
import html
import inspect
from collections.abc import Callable, Iterator, Sequence

from weft.branching_form import BranchingForm
from weft.capture.graph import StepGraph
from weft.capture.sizes_in_bytes import format_bytes
from weft.capture.user_code import shown_file
from weft.errors import GroupGone
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.compiler import compilation_of, schedule_of
from weft.program_form import ProgramForm
from weft.shown_values import counted


def defined_at(step: Callable[..., object]) -> str:
    """``train.py:12`` of a function, a method or an object with a ``__call__`` of Python; "" where none is known."""
    inner = inspect.unwrap(step)
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__code__"):
        inner = vars(type(inner)).get("__call__")
    code = getattr(inner, "__code__", None)
    return f"{shown_file(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""


def rows(
    step: Callable[..., object], mode: str, captures: Sequence[str], forms: Sequence[ProgramForm | BranchingForm]
) -> Iterator[tuple[str, str]]:
    """Names and values: where the step is, how often it was captured, and for the form that ran last what runs."""
    yield "defined at", defined_at(step) or "unknown"
    yield "mode", mode
    yield (
        "captures",
        f"{len(captures)}, {counted(len(forms), 'form')} kept" if captures else "none yet: it was not called",
    )
    if not forms:
        return
    graph = forms[0].captured.graph
    yield "operations", str(sum(node.op == "call_function" for node in graph.graph.nodes))
    if isinstance(forms[0], BranchingForm):
        yield "branches on values", "one program per path"
        return
    compilation = compilation_of(forms[0].program)
    yield "kernels", "ATen's" if compilation is None else _kernels(compilation.graph)
    schedule = schedule_of(forms[0].program)
    collectives = len(list(graph.collectives()))
    if schedule is None:
        yield "collectives", str(collectives)
        return
    try:
        predicted = schedule.prediction
    except GroupGone:  # a step is shown all the same
        yield "collectives", str(collectives)
        yield "peak memory", "not predicted: the process groups are gone"
        return
    yield "collectives", f"{collectives} in {counted(len(predicted.reports), 'bucket')}"
    yield "peak memory", f"{format_bytes(predicted.simulation.peak)} predicted"


def as_text(name: str, found: Sequence[tuple[str, str]]) -> str:
    """One line."""
    return f"<weft.CompiledStep {name}: {', '.join(f'{key} {value}' for key, value in found)}>"


def as_html(name: str, found: Sequence[tuple[str, str]]) -> str:
    """A table."""
    style = "style='text-align:left'"
    cells = (f"<tr><th {style}>{html.escape(k)}</th><td {style}>{html.escape(v)}</td></tr>" for k, v in found)
    return f"<table><caption>{html.escape(name)}</caption>{''.join(cells)}</table>"


def _kernels(graph: StepGraph) -> str:
    calls = [node.target for node in graph.graph.nodes if isinstance(node.target, KernelCall)]
    return f"{len({call.generated.source for call in calls})} generated, launched {counted(len(calls), 'time')}"
