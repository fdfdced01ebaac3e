"""The predicted step as lanes of slices: computation by module, and one lane for each stream of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.inductor.cost.simulate import COMPUTE, Simulation
from weft.plan.breakdown import part_of

Node = torch.fx.Node

_MOST_SLICES = 1_500  # of one lane: a page of 70B stays below 2 MB


@dataclass(frozen=True)
class TimelineSlice:
    """A part of a lane.

    Attributes:
        start, end: seconds.
        name: the module and the stage, or the collective and its parameters.
        kind: a part of the step (:mod:`weft.plan.breakdown`), "wait", or the kind of collective.
        stage: "forward", "backward", "optimizer" or "".
    """

    start: float
    end: float
    name: str
    kind: str
    stage: str


@dataclass(frozen=True)
class Lane:
    """The slices of one stream, in order; they do not overlap."""

    name: str
    slices: list[TimelineSlice]


def block_of(module: str) -> str:
    """The repeated block that a module is in: its path up to the first number. The whole path without a number."""
    parts = module.split(".")
    numbered = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return module if numbered is None else ".".join(parts[: numbered + 1])


def lanes(simulation: Simulation, nodes: Sequence[Node]) -> list[Lane]:
    """The lanes of a step, computation first. Neighbouring computation of one block and kind is one slice."""
    found: dict[str, list[TimelineSlice]] = {COMPUTE: []}
    tasks = simulation.task_graph.tasks
    for span in simulation.spans:
        node = nodes[span.task]
        if span.stream == COMPUTE:
            stage = node.meta.get("stage", "")
            name = block_of(node.meta.get("module", "")) or "outside modules"
            name = "optimizer" if stage == "optimizer" else name
            slice_ = TimelineSlice(span.start, span.end, name, part_of(node), stage)
        else:
            members = node.meta.get("param_names", (tasks[span.task].name,))
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            kind = span.stream.rpartition(":")[2]
            slice_ = TimelineSlice(span.start, span.end, f"{members[0]}{more}", kind, node.meta.get("stage", ""))
        found.setdefault(span.stream, []).append(slice_)
    for wait in simulation.waits:
        members = nodes[wait.task].meta.get("param_names", (tasks[wait.task].name,))
        found[COMPUTE].append(TimelineSlice(wait.start, wait.end, f"wait for {members[0]}", "wait", ""))
    return [Lane(stream, _thinned(sorted(slices, key=_start), simulation.seconds)) for stream, slices in found.items()]


def _start(slice_: TimelineSlice) -> tuple[float, float]:
    return slice_.start, slice_.end


def _thinned(slices: list[TimelineSlice], seconds: float) -> list[TimelineSlice]:
    """Neighbours of one name and kind joined; then shorter and shorter ones with whatever they follow, until few are
    left."""
    slices = _joined(slices, 0.0)
    shortest = seconds / 8_000
    while len(slices) > _MOST_SLICES:
        slices = _joined(slices, shortest)
        shortest *= 1.5
    return slices


def _joined(slices: list[TimelineSlice], shortest: float) -> list[TimelineSlice]:
    result: list[TimelineSlice] = []
    for each in slices:
        before = result[-1] if result else None
        adjacent = before is not None and each.start - before.end <= shortest
        if before is not None and adjacent and (_same(before, each) or each.end - each.start < shortest):
            result[-1] = TimelineSlice(before.start, each.end, before.name, before.kind, before.stage)
        else:
            result.append(each)
    return result


def _same(one: TimelineSlice, two: TimelineSlice) -> bool:
    return (one.name, one.kind, one.stage) == (two.name, two.kind, two.stage)
