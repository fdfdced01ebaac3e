"""Makes the peer-access collectives of a step runnable: symmetric memory, compiled kernels, call targets."""

from __future__ import annotations

import logging

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, is_wait
from weft.capture.node_meta import source_line
from weft.capture.printer import operation
from weft.inductor.graph.node_order import start_of
from weft.inductor.graph.pass_runner import keeps_bits, required
from weft.inductor.runtime.kernels import compile_kernels
from weft.inductor.transports.arena_layout import ArenaSlot, arena_sizes
from weft.inductor.transports.peer_calls import PeerCall, PeerSquares, arena_tensors_of, call_of, inputs_of
from weft.inductor.transports.peer_launch import BoundPeerCall, BoundSquares, BoundWait, bind_call
from weft.inductor.transports.symmetric_memory import SymmetricBuffer, symmetric_buffer

log = logging.getLogger(__name__)

Node = torch.fx.Node


@required
@keeps_bits
def bind(step: StepGraph) -> StepGraph:
    """Make the peer-access collectives of a step with arena offsets runnable in this process. Changes ``step``.

    A collective call: every rank must call it with the same step, because ranks map each other's memory here.

    Raises:
        MulticastNotOff, PeersUnreachable, ArenaMismatch: see ``symmetric_buffer``.
        KernelCompilationFailed, TritonMissing, CudaError: see ``compile_kernels``.
    """
    starts = [node for node in step.graph.nodes if isinstance(node.target, PeerCall)]
    sizes = arena_sizes(step)
    # In the order of the graph, the same on all ranks: each buffer is a rendezvous of its group.
    buffers = {group: _buffer(step, [n for n in starts if group_of(n) == group], sizes[group]) for group in sizes}
    # All are constructed before any is attached: a constructor reserves staging memory, and `attach` takes it.
    calls = {node: _bound(node, buffers[group_of(node)]) for node in starts}
    _compile([*calls.values()])
    for node, call in calls.items():
        node.target = call
    # Waits and sums of squares hold the bound call that they belong to, so calls are bound first.
    # Slots that producers write to become tensors: a program passes them as `out`.
    for node in step.graph.nodes:
        if is_wait(node) and start_of(node) in calls:
            node.target = BoundWait(calls[start_of(node)])
        if isinstance(node.target, PeerSquares):
            node.target = BoundSquares(calls[start_of(node.all_input_nodes[0])])
        if "arena_slots" in node.meta:
            node.meta["arena_slots"] = tuple(_tensor(buffers, slot) for slot in node.meta["arena_slots"])
    return step


def _buffer(step: StepGraph, starts: list[Node], size: int) -> SymmetricBuffer:
    """The symmetric buffer of the group of ``starts``. Ranks compare the text of all calls before they share memory."""
    group, device = group_of(starts[0]), starts[0].meta["val"][0].device
    # With offsets, dtypes and opening barriers: ranks that differ in one of them would read each other's wrong bytes.
    plan = "\n".join(f"{call_of(node)} of {arena_tensors_of(node)}" for node in starts)
    return symmetric_buffer(group, step.groups[group], device, size, plan)


def _bound(node: Node, buffer: SymmetricBuffer) -> BoundPeerCall:
    inputs = [used.meta["val"] for used in inputs_of(node)]
    return bind_call(call_of(node), inputs, node.meta["val"], buffer, _description(node))


def _description(node: Node) -> str:
    """A description of a collective for error messages: operation, parameter names, the user's line."""
    line, members = source_line(node), [name for name in node.meta.get("param_names", ()) if name]
    if members:
        about = ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")
    else:
        about = f"{len(node.meta['val'])} tensors of {node.meta.get('module') or 'the step'}"
    return f"{operation(node.target)} of {about}" + (f" at {line}" if line else "")


def _compile(calls: list[BoundPeerCall]) -> None:
    """Compile the kernels of all calls, at once per device, and attach them."""
    by_device: dict[torch.device, list[BoundPeerCall]] = {}
    for call in calls:
        by_device.setdefault(call.device, []).append(call)
    for device, here in by_device.items():
        # All at once, so that kernels compile in parallel. Layers that repeat have equal sources, which compile once.
        sources = [source for call in here for source in call.sources()]
        kernels = iter(compile_kernels(sources, device))
        # Each takes as many as it has asked for, in its own order.
        for call in here:
            call.attach([next(kernels) for _ in call.sources()])


def _tensor(buffers: dict[str, SymmetricBuffer], slot: ArenaSlot | torch.Tensor | None) -> torch.Tensor | None:
    return buffers[slot.group].view(slot.offset, slot.sizes, slot.dtype) if isinstance(slot, ArenaSlot) else slot
