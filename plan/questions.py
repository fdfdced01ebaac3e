"""The questions that people ask before a training run, answered from the numbers of a prediction's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.inductor.graph.collectives import ALL_GATHER, KINDS
from weft.plan.figures import gibibytes, milliseconds

_REDUCTIONS = frozenset(name for name, kind in KINDS.items() if kind.reduces)
_NOTICED = 0.1  # part of the step that exposed communication may take without a remark

HALF_BATCH, TWICE_BATCH = "half the batch", "twice the batch"
GATHERED_ONCE = "parameters stay gathered"
GATHERED_AGAIN = "parameters are gathered again wherever it saves memory"
RECOMPUTED = "gathering or recomputing more"  # after the memory that it is to stay within


def questions(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of a question and its answer; ``data`` is :meth:`Prediction.to_dict`, with changes and scaling."""
    return list(_questions(data))


def _questions(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    changes = {change["name"]: change for change in data["changes"]}
    recomputed = next((change for name, change in changes.items() if name.endswith(RECOMPUTED)), None)
    roles = _roles_at_peak(data)
    yield "How much memory does this configuration need?", _peak(data, roles)
    yield "What does another wrapping change?", _wrapping(data, changes)
    yield "Which batch size is best?", _batch(data, changes)
    yield "How long can a sequence be?", _length(data, changes)
    yield "What does the number of GPUs change?", _world(data)
    yield "Would the optimizer on the CPU help?", _offload(data, roles)
    yield "Which activations should be recomputed?", _recompute(data, recomputed)
    yield "What does the dtype of the reduction cost?", _reduction(data, roles)
    yield "What does mixed precision cost or save?", _precision(data)
    yield "Is it time to shard within groups of nodes (HSDP)?", _hybrid(data)
    yield "Is it worth to reshard over a smaller mesh?", _smaller_mesh(data)
    yield "Can parameters stay gathered without running out of memory?", _kept(data, changes)
    yield "Which module holds most activations?", _holders(data, "activations", "activations that live at the peak")
    yield "Who holds unsharded parameters at the peak?", _unsharded(data, roles)


def _roles_at_peak(data: Mapping[str, Any]) -> dict[str, int]:
    timeline = data["memory_timeline"]
    if not timeline["total"]:
        return {}
    at = timeline["total"].index(max(timeline["total"]))
    return {role: sizes[at] for role, sizes in timeline["roles"].items()}


def _asked(data: Mapping[str, Any], otherwise: str, *, gathers: bool = True) -> str:
    """The answer to a question that a change answers, if the step was not planned again with it."""
    again = any(change["how"] == "planned again" for change in data["changes"])
    concerned = any(each["kind"] == ALL_GATHER.kind.name for each in data["collectives"]) or not gathers
    return (
        otherwise if again or not concerned else "Plan the step with --what-if yes, which plans it again with changes."
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _peak(data: Mapping[str, Any], roles: Mapping[str, int]) -> str:
    largest = sorted(roles.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{gibibytes(size)} {role}" for role, size in largest if size)
    margin = data["limit_bytes"] - data["peak_bytes"]
    room = f"{gibibytes(margin)} are left" if margin >= 0 else f"{gibibytes(-margin)} are missing"
    peak, limit = gibibytes(data["peak_bytes"]), gibibytes(data["limit_bytes"])
    return f"{peak} on each GPU of {limit}; {room}. At the peak: {parts}."


def _said(data: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    """A change as a difference in time and memory."""
    if change["step_seconds"] is None:
        return "does not fit"
    relative = change["step_seconds"] / data["step_seconds"] - 1
    words = (
        "the same time" if abs(relative) < 5e-4 else f"{abs(relative):.1%} {'longer' if relative > 0 else 'shorter'}"
    )
    if change["peak_bytes"] is None:
        return f"a step takes {words}"
    more = change["peak_bytes"] - data["peak_bytes"]
    memory = "the same memory" if abs(more) < 2**20 else f"{gibibytes(abs(more))} {'more' if more > 0 else 'less'}"
    return f"a step takes {words} with {memory}"


def _wrapping(data: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    once, again = changes.get(GATHERED_ONCE), changes.get(GATHERED_AGAIN)
    if once is None or again is None:
        return _asked(data, "Nothing: no parameters are gathered.")
    return (
        "How modules are wrapped changes nothing, since collectives are grouped by predicted times. What counts is "
        f"which parameters are gathered again. If all stay gathered, {_said(data, once)}; if all that can be are "
        f"gathered again, {_said(data, again)}."
    )


def _per_sample(data: Mapping[str, Any], changes: Mapping[str, Any]) -> float | None:
    """Bytes that one more sample takes, by the step with twice or half the batch."""
    for name, factor in ((TWICE_BATCH, 2.0), (HALF_BATCH, 0.5)):
        change = changes.get(name)
        if change is not None and change["peak_bytes"] is not None and data["samples"]:
            samples = int(data["samples"] * factor) - data["samples"]
            slope = (change["peak_bytes"] - data["peak_bytes"]) / samples
            if slope > 0:
                return float(slope)
    return None


def _batch(data: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    slope = _per_sample(data, changes)
    if slope is None:
        return _asked(data, "The arguments of the step have no batch that could be changed.", gathers=False)
    most = data["samples"] + int((data["limit_bytes"] - data["peak_bytes"]) / slope)
    rates = [
        f"{change['tokens_per_second']:,.0f} tokens/s/GPU at {name}"
        for name in (HALF_BATCH, TWICE_BATCH)
        if (change := changes.get(name)) is not None and change["tokens_per_second"] is not None
    ]
    now = [] if data["tokens_per_second"] is None else [f"{data['tokens_per_second']:,.0f} tokens/s/GPU now"]
    speed = f" {'; '.join([*now, *rates])}." if rates else ""
    if most < 1:
        return f"Not even one sample fits: a sample takes {gibibytes(slope)}.{speed}"
    return f"Up to {most:,} on each GPU fit, at {gibibytes(slope)} a sample; it is {data['samples']:,} now.{speed}"


def _length(data: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    slope = _per_sample(data, changes)
    if slope is None or data["tokens"] is None or not data["samples"]:
        return _asked(data, "The arguments of the step have no tokens.", gathers=False)
    length = data["tokens"] // data["samples"]
    room = data["limit_bytes"] - data["peak_bytes"] + slope * data["samples"]
    most = int(room / (slope / length) / data["samples"])
    alone = int(room / (slope / length))
    return (
        f"About {most:,} tokens with this batch, {alone:,} with one sequence; it is {length:,} now. "
        "Memory is taken to grow in proportion, as with flash attention."
    )


def _world(data: Mapping[str, Any]) -> str:
    points = data["scaling"]
    if len(points) < 2:
        return "The step does not communicate, or the cluster has no network: each GPU does the same at any number."
    best = min(point["step_seconds"] for point in points)
    first, last = points[0], points[-1]
    late = next((point for point in points if point["exposed_share"] > _NOTICED), None)
    kept = f"{best / last['step_seconds']:.0%} of the best throughput a GPU at {last['world_size']:,} GPUs"
    where = (
        f"Exposed communication is above {_NOTICED:.0%} from {late['world_size']:,} GPUs on."
        if late is not None
        else f"Exposed communication stays below {_NOTICED:.0%}."
    )
    return f"From {first['world_size']:,} to {last['world_size']:,} GPUs: {kept}. {where}"


def _offload(data: Mapping[str, Any], roles: Mapping[str, int]) -> str:
    state = roles.get("optimizer state", 0)
    if not state:
        return "The optimizer has no state on the GPU."
    share = state / data["peak_bytes"]
    moved = data["input_bytes"].get("parameter", 0)
    need = "" if data["fits"] else " It would fit then." if data["peak_bytes"] - state <= data["limit_bytes"] else ""
    return (
        f"It would free {gibibytes(state)}, {share:.0%} of the peak, and move {gibibytes(moved)} of gradients and "
        f"as much of parameters between host and GPU in each step.{need}"
    )


def _recompute(data: Mapping[str, Any], change: Mapping[str, Any] | None) -> str:
    if change is None:
        return _asked(data, "There is nothing to recompute.", gathers=False)
    if change["step_seconds"] is None:
        return f"Recomputation cannot bring the step to {change['name'].removeprefix('within ').partition(',')[0]}."
    return (
        f"weft chooses them for a memory limit. {_sentence(change['name']).partition(',')[0]}, "
        f"{_said(data, change)}; "
        "give memory_limit, and nothing needs to be chosen by hand."
    )


def _reduction(data: Mapping[str, Any], roles: Mapping[str, int]) -> str:
    sent: dict[str, int] = {}
    for each in data["collectives"]:
        if each["kind"] in _REDUCTIONS:
            sent[each["dtype"]] = sent.get(each["dtype"], 0) + each["bytes"]
    if not sent:
        return "Nothing is reduced."
    words = ", ".join(f"{gibibytes(size)} in {dtype}" for dtype, size in sent.items())
    seconds = sum(e["seconds"] for e in data["collectives"] if e["kind"] in _REDUCTIONS)
    return (
        f"Gradients travel as {words}, {milliseconds(seconds)} ms alone, and hold "
        f"{gibibytes(roles.get('gradients', 0))} at the peak. Twice the bytes an element would double both."
    )


def _precision(data: Mapping[str, Any]) -> str:
    sent: dict[str, int] = {}
    for each in data["collectives"]:
        if each["kind"] == ALL_GATHER.kind.name:
            sent[each["dtype"]] = sent.get(each["dtype"], 0) + each["bytes"]
    gathered = ", ".join(f"{gibibytes(size)} in {dtype}" for dtype, size in sent.items())
    state = data["input_bytes"].get("parameter", 0) + data["input_bytes"].get("optimizer state", 0)
    held = f"{gibibytes(state)} of parameters and optimizer state stay on each GPU in their own dtypes"
    return f"Parameters are gathered as {gathered}; {held}." if gathered else f"{_sentence(held)}."


def _across_nodes(data: Mapping[str, Any]) -> float:
    """Exposed seconds of collectives that leave the node."""
    node = data["gpus_per_node"]
    leave = (each for each in data["collectives"] if each["ranks"] > node or each["link"] == "network")
    return float(sum(each["exposed"] for each in leave))


def _hybrid(data: Mapping[str, Any]) -> str:
    if data["world_size"] <= data["gpus_per_node"]:
        return "No: all GPUs are in one node."
    state = data["input_bytes"].get("parameter", 0) + data["input_bytes"].get("optimizer state", 0)
    nodes = data["world_size"] / data["gpus_per_node"]
    more = state * (nodes - 1)
    exposed = _across_nodes(data)
    gain = f"{exposed / data['step_seconds']:.1%} of the step waits for collectives between nodes"
    room = data["limit_bytes"] - data["peak_bytes"]
    if more > room:
        return (
            f"Shards within one node and copies between nodes would hold {gibibytes(more)} more on each GPU, and "
            f"{gibibytes(max(room, 0))} are free: it does not fit. {_sentence(gain)}."
        )
    verdict = "Yes, worth a plan" if exposed > _NOTICED * data["step_seconds"] else "Not needed"
    return (
        f"{verdict}: {gain}. Shards within one node and copies between nodes would hold {gibibytes(more)} more on each "
        "GPU, which fits."
    )


def _smaller_mesh(data: Mapping[str, Any]) -> str:
    again = [each for each in data["collectives"] if "gathered again" in each["why"]]
    if not again:
        return "No: no parameter is gathered a second time."
    exposed = sum(each["exposed"] for each in again)
    size = sum(each["bytes"] for each in again)
    ranks = min(data["gpus_per_node"], data["world_size"])
    kept = size / ranks
    return (
        f"{gibibytes(size)} are gathered again in backward, with {milliseconds(exposed)} ms exposed. Over one node "
        f"(reshard_after_forward={ranks}) they would hold {gibibytes(kept)} more."
    )


def _kept(data: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    change = changes.get(GATHERED_ONCE)
    if change is None or change["peak_bytes"] is None:
        return _asked(data, "No parameters are gathered.")
    fits = change["peak_bytes"] <= data["limit_bytes"]
    return f"{'Yes' if fits else 'No'}: the peak is then {gibibytes(change['peak_bytes'])}, and {_said(data, change)}."


def _holders(data: Mapping[str, Any], role: str, what: str) -> str:
    held = sorted(data["peak_by_module"].get(role, {}).items(), key=lambda item: -item[1])
    total = sum(size for _, size in held)
    if not total:
        return f"There are no {what}."
    first = ", ".join(f"{module or 'the step itself'} {gibibytes(size)}" for module, size in held[:3])
    more = f"; {len(held) - 3} more modules hold the rest" if len(held) > 3 else ""
    return f"Of {gibibytes(total)} of {what}: {first}{more}."


def _unsharded(data: Mapping[str, Any], roles: Mapping[str, int]) -> str:
    arena = roles.get("communication buffers", 0)
    inside = f" {gibibytes(arena)} of symmetric memory hold gathered parameters and gradients in turn." if arena else ""
    if not data["peak_by_module"].get("gathered parameters"):
        return f"Nobody outside the buffers of transports.{inside}" if arena else "Nobody."
    return _holders(data, "gathered parameters", "gathered parameters") + inside
