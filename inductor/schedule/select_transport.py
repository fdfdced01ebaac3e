"""Transport selection: each collective gets the allowed transport with the lowest cost that supports it, or one within
a tenth of that cost that needs no symmetric arena.

The cost is the time of the collective, which a schedule can hide, plus the time that overlapped computation loses to
interference, which it cannot hide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any

import torch

from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of
from weft.errors import UnknownOption
from weft.inductor.cost.cluster import Cluster
from weft.inductor.cost.collective_cost import Collective, collective_of, transfer, transports_for
from weft.inductor.graph.aliasing import is_lazy
from weft.inductor.graph.collectives import collective_op, payload_of, reduction_of, results_of
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.sizes import layout_text
from weft.inductor.transports.peer_calls import is_held, results_in_arena, unsupported_reason
from weft.transport_rows import LIBRARIES, LIBRARY

Node = torch.fx.Node

# Relative tolerance of predicted costs: the median error of predicted collectives.
_COST_TOLERANCE = 0.1


def choose_transports(
    step: StepGraph,
    cluster: Cluster,
    *,
    keep_bits: bool = False,
    without: Collection[str] = (),
    unreachable_groups: Collection[str] = (),
) -> StepGraph:
    """Name a transport for every collective, in ``meta["transport"]``: of those that ``knobs.transports`` lists, the
    cheapest that can carry it; else the library. Changes ``step``.

    Args:
        keep_bits: the library carries all collectives, since other transports add in another order.
        without: transports that are not used.
        unreachable_groups: groups whose ranks have no peer access.

    Raises:
        UnknownOption: the knob lists what the cluster does not describe.
    """
    rules: Any = {"keep_bits": keep_bits, "without": without, "unreachable_groups": unreachable_groups}
    escaped = escaping(step)
    chosen: dict[tuple[Any, ...], str] = {}
    # One by one: that several calls share a stream or a link is not counted here.
    for node in step.collectives():
        # Layers of a model repeat, and a step has hundreds of collectives of a few kinds.
        key = _alike(node, escaped)
        if key not in chosen:
            able = carriers(step, cluster, node, escaped=escaped, **rules)
            chosen[key] = cheapest(cluster, collective_of(step, node), able)
        node.meta["transport"] = chosen[key]
    return step


def _alike(node: Node, escaped: Set[Node]) -> tuple[Any, ...]:
    """All that the transport of a collective follows from, beside the groups of the step: collectives with equal keys
    get the same one."""
    held = is_held(node, escaped)
    vals = [*(used.meta["val"] for used in payload_of(node)), *results_of(node)]
    reduction = reduction_of(node) if collective_op(node.target) is not None else ""
    counts = len(payload_of(node)), len(results_of(node))
    return node.target, group_of(node), reduction, held, counts, *((*layout_text(val), is_lazy(val)) for val in vals)


def carriers(
    step: StepGraph,
    cluster: Cluster,
    node: Node,
    *,
    keep_bits: bool = False,
    without: Collection[str] = (),
    unreachable_groups: Collection[str] = (),
    escaped: Set[Node] | None = None,
) -> list[str]:
    """Names of the transports that can carry the collective ``node``, the library first. Arguments as for
    :func:`choose_transports` and :func:`weft.inductor.transports.peer_calls.unsupported_reason`."""
    # Rank 0 decides for all ranks, so a group in which any rank lacks peer access is left out for all:
    # `unreachable_groups` is the list that ranks agreed on.
    if keep_bits or group_of(node) in unreachable_groups:
        return [LIBRARY]
    # What the cluster description has no rate for cannot be compared, and is never chosen.
    known = transports_for(cluster, collective_of(step, node))
    allowed = [name for name in allowed_transports(cluster) if name in known and name not in without]
    # The library first: of equal costs the first counts, and the library takes no memory that peers map.
    return [LIBRARY, *(name for name in allowed if not unsupported_reason(step, node, name, escaped))]


def cheapest(cluster: Cluster, collective: Collective, names: Sequence[str]) -> str:
    """The transport of the lowest cost, the first of equal ones.

    A transport whose results are allocated in the symmetric arena takes memory for the whole step. It must be cheaper
    by more than the tolerance of predictions.
    """
    costs = {name: cost(cluster, collective, name) for name in names}
    least = min(names, key=costs.__getitem__)
    within = costs[least] * (1 + _COST_TOLERANCE)
    outside_arena = [name for name in names if not results_in_arena(name) and costs[name] <= within]
    return min(outside_arena, key=costs.__getitem__, default=least)


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
    """Seconds of a collective plus the seconds that overlapped computation loses."""
    # Which part of the seconds a schedule hides is not known yet, so all of them count.
    found = transfer(cluster, collective, transport)
    return found.seconds * (1 + found.interference)
