"""The charts of a plan's page, as inline SVG, from the numbers of its JSON.

Colours are those of Okabe and Ito, which people with colour-blindness can tell apart; every colour also has a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from weft.plan.figures import GIB, gibibytes, milliseconds

COLOURS_OF_PARTS = {
    "GEMM": "#0072b2",
    "attention": "#56b4e9",
    "memory-bound kernels": "#009e73",
    "optimizer": "#b5a642",
    "slowed by communication": "#e69f00",
    "exposed": "#d55e00",
    "wait": "#d55e00",
    "idle": "#bdbdbd",
    "gather": "#cc79a7",
    "reduce": "#7b3f98",
    "exchange": "#8c564b",
}
COLOURS_OF_ROLES = {
    "parameters": "#0072b2",
    "optimizer state": "#56b4e9",
    "batch and buffers": "#999999",
    "communication buffers": "#b5a642",
    "gathered parameters": "#cc79a7",
    "gradients": "#e69f00",
    "activations": "#009e73",
    "temporaries": "#d9d9d9",
}
_WIDTH, LEFT, RIGHT = 1000, 62, 14


def colour_of(kind: str) -> str:
    """The colour of a part of the step or of a kind of slice."""
    return COLOURS_OF_PARTS.get(kind.split(" ", 1)[0] if kind.startswith("exposed") else kind, "#777777")


def bar_of_parts(data: Mapping[str, Any]) -> Markup:
    """The step as one bar: a piece for each part."""
    height, x = 46, 0.0
    pieces = []
    for part in data["parts"]:
        width = _WIDTH * part["seconds"] / data["step_seconds"] if data["step_seconds"] else 0.0
        if width < 0.05:
            continue
        words = f"{part['name']}: {milliseconds(part['seconds'])} ms, {part['seconds'] / data['step_seconds']:.1%}"
        pieces.append(_rectangle(x, 0, width, height, colour_of(part["name"]), words))
        if width > 52:
            share = f"{part['seconds'] / data['step_seconds']:.0%}"
            pieces.append(_text(x + width / 2, height / 2 + 5, share, anchor="middle", kind="inside"))
        x += width
    return _svg(_WIDTH, height, "Parts of the step", pieces)


def memory_chart(data: Mapping[str, Any]) -> Markup:
    """Memory over the step, stacked by role, with the peak and the limit marked."""
    timeline, height, top, bottom = data["memory_timeline"], 300, 22, 26
    times, total = timeline["seconds"], timeline["total"]
    if not times:
        return Markup("")
    limit, peak, end = data["limit_bytes"], data["peak_bytes"], data["step_seconds"] or 1.0
    # A limit far above the peak would flatten the curve: it is then said in words.
    shown_limit = limit <= 1.8 * peak
    most = max(peak, limit if shown_limit else 0) * 1.06
    x = lambda seconds: LEFT + (_WIDTH - LEFT - RIGHT) * seconds / end
    y = lambda size: top + (height - top - bottom) * (1 - size / most)
    pieces = list(_grid(most / GIB, y, unit=GIB))
    below = [0] * len(times)
    for role, sizes in timeline["roles"].items():
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        pieces.append(
            _area(
                [x(t) for t in times] + [x(end)],
                [*map(y, above), y(above[-1])],
                [*map(y, below), y(below[-1])],
                COLOURS_OF_ROLES[role],
                role,
            )
        )
        below = above
    at = total.index(max(total))
    place, words = x(times[at]), f"peak {gibibytes(peak)}"
    anchor = "end" if place > _WIDTH * 0.8 else "start"
    pieces.append(
        Markup('<line x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2}" class="mark"/>').format(
            place, y(peak), height - bottom
        )
    )
    pieces.append(Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4" class="dot"/>').format(place, y(peak)))
    pieces.append(_text(place + (-8 if anchor == "end" else 8), y(peak) - 7, words, anchor=anchor, kind="strong"))
    if shown_limit:
        pieces.append(
            Markup('<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}" class="limit"/>').format(
                LEFT, _WIDTH - RIGHT, y(limit), y(limit)
            )
        )
        pieces.append(_text(LEFT + 6, y(limit) - 6, f"limit {gibibytes(limit)}", kind="strong"))
    pieces += _time_axis(end, x, height - 8)
    pieces.append(
        Markup('<line id="cursor" x1="0" x2="0" y1="{}" y2="{}" class="cursor" visibility="hidden"/>').format(
            top, height - bottom
        )
    )
    return _svg(_WIDTH, height, "Memory over the step by role", pieces, name="memory")


def timeline_chart(data: Mapping[str, Any]) -> Markup:
    """The step by lane. It has no text, so that it can be stretched."""
    lane_height, gap, end = 34, 8, data["step_seconds"] or 1.0
    pieces = []
    for number, lane in enumerate(data["timeline"]):
        top = number * (lane_height + gap)
        pieces.append(
            Markup('<rect x="0" y="{}" width="{}" height="{}" class="lane"/>').format(top, _WIDTH, lane_height)
        )
        for each in lane["slices"]:
            stage = f", {each['stage']}" if each["stage"] else ""
            words = f"{each['name']}: {each['kind']}{stage}, {milliseconds(each['end'] - each['start'])} ms"
            start, width = _WIDTH * each["start"] / end, _WIDTH * (each["end"] - each["start"]) / end
            pieces.append(_rectangle(start, top, max(width, 0.05), lane_height, colour_of(each["kind"]), words))
    height = max(len(data["timeline"]), 1) * (lane_height + gap)
    return _svg(_WIDTH, height, "Timeline of the step", pieces, name="timeline", stretch=True)


def scaling_chart(data: Mapping[str, Any]) -> Markup:
    """Time of a step relative to the smallest number of GPUs, and exposed communication, over the number of GPUs."""
    points, height, top, bottom = data["scaling"], 250, 24, 40
    if len(points) < 2:
        return Markup("")
    low, high = math.log2(points[0]["world_size"]), math.log2(points[-1]["world_size"])
    x = lambda world: LEFT + (_WIDTH - LEFT - RIGHT - 60) * (math.log2(world) - low) / ((high - low) or 1.0)
    y = lambda share: top + (height - top - bottom) * (1 - share)
    pieces = [
        Markup('<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}" class="grid"/>').format(LEFT, _WIDTH - RIGHT, y(s), y(s))
        for s in (0, 0.25, 0.5, 0.75, 1.0)
    ]
    pieces += [_text(LEFT - 8, y(share) + 4, f"{share:.0%}", anchor="end") for share in (0, 0.5, 1.0)]
    best = min(point["step_seconds"] for point in points)
    lines = (
        ("throughput per GPU, of the best", "#0072b2", [best / point["step_seconds"] for point in points]),
        ("exposed communication, of the step", "#d55e00", [point["exposed_share"] for point in points]),
    )
    for label, colour, shares in lines:
        places = " ".join(f"{x(p['world_size']):.1f},{y(s):.1f}" for p, s in zip(points, shares, strict=True))
        pieces.append(
            Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="2.5"/>').format(places, colour)
        )
        for point, share in zip(points, shares, strict=True):
            words = (
                f"{point['world_size']:,} GPUs: {label} {share:.1%}, {milliseconds(point['step_seconds'])} ms a step"
            )
            radius = 6 if point["world_size"] == data["world_size"] else 3.5
            pieces.append(
                Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" fill="{}"><title>{}</title></circle>').format(
                    x(point["world_size"]), y(share), radius, colour, words
                )
            )
        up = -16 if shares[0] < 0.9 else 26  # beside its line
        pieces.append(_text(x(points[0]["world_size"]) + 6, y(shares[0]) + up, label, kind="strong", fill=colour))
        pieces.append(
            _text(x(points[-1]["world_size"]) + 10, y(shares[-1]) + 4, f"{shares[-1]:.0%}", kind="strong", fill=colour)
        )
    sizes = [point["world_size"] for point in points]
    kept = sizes if len(sizes) <= 13 else sizes[::2]
    pieces += [_text(x(size), height - bottom + 18, f"{size:,}", anchor="middle") for size in kept]
    pieces.append(_text((_WIDTH + LEFT) / 2, height - 4, "GPUs", anchor="middle"))
    return _svg(_WIDTH, height, "Throughput and exposed communication over the number of GPUs", pieces)


def legend(colours: Mapping[str, str], names: Sequence[str]) -> Markup:
    """The names in use, each beside its colour."""
    item = Markup('<span class="key"><i style="background:{}"></i>{}</span>')
    return Markup("").join(item.format(colours[name], name) for name in names)


def share_bar(share: float, colour: str) -> Markup:
    """A small bar for a cell of a table; ``share`` from 0 to 1."""
    return Markup('<span class="bar"><i style="width:{:.1f}%;background:{}"></i></span>').format(
        100 * min(share, 1.0), colour
    )


# ---- pieces


def _svg(
    width: float, height: float, title: str, pieces: Sequence[Markup], *, name: str = "", stretch: bool = False
) -> Markup:
    attributes = Markup(' preserveAspectRatio="none"') if stretch else Markup("")
    identity = Markup(' id="{}"').format(name) if name else Markup("")
    return Markup('<svg{} viewBox="0 0 {} {}" role="img" aria-label="{}"{}>{}</svg>').format(
        identity, width, height, title, attributes, Markup("").join(pieces)
    )


def _rectangle(x: float, y: float, width: float, height: float, colour: str, words: str) -> Markup:
    return Markup('<rect x="{:.2f}" y="{}" width="{:.2f}" height="{}" fill="{}"><title>{}</title></rect>').format(
        x, y, width, height, colour, words
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label", fill: str = "") -> Markup:
    colour = Markup(' style="fill:{}"').format(fill) if fill else Markup("")
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}"{}>{}</text>').format(
        x, y, anchor, kind, colour, words
    )


def _area(xs: Sequence[float], above: Sequence[float], below: Sequence[float], colour: str, words: str) -> Markup:
    """The area between two step functions: values hold until the next point."""
    path = [f"M{xs[0]:.1f},{above[0]:.1f}"]
    for at in range(1, len(xs)):
        path.append(f"H{xs[at]:.1f}V{above[at]:.1f}")
    path.append(f"V{below[-1]:.1f}")
    for at in range(len(xs) - 1, 0, -1):
        path.append(f"V{below[at - 1]:.1f}H{xs[at - 1]:.1f}")
    return Markup('<path d="{}Z" fill="{}"><title>{}</title></path>').format(escape("".join(path)), colour, words)


def _grid(most: float, y: Any, unit: float) -> Iterator[Markup]:
    """Horizontal lines at round numbers of GiB, or of MiB where that is little."""
    scale, label = (1.0, "GiB") if most >= 2 else (1024.0, "MiB")
    step = _round_step(most * scale / 5)
    for number in range(int(most * scale / step) + 1):
        at = y(number * step / scale * unit)
        yield Markup('<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}" class="grid"/>').format(
            LEFT, _WIDTH - RIGHT, at, at
        )
        yield _text(LEFT - 8, at + 4, f"{number * step:g}", anchor="end")
    yield _text(4, 14, label)


def _time_axis(end: float, x: Any, y: float) -> Iterator[Markup]:
    step = _round_step(end * 1e3 / 6)
    for number in range(int(end * 1e3 / step) + 1):
        yield _text(x(number * step / 1e3), y, f"{number * step:g}{' ms' if not number else ''}", anchor="middle")


def _round_step(wanted: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that is at least ``wanted``."""
    power = 10.0 ** math.floor(math.log10(wanted)) if wanted > 0 else 1.0
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= wanted * (1 - 1e-9))
