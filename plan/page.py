"""The page of a plan: one HTML file with its charts, tables and answers, which needs no network."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from weft.plan import charts
from weft.plan.figures import collectives_by_kind, gibibytes, milliseconds, verdict_details
from weft.plan.questions import questions

_MOST_EXPOSED = 8  # collectives that the page lists by name
_MOST_UNPRICED = 12


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("weft.plan"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html")


def render(data: Mapping[str, Any]) -> str:
    """The text of the page. ``data`` is :meth:`weft.plan.prediction.Prediction.to_dict`, or a JSON file's."""
    timeline = data["memory_timeline"]
    points = {**timeline, "end": data["step_seconds"] or 1.0}
    used = {slice_["kind"] for lane in data["timeline"] for slice_ in lane["slices"]}
    kinds = [kind for kind in charts.COLOURS_OF_PARTS if kind in used]
    return _template().render(
        d=data,
        nodes=-(-data["world_size"] // data["gpus_per_node"]),
        reason=_reason(data),
        tiles=_tiles(data),
        parts_bar=charts.bar_of_parts(data),
        parts=_parts(data),
        memory_words=_memory_words(data),
        memory_legend=charts.legend(charts.COLOURS_OF_ROLES, list(timeline["roles"])[::-1]),
        memory_chart=charts.memory_chart(data),
        memory_points=_script(points),
        chart_left=charts.LEFT,
        chart_right=charts.RIGHT,
        tensors=[_tensor(each) for each in data["top_tensors"]],
        timeline_legend=charts.legend(charts.COLOURS_OF_PARTS, kinds),
        timeline_chart=charts.timeline_chart(data),
        communication=_communication(data),
        exposed=_exposed(data),
        changes=[_change(data, change) for change in data["changes"]],
        scaling_chart=charts.scaling_chart(data),
        questions=questions(data),
        unpriced=[{**row, "ms": milliseconds(row["seconds"])} for row in data["unpriced"][:_MOST_UNPRICED]],
        unpriced_share=_share(data, sum(row["seconds"] for row in data["unpriced"])),
    )


def _script(value: Any) -> Markup:
    """A value for the page's script: no text in it can end the script."""
    return Markup(json.dumps(value).replace("<", "\\u003c"))


def _share(data: Mapping[str, Any], seconds: float) -> str:
    return f"{seconds / data['step_seconds']:.1%}" if data["step_seconds"] else ""


def _reason(data: Mapping[str, Any]) -> str:
    margin = data["limit_bytes"] - data["peak_bytes"]
    room = f"{gibibytes(abs(margin))} {'to spare' if margin >= 0 else 'too much'}"
    words = [f"{gibibytes(data['peak_bytes'])} of {gibibytes(data['limit_bytes'])} on each GPU, {room}."]
    largest = max(data["parts"], key=lambda part: part["seconds"], default=None)
    if largest is not None and data["step_seconds"]:
        words.append(f"Most of the step is {largest['name']}, {_share(data, largest['seconds'])}.")
    return " ".join([*words, *(f"{line}." for line in verdict_details(data))])


def _tiles(data: Mapping[str, Any]) -> list[tuple[str, str, Markup | None]]:
    interval = "no measured interval for this cluster"
    if data["interval"] is not None:
        low, high = data["interval"]
        interval = f"a step; measured steps suggest {milliseconds(low)} to {milliseconds(high)}"
    tiles: list[tuple[str, str, Markup | None]] = [(f"{milliseconds(data['step_seconds'])} ms", interval, None)]
    if data["tokens_per_second"] is not None:
        total = data["tokens_per_second"] * data["world_size"]
        tiles.append((f"{data['tokens_per_second']:,.0f}", f"tokens/s/GPU, {_short(total)} tokens/s in all", None))
    if data["mfu"] is not None:
        tiles.append((f"{data['mfu']:.1%}", "MFU, of the data sheet's bfloat16 peak", None))
    share = data["peak_bytes"] / data["limit_bytes"]
    colour = "#00674a" if data["fits"] else "#a63d00"
    tiles.append((gibibytes(data["peak_bytes"]), f"peak, {share:.0%} of the limit ", charts.share_bar(share, colour)))
    axes = ", ".join(f"{axis} {milliseconds(seconds)} ms" for axis, seconds in data["exposed_seconds"].items())
    tiles.append((f"{data['exposed_share']:.1%}", f"exposed communication{f': {axes}' if axes else ''}", None))
    if data["cost"] is not None:
        tiles.append(
            (f"{data['cost']:,.0f}", f"for {_short(data['budget_tokens'])} tokens, {data['days']:,.1f} days", None)
        )
    elif data["days"] is not None:
        tiles.append((f"{data['days']:,.1f} days", f"for {_short(data['budget_tokens'])} tokens", None))
    return tiles


def _short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _parts(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for part in data["parts"]:
        if not part["seconds"] and not part["least_seconds"]:
            continue
        exposed = part["name"].startswith("exposed")
        colour = charts.colour_of(part["name"])
        bar: Markup | str = ""
        if part["least_seconds"] and not exposed:
            of_limit = part["least_seconds"] / part["seconds"] if part["seconds"] else 0.0
            bar = Markup("{} {}").format(charts.share_bar(of_limit, colour), f"{of_limit:.0%}")
        elif part["least_seconds"]:
            hidden = max(1 - part["seconds"] / part["least_seconds"], 0.0)
            bar = Markup("{} {}").format(charts.share_bar(hidden, "#009e73"), f"{hidden:.0%} hidden")
        found.append(
            {
                "name": part["name"],
                "colour": colour,
                "ms": milliseconds(part["seconds"]),
                "share": _share(data, part["seconds"]),
                "calls": f"{part['calls']:,}" if part["calls"] else "",
                "least": milliseconds(part["least_seconds"]) if part["least_seconds"] else "",
                "bar": bar,
                "limit": part["limit"],
            }
        )
    return found


def _memory_words(data: Mapping[str, Any]) -> str:
    limit, peak = data["limit_bytes"], data["peak_bytes"]
    if limit > 1.8 * peak:
        return f"The limit, {gibibytes(limit)}, lies far above this chart."
    return "The dashed line is the limit."


def _tensor(each: Mapping[str, Any]) -> dict[str, str]:
    shape = f"{each['dtype']} {' x '.join(map(str, each['shape']))}" if each["shape"] else each["dtype"]
    return {
        "size": gibibytes(each["bytes"]),
        "role": each["role"],
        "colour": charts.COLOURS_OF_ROLES[each["role"]],
        "name": each["name"],
        "shape": shape,
        "module": each["module"],
        "line": each["line"].rpartition("/")[2],
        "full_line": each["line"],
        "held": milliseconds(each["seconds"]),
    }


def _communication(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind.replace("_", "-"),
            "axis": axis,
            "ranks": ranks,
            "transport": transport,
            "count": count,
            "bytes": gibibytes(size),
            "alone": milliseconds(alone),
            "exposed": milliseconds(exposed),
            "bar": Markup("{} {}").format(
                charts.share_bar(hidden := max(1 - exposed / alone, 0.0) if alone else 0.0, "#009e73"), f"{hidden:.0%}"
            ),
            "hidden_by": hiding,
        }
        for (kind, axis, ranks, transport), (count, size, alone, exposed, hiding) in collectives_by_kind(data).items()
    ]


def _exposed(data: Mapping[str, Any]) -> list[dict[str, str]]:
    most = sorted((each for each in data["collectives"] if each["exposed"]), key=lambda each: -each["exposed"])
    return [
        {
            "exposed": milliseconds(each["exposed"]),
            "kind": each["kind"].replace("_", "-"),
            "axis": each["axis"],
            "members": each["members"][0] + _more(len(each["members"]) - 1),
            "bytes": gibibytes(each["bytes"]),
            "start": milliseconds(each["start"]),
            "link": each["link"],
            "why": each["why"],
        }
        for each in most[:_MOST_EXPOSED]
    ]


def _more(count: int) -> str:
    return f" and {count} more" if count else ""


def _change(data: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    if change["step_seconds"] is None:
        return {"name": change["name"], "how": change["how"], "problem": change["problem"] or "nothing fits"}
    relative = change["step_seconds"] / data["step_seconds"] - 1
    batch = change["name"].endswith("batch")  # a longer step is no loss there
    more = None if change["peak_bytes"] is None else change["peak_bytes"] - data["peak_bytes"]
    return {
        "name": change["name"],
        "how": change["how"],
        "problem": "",
        "ms": milliseconds(change["step_seconds"]),
        "time": f"{relative:+.1%}",
        "time_class": "" if batch or abs(relative) < 1e-3 else "worse" if relative > 0 else "better",
        "tokens": "" if change["tokens_per_second"] is None else f"{change['tokens_per_second']:,.0f}",
        "peak": "" if change["peak_bytes"] is None else gibibytes(change["peak_bytes"]),
        "peak_difference": "" if more is None else f"{more / 2**30:+.2f} GiB",
        "peak_class": "" if batch or more is None or abs(more) < 2**20 else "worse" if more > 0 else "better",
    }
