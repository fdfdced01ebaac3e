"""Which part of a step the host can compute before any of its work on GPUs is started."""

from __future__ import annotations

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_random, is_wait
from weft.capture.record.runtime_checks import check
from weft.capture.record.streams import StreamCall
from weft.inductor.graph.sizes import tensors_of

Node = torch.fx.Node

aten = torch.ops.aten


def host_nodes(step: StepGraph) -> set[Node]:
    """Inputs and calls whose results are numbers, or tensors on the CPU, and follow from such inputs alone.

    Learning rates and what is computed from them, counters that an optimizer keeps on the CPU, batches that are still
    there, what is drawn there by lot; not what a GPU has to finish first. All of them can be computed before the rest,
    in their order: nothing else draws from the CPU's generator before the last of the draws among them.
    """
    found: set[Node] = set()
    drawn_by_others = False
    for node in step.graph.nodes:
        # Moving a draw ahead of others would change what each of them draws.
        follows = found.issuperset(node.all_input_nodes) and not (is_random(node) and drawn_by_others)
        if on_host(node) and (node.op == "placeholder" or (_is_pure(node) and follows)):
            found.add(node)
        elif _calls_python(node) or (is_random(node) and on_host(node)):
            drawn_by_others = True
    return found


def goes_to_gpu(node: Node, host: set[Node]) -> bool:
    """Whether the node only moves to a GPU what the host has."""
    operands = node.all_input_nodes
    moves = node.target is aten._to_copy.default or node.target is to_memory
    return moves and bool(operands) and host.issuperset(operands) and all(t.is_cuda for t in tensors_of(node))


def to_memory(*numbers: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers as a tensor of one dimension in the memory of a device; a GPU fetches them when it comes to it.

    A kernel that reads a number from memory needs no other launch when the number changes, so that a recorded CUDA
    graph sees it change.
    """
    # Page-locked: a copy from pageable memory makes the host wait for the GPU. float64 first, as Python computes.
    locked = torch.empty(len(numbers), dtype=dtype, pin_memory=device.type == "cuda")
    locked.copy_(torch.tensor(numbers, dtype=torch.float64))
    return locked.to(device, non_blocking=True)


def _is_pure(node: Node) -> bool:
    """Whether the results are all that a call does, but for moving a generator on."""
    return node.op == "call_function" and not (is_collective(node) or is_wait(node) or _calls_python(node))


def _calls_python(node: Node) -> bool:
    return isinstance(node.target, StreamCall) or (bool(node.meta.get("effect")) and node.target is not check)


def on_host(node: Node) -> bool:
    """Whether no tensor of a node's result is on a GPU. In a step on GPUs, the host computes such a node."""
    # Not `is_cuda`, which runs an operation on a fake tensor: ten times as long.
    return not any(tensor.device.type == "cuda" for tensor in tensors_of(node))
