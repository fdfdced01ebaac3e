"""The StepGraph of a capture, with what its operations do not say: which results lie in the memory of inputs, and which
inputs the user's functions read by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.record.group_names import canonical_groups
from weft.capture.record.opaque import OpaqueCall
from weft.capture.record.sharding_text import with_axes
from weft.capture.state.containers import StatePlace
from weft.capture.step_interface import Input, Output, Update

Node = torch.fx.Node


def finished_graph(
    graph: torch.fx.Graph,
    inputs: list[Input],
    places: Sequence[StatePlace],
    outputs: list[Output],
    tensors: Iterable[tuple[Node, torch.Tensor]],
) -> StepGraph:
    """The StepGraph of a recorded graph, in which process groups get the names that all ranks give them.

    Args:
        graph, inputs, outputs: see :class:`StepGraph`.
        places: of the inputs.
        tensors: the user's tensor of each placeholder.
    """
    groups = canonical_groups(graph)
    step = StepGraph(graph, with_axes(inputs, places, groups), outputs, groups)
    _name_memory(step)
    _order_opaque_calls(step, tensors)
    return step.check()


def _name_memory(step: StepGraph) -> None:
    """Let outputs name the updated input in whose memory they lie: writes of the caller's to one of the two are seen in
    the other, whatever memory a program computes the value in."""
    updated = {entry.name for entry, _ in step.updates()}
    inputs = ((node.name, node.meta["val"]) for node in step.placeholders if node.name in updated)
    memory = {torch_adapter.storage_key(val): name for name, val in inputs if isinstance(val, torch.Tensor)}
    for at, (what, node) in enumerate(zip(step.outputs, step.results, strict=True)):
        val = node.meta["val"] if isinstance(node, Node) else None
        name = memory.get(torch_adapter.storage_key(val), "") if isinstance(val, torch.Tensor) else ""
        if name and not isinstance(what, Update):
            step.outputs[at] = replace(what, memory=name)


def _order_opaque_calls(step: StepGraph, tensors: Iterable[tuple[Node, torch.Tensor]]) -> None:
    """Give opaque calls those inputs as operands that the step writes only afterwards. The calls read them through the
    user's objects, so no program may write them before."""
    opaque = [(node, node.target) for node in step.graph.nodes if isinstance(node.target, OpaqueCall)]
    if not opaque:
        return
    updated = {entry.name for entry, _ in step.updates()}
    for node in step.graph.nodes:  # where the step branches, what is written so far goes to memory
        updated |= {written.name for written, _ in node.kwargs.get("written", ())}
    later = [(node, tensor.untyped_storage()._cdata) for node, tensor in tensors if node.name in updated]
    for node, call in opaque:
        node.args = (*node.args, *[read for read, storage in later if storage in call.snapshot.unwritten])
