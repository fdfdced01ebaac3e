"""A prediction as rich tables, from the numbers of its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weft.capture.sizes_in_bytes import format_bytes
from weft.plan.figures import collectives_by_kind, milliseconds, verdict, verdict_details

_LONGEST = 46  # characters of a name in a table


def overview(data: Mapping[str, Any]) -> RenderableType:
    """Everything that the page shows, as tables. ``data`` is :meth:`Prediction.to_dict`."""
    return Group(*_overview(data))


def _overview(data: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(verdict(data), style="bold green" if data["fits"] else "bold red")
    for line in verdict_details(data):
        yield Text(line)
    total = data["step_seconds"]
    rows = [
        (
            part["name"],
            milliseconds(part["seconds"]),
            f"{part['seconds'] / total:.1%}" if total else "",
            part["calls"] or "",
            milliseconds(part["least_seconds"]) if part["least_seconds"] else "",
            part["limit"],
        )
        for part in data["parts"]
        if part["seconds"] or part["least_seconds"]
    ]
    yield from _table("where the step goes", ["part", "ms", "share", "calls", "at the limit ms", "limit"], rows)
    yield from _table(
        f"memory at the peak, {format_bytes(data['peak_bytes'])} of {format_bytes(data['limit_bytes'])}",
        ["role", "bytes", "share"],
        _roles_at_peak(data),
    )
    rows = [
        (format_bytes(t["bytes"]), t["role"], t["name"], _short_module(t["module"]), _short(t["line"]))
        for t in data["top_tensors"]
    ]
    yield from _table("largest tensors at the peak", ["bytes", "role", "tensor", "module", "line"], rows)
    rows = [
        (kind, axis, ranks, transport, count, format_bytes(size), milliseconds(alone), milliseconds(exposed), hidden)
        for (kind, axis, ranks, transport), (count, size, alone, exposed, hidden) in collectives_by_kind(data).items()
    ]
    columns = ["collective", "axis", "ranks", "transport", "count", "bytes", "alone ms", "exposed ms", "hidden by"]
    yield from _table("communication", columns, rows)
    yield from _table("what would change it", ["change", "step", "peak", "tokens/s/GPU", "how"], list(changes(data)))
    rows = [
        (point["world_size"], milliseconds(point["step_seconds"]), _tokens(point), f"{point['exposed_share']:.1%}")
        for point in data["scaling"]
    ]
    yield from _table("other numbers of GPUs", ["GPUs", "step ms", "tokens/s/GPU", "exposed"], rows)
    rows = [(call["operation"], call["count"], milliseconds(call["seconds"])) for call in data["unpriced"][:8]]
    yield from _table("operations without a rule, priced by their bytes", ["operation", "count", "ms"], rows)
    if data["assumptions"]:
        yield Text("\nassumptions", style="bold cyan")
        for line in data["assumptions"]:
            yield Text(f"- {line}")
    for line in data["warnings"]:
        yield Text(f"\nwarning: {line}", style="yellow")


def changes(data: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows of what would change the step: differences in time and memory."""
    for change in data["changes"]:
        if change["step_seconds"] is None:
            yield change["name"], "does not fit", "", "", change["how"]
            continue
        relative = change["step_seconds"] / data["step_seconds"] - 1
        peak = ""
        if change["peak_bytes"] is not None:
            peak = f"{(change['peak_bytes'] - data['peak_bytes']) / 2**30:+.2f} GiB"
        seconds = f"{milliseconds(change['step_seconds'])} ms ({relative:+.1%})"
        yield change["name"], seconds, peak, _tokens(change), change["how"]


def _tokens(of: Mapping[str, Any]) -> str:
    return "" if of["tokens_per_second"] is None else f"{of['tokens_per_second']:,.0f}"


def _roles_at_peak(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    timeline = data["memory_timeline"]
    at = timeline["total"].index(max(timeline["total"]))
    sizes = {role: sizes[at] for role, sizes in timeline["roles"].items() if sizes[at]}
    return [(role, format_bytes(size), f"{size / data['peak_bytes']:.1%}") for role, size in sizes.items()]


def _short(line: str) -> str:
    """``train.py:12 in step`` of a path."""
    return line.rpartition("/")[2]


def _short_module(module: str) -> str:
    return module if len(module) <= _LONGEST else f"...{module[-_LONGEST:]}"


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Iterator[RenderableType]:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    numbers = {"ms", "bytes", "share", "calls", "count", "GPUs", "ranks", "exposed"}
    for column in columns:
        number = column in numbers or column.endswith((" ms", "/GPU"))
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    yield Text(f"\n{title}", style="bold cyan")
    yield table
