"""Applies the chosen transport to each collective of a step, or the library (NCCL, gloo) if it cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_kinds import group_of
from weft.inductor.graph.escapes import escaping
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.transports import peer_launch  # noqa: F401 - imports what runs each transport
from weft.inductor.transports.arena_layout import lay_out
from weft.inductor.transports.fuse_grad_norm import fuse_grad_norm
from weft.inductor.transports.peer_calls import unsupported_reason, use_transport
from weft.inductor.transports.symmetric_memory import reachable
from weft.transport_rows import LIBRARIES, LIBRARY

log = logging.getLogger(__name__)

Node = torch.fx.Node


def unreachable(step: StepGraph, node: Node) -> str | None:
    """Why the ranks of the collective that ``node`` starts cannot share memory; None if they can, see
    :func:`reachable`."""
    group, val = group_of(node), node.meta["val"]
    device = (val[0] if isinstance(val, (list, tuple)) else val).device
    return reachable(group, step.groups[group], device)


def use_transports(
    step: StepGraph,
    library: str = LIBRARY,
    unreachable: Callable[[StepGraph, Node], str | None] = unreachable,
) -> None:
    """Apply the transports that the metadata of the collectives of ``step`` names and plan the arena. The arguments are
    those of :func:`replace_collectives`.

    Changes ``step``. Its nodes must be in issue order, because the arena plan depends on it.
    :func:`weft.inductor.transports.instantiate.bind` makes the result runnable. A collective call: every rank must call
    it with the same step, because the default ``unreachable`` makes a rendezvous.

    Raises:
        PeersUnreachable: a rank did not join the rendezvous.
    """
    # Before the layout: which values are in the arena follows from the transports.
    replace_collectives(step, library, unreachable)
    lay_out(step)


def replace_collectives(step: StepGraph, library: str, unreachable: Callable[[StepGraph, Node], str | None]) -> None:
    """Apply the transports of ``meta["transport"]`` to the collectives of ``step``, without arena offsets. Casts and
    norms that the transports compute on the way are removed from the graph. Changes ``step``; its metadata names the
    transports that are applied.

    Args:
        library: "nccl" or "gloo": of collectives without a transport, and of those whose transport cannot carry them.
        unreachable: why the ranks of a collective cannot share memory, or None. A prediction passes a function that
            makes no rendezvous.

    Raises:
        PeersUnreachable: a rank did not join the rendezvous.
    """
    # A step has hundreds of collectives, and one reason for all of them.
    messages: dict[str, None] = {}
    escaped = escaping(step)  # a transport replaces the start of a collective and keeps its waits
    for node in step.collectives():
        name = node.meta.get("transport", library)
        # The schedule assumed that the ranks can share memory. Where they cannot, the step runs all the same.
        # Both answers are the same on all ranks: one is agreed on, the other follows from the graph.
        why = None if name in LIBRARIES else unreachable(step, node) or unsupported_reason(step, node, name, escaped)
        if why is not None:
            messages[f"{name} does not carry collectives over {group_of(node)}: {why}"] = None
            name = library
        use_transport(step, node, name).meta["transport"] = name
    for line in messages:
        log.warning("%s; %s does", line, library)
    # Last: a cast can feed several collectives, and the last of them decides whether it is still read.
    drop_unread_casts(step)
    fuse_grad_norm(step)


def drop_unread_casts(step: StepGraph) -> None:
    """Drop casts, and tensors of multi-tensor casts, that have no users: the transports cast what they send. Changes
    ``step``."""
    drop_dead(step.graph)
    for node in step.graph.nodes:
        if isinstance(node.target, Cast):
            _keep_read(node)


def _keep_read(cast: Node) -> None:
    """Drop the tensors of a multi-tensor cast that have no users. The node itself stays, so that its name stays
    valid."""
    (sources,) = cast.args
    (results,) = cast.users
    # Elements that a transport casts itself have lost their readers.
    read = {element.args[1]: element for element in results.users}
    if len(read) == len(sources):  # type: ignore[arg-type]
        return
    kept = sorted(read)  # type: ignore[type-var]
    cast.args = ([sources[at] for at in kept],)  # type: ignore
    results.meta["val"] = [results.meta["val"][at] for at in kept]
    cast.meta["val"] = [results.meta["val"]]
    for place, at in enumerate(kept):
        read[at].args = (results, place)
