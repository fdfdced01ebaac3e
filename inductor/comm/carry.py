"""What carries each collective of a step: the transport that was chosen, or the library where that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from weft.capture.graph import StepGraph, drop_dead, group_of
from weft.inductor.comm.layout import lay_out
from weft.inductor.comm.squares import use_squares
from weft.inductor.comm.symmetric import reachable
from weft.inductor.comm.transports import LIBRARIES, use_transport, why_not
from weft.inductor.multi_tensor.cast import Cast

log = logging.getLogger(__name__)

Node = torch.fx.Node


@dataclass(frozen=True)
class Carried:
    """What carries a collective.

    Attributes:
        transport: its name.
        why_not: why it is not the one that was chosen, in words; "" where it is.
    """

    transport: str
    why_not: str = ""


def unreachable(step: StepGraph, node: Node) -> str | None:
    """Why the ranks of the collective that ``node`` starts cannot share memory; see :func:`reachable`."""
    group, val = group_of(node), node.meta["val"]
    device = (val[0] if isinstance(val, (list, tuple)) else val).device
    return reachable(group, step.groups[group], device)


def carry(
    step: StepGraph,
    chosen: Mapping[Node, str],
    library: str = "nccl",
    unreachable: Callable[[StepGraph, Node], str | None] = unreachable,
) -> dict[Node, Carried]:
    """Let the transports of ``chosen`` carry the collectives of ``step``, and lay out the memory that they share, see
    :func:`hand_over`.

    Changes ``step``, whose nodes have to stand in order of issue; :func:`weft.inductor.comm.bind.bind` lets it run.
    Every rank must call this, with the same step and choice: ranks tell each other whether they can share memory.

    Raises:
        PeersUnreachable: a rank did not come to say what it can.
    """
    carried = hand_over(step, chosen, library, unreachable)
    lay_out(step)
    return carried


def hand_over(
    step: StepGraph, chosen: Mapping[Node, str], library: str, unreachable: Callable[[StepGraph, Node], str | None]
) -> dict[Node, Carried]:
    """Let the transports of ``chosen`` carry the collectives of ``step``, without places in the memory that they share,
    and drop what they do on their way. Changes ``step``.

    Args:
        chosen: by the node that starts it; others stay with ``library``.
        unreachable: why ranks cannot share memory. What is only predicted asks nobody.

    Returns by the node that starts it then, for every collective, what carries it.

    Raises:
        PeersUnreachable: a rank did not come to say what it can.
    """
    carried: dict[Node, Carried] = {}
    told: dict[str, None] = {}
    for node in step.collectives():
        name = chosen.get(node, library)
        why = None if name in LIBRARIES else unreachable(step, node) or why_not(step, node, name)
        if why is not None:
            told[f"{name} does not carry collectives over {group_of(node)}: {why}"] = None
            name = library
        carried[use_transport(step, node, name)] = Carried(name, why or "")
    for line in told:
        log.warning("%s; %s does", line, library)
    drop_unread_casts(step)
    use_squares(step)
    return carried


def drop_unread_casts(step: StepGraph) -> None:
    """Drop casts, and members of casts of many tensors, that nobody reads: what is sent is cast on its way. Changes
    ``step``."""
    drop_dead(step.graph)
    for node in step.graph.nodes:
        if isinstance(node.target, Cast):
            _keep_read(node)


def _keep_read(cast: Node) -> None:
    """Leave the members out that nobody reads; the node stays, so that it is known by its name."""
    (sources,) = cast.args
    (results,) = cast.users
    read = {element.args[1]: element for element in results.users}
    if len(read) == len(sources):  # type: ignore[arg-type]
        return
    kept = sorted(read)  # type: ignore[type-var]
    cast.args = ([sources[at] for at in kept],)  # type: ignore
    results.meta["val"] = [results.meta["val"][at] for at in kept]
    cast.meta["val"] = [results.meta["val"]]
    for place, at in enumerate(kept):
        read[at].args = (results, place)
