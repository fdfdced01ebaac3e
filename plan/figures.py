"""Sentences and sums that the page and the tables share, from the numbers of a prediction's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 2**30


def milliseconds(seconds: float) -> str:
    """``123.4`` of seconds; more digits below a millisecond."""
    scaled = seconds * 1e3
    return f"{scaled:,.1f}" if scaled >= 1 else f"{scaled:.3f}"


def gibibytes(size: float) -> str:
    """``12.3 GiB``; smaller units below."""
    if size < 2**20:
        return f"{size / 2**10:,.1f} KiB" if size >= 2**10 else f"{size:,.0f} B"
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"


def verdict(data: Mapping[str, Any]) -> str:
    """The prediction in one line."""
    hosts = -(-data["world_size"] // data["gpus_per_node"])
    nodes = f", {hosts} nodes" if hosts > 1 else ""
    fits = "fits" if data["fits"] else "does not fit"
    words = [f"{fits}: {gibibytes(data['peak_bytes'])} of {gibibytes(data['limit_bytes'])}"]
    words.append(f"{milliseconds(data['step_seconds'])} ms a step{_interval(data)}")
    if data["tokens_per_second"] is not None:
        words.append(f"{data['tokens_per_second']:,.0f} tokens/s/GPU")
    if data["mfu"] is not None:
        words.append(f"MFU {data['mfu']:.1%}")
    words.append(f"exposed communication {data['exposed_share']:.1%}")
    return f"{data['name']} on {data['world_size']:,} {data['gpu']}{nodes}: {', '.join(words)}"


def _interval(data: Mapping[str, Any]) -> str:
    if data["interval"] is None:
        return ""
    low, high = data["interval"]
    return f" (measured steps suggest {milliseconds(low)} to {milliseconds(high)})"


def verdict_details(data: Mapping[str, Any]) -> list[str]:
    """What the run costs, where that is known."""
    if data["days"] is None:
        return []
    tokens = data["budget_tokens"]
    scaled, unit = (tokens / 1e12, "T") if tokens >= 1e12 else (tokens / 1e9, "B")
    hours = data["days"] * 24 * data["world_size"]
    words = f"{scaled:,.3g}{unit} tokens take {data['days']:,.1f} days and {hours:,.0f} GPU-hours"
    return [words if data["cost"] is None else f"{words}, at {data['price']:g} each {data['cost']:,.0f}"]


def collectives_by_kind(data: Mapping[str, Any]) -> dict[tuple[str, str, int, str], tuple[int, int, float, float, str]]:
    """By kind, axis, ranks and transport: count, bytes, seconds alone, exposed seconds, and what hides most of them."""
    found: dict[tuple[str, str, int, str], list[Mapping[str, Any]]] = {}
    for each in data["collectives"]:
        found.setdefault((each["kind"], each["axis"], each["ranks"], each["transport"]), []).append(each)
    return {
        key: (
            len(same),
            sum(each["bytes"] for each in same),
            sum(each["seconds"] for each in same),
            sum(each["exposed"] for each in same),
            _hiding(same),
        )
        for key, same in sorted(found.items())
    }


def _hiding(collectives: list[Mapping[str, Any]]) -> str:
    """The modules whose computation hides most time of these collectives."""
    seconds: dict[str, float] = {}
    for each in collectives:
        for module in each["hidden_by"][:1]:
            seconds[module] = seconds.get(module, 0.0) + each["took"] - each["exposed"]
    most = sorted(seconds, key=lambda module: -seconds[module])
    return ", ".join(most[:2]) + (f" and {len(most) - 2} more" if len(most) > 2 else "")
