"""Which transport carries a collective: the one that costs the step least, of those that may and can.

What a collective costs is its time, which a schedule can hide, and what computation loses beside it, which it cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from weft import knobs
from weft.capture.graph import StepGraph, group_of
from weft.errors import UnknownOption
from weft.inductor.comm.cluster import Cluster
from weft.inductor.comm.collective_cost import Collective, collective_of, transfer, transports_for
from weft.inductor.comm.transports import LIBRARIES, lies_in_arena, why_not

Node = torch.fx.Node

LIBRARY = LIBRARIES[0]
# What costs are known to: the median error of predicted collectives.
_KNOWN = 0.1


def choose_transports(
    step: StepGraph,
    cluster: Cluster,
    *,
    keep_bits: bool = False,
    without: Collection[str] = (),
    apart: Collection[str] = (),
) -> StepGraph:
    """Name a transport for every collective, in ``meta["transport"]``: of those that ``knobs.transports`` lists, the
    cheapest that can carry it; else the library. Changes ``step``.

    Args:
        keep_bits: the library carries all: others add in another order.
        without: transports that are not taken.
        apart: groups whose ranks share no memory.

    Raises:
        UnknownOption: the knob lists what the cluster does not describe.
    """
    for node in step.collectives():
        able = carriers(step, cluster, node, keep_bits=keep_bits, without=without, apart=apart)
        node.meta["transport"] = cheapest(cluster, collective_of(step, node), able)
    return step


def carriers(
    step: StepGraph,
    cluster: Cluster,
    node: Node,
    *,
    keep_bits: bool = False,
    without: Collection[str] = (),
    apart: Collection[str] = (),
) -> list[str]:
    """What may carry the collective that ``node`` starts, the library first. See :func:`choose_transports`."""
    if keep_bits or group_of(node) in apart:
        return [LIBRARY]
    known = transports_for(cluster, collective_of(step, node))
    allowed = [name for name in allowed_transports(cluster) if name in known and name not in without]
    return [LIBRARY, *(name for name in allowed if not why_not(step, node, name))]


def cheapest(cluster: Cluster, collective: Collective, names: Sequence[str]) -> str:
    """Which of ``names`` costs a step least; of equal ones the first.

    One whose results lie in the arena, memory that is there all the time, has to cost so much less than the others that
    it surely does.
    """
    costs = {name: cost(cluster, collective, name) for name in names}
    least = min(names, key=costs.__getitem__)
    apart = [name for name in names if not lies_in_arena(name) and costs[name] <= costs[least] * (1 + _KNOWN)]
    return min(apart, key=costs.__getitem__, default=least)


def allowed_transports(cluster: Cluster) -> list[str]:
    """The transports beside the library that ``knobs.transports`` allows, "all" for all that the cluster describes."""
    known = [name for name in dict.fromkeys(each.name for each in cluster.transports) if name not in LIBRARIES]
    named = [name.strip() for name in knobs.transports.split(",") if name.strip()]
    if named == ["all"]:
        return known
    for name in named:
        if name not in known and name not in LIBRARIES:
            raise UnknownOption("knobs.transports", name, ["all", *known])
    return [name for name in named if name in known]


def cost(cluster: Cluster, collective: Collective, transport: str) -> float:
    """Seconds of a collective, and those that computation loses beside it."""
    found = transfer(cluster, collective, transport)
    return found.seconds * (1 + found.interference)
