"""From calls over peers to calls that run: memory is shared, kernels are compiled, and nodes get what they call."""

from __future__ import annotations

import logging

import torch

from weft.capture.graph import StepGraph, group_of, is_wait
from weft.capture.printer import operation
from weft.capture.user_code import format_frame
from weft.inductor.comm.bound import Bound, BoundSquares, BoundWait, bound
from weft.inductor.comm.layout import Slot, arena_sizes
from weft.inductor.comm.symmetric import SymmetricBuffer, symmetric_buffer
from weft.inductor.comm.transports import PeerCall, PeerSquares, call_of, inputs_of, members_of
from weft.inductor.passes.order import start_of
from weft.inductor.runtime.kernels import compile_kernels

log = logging.getLogger(__name__)

Node = torch.fx.Node


def bind(step: StepGraph) -> StepGraph:
    """Let the collectives over peers of a laid-out step run in this process. Changes ``step``.

    Every rank must call this, with the same step: ranks share memory here, for the first time or more of it.

    Raises:
        MulticastNotOff, PeersUnreachable, ArenaMismatch: see ``symmetric_buffer``.
        KernelCompilationFailed, TritonMissing, CudaError: see ``compile_kernels``.
    """
    starts = [node for node in step.graph.nodes if isinstance(node.target, PeerCall)]
    sizes = arena_sizes(step)
    buffers = {group: _buffer(step, [n for n in starts if group_of(n) == group], sizes[group]) for group in sizes}
    made = {node: _bound(node, buffers[group_of(node)]) for node in starts}
    _compile([*made.values()])
    for node, call in made.items():
        node.target = call
    for node in step.graph.nodes:
        if is_wait(node) and start_of(node) in made:
            node.target = BoundWait(made[start_of(node)])
        if isinstance(node.target, PeerSquares):
            node.target = BoundSquares(made[start_of(node.all_input_nodes[0])])
        if "place" in node.meta:
            node.meta["place"] = tuple(_tensor(buffers, slot) for slot in node.meta["place"])
    return step


def _buffer(step: StepGraph, starts: list[Node], size: int) -> SymmetricBuffer:
    group, device = group_of(starts[0]), starts[0].meta["val"][0].device
    plan = "\n".join(f"{call_of(node)} of {members_of(node)}" for node in starts)
    return symmetric_buffer(group, step.groups[group], device, size, plan)


def _bound(node: Node, buffer: SymmetricBuffer) -> Bound:
    given = [used.meta["val"] for used in inputs_of(node)]
    return bound(call_of(node), given, node.meta["val"], buffer, _told(node))


def _told(node: Node) -> str:
    """What a collective is, for people: what it is about, and the user's line."""
    frames, members = node.meta.get("frames", ()), [name for name in node.meta.get("members", ()) if name]
    if members:
        about = ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")
    else:
        about = f"{len(node.meta['val'])} tensors of {node.meta.get('module') or 'the step'}"
    return f"{operation(node.target)} of {about}" + (f" at {format_frame(frames[0])}" if frames else "")


def _compile(calls: list[Bound]) -> None:
    by_device: dict[torch.device, list[Bound]] = {}
    for call in calls:
        by_device.setdefault(call.device, []).append(call)
    for device, here in by_device.items():
        sources = [source for call in here for source in call.sources()]
        kernels = iter(compile_kernels(sources, device))
        for call in here:
            call.attach([next(kernels) for _ in call.sources()])


def _tensor(buffers: dict[str, SymmetricBuffer], slot: Slot | torch.Tensor | None) -> torch.Tensor | None:
    return buffers[slot.group].view(slot.offset, slot.sizes, slot.dtype) if isinstance(slot, Slot) else slot
