"""Which nodes of a step a CUDA graph can record, and why the others cannot be recorded."""

from __future__ import annotations

import os

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, is_collective, is_wait
from weft.capture.node_meta import source_line
from weft.capture.record.streams import StreamCall
from weft.inductor.graph.host_scalars import to_memory
from weft.inductor.graph.sizes import tensors_of

Node = torch.fx.Node


def why_not(node: Node, step: StepGraph) -> str | None:
    """The reason why a call cannot be recorded in a CUDA graph, as a sentence; None where it can be recorded."""
    if isinstance(node.target, StreamCall) or node.meta.get("effect"):
        return f"{node.name} calls Python code of the step at every call"
    # Host numbers are written before the replay; what reads them on the GPU is recorded.
    if node.target is to_memory:
        return f"{node.name} takes numbers from the host"
    if is_collective(node):
        return _why_not_communicate(node, step)
    if is_wait(node):
        return _why_not_communicate(_start(node), step)
    tensors = tensors_of(node)
    operands = [(used, tensor) for used in node.all_input_nodes for tensor in tensors_of(used)]
    on_cpu = next((used for used, tensor in operands if not tensor.is_cuda), None)
    if on_cpu is not None:
        return f"{node.name} reads {on_cpu.name}, which is on the CPU"
    if any(not tensor.is_cuda for tensor in tensors):
        return f"{node.name} is a tensor on the CPU"
    if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()) or _decided_by_data(node):
        return f"{node.name} depends on a number that only the data decides"
    # A kernel receives the number by value, so a recording would replay the value of the first call.
    number = next((used for used in node.all_input_nodes if isinstance(used.meta.get("val"), torch.SymFloat)), None)
    if number is not None and tensors:
        return f"{node.name} takes the number {number.name}, which may be another at every call"
    return None


def where(node: Node) -> str:
    """The user's line of a node in parentheses, to append to a sentence; "" where no line is known."""
    line = source_line(node)
    return f" ({line})" if line else ""


def _decided_by_data(node: Node) -> bool:
    vals = [node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)]
    return any(_unbacked(val) for val in vals)


def _unbacked(val: object) -> bool:
    if isinstance(val, (list, tuple)):
        return any(_unbacked(item) for item in val)
    symbolic = isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
        isinstance(val, torch.Tensor) and any(type(n) is not int for n in (*val.shape, *val.stride()))
    )
    return symbolic and bool(free_unbacked_symbols(val))  # type: ignore[arg-type]


# ---- collectives


def _why_not_communicate(start: Node | None, step: StepGraph) -> str | None:
    """The reason why a collective cannot be recorded. Peer kernels can be, like other kernels, and NCCL calls can be
    unless the host waits for them.

    The watchdog of torch's process group (2.11 and later) polls events in a mode that does not disturb a capture on
    another thread, and ignores recorded calls. So an error on another rank shows as a hang of a replay, not as a
    timeout. Calls that block the host (``TORCH_NCCL_BLOCKING_WAIT``, ``CUDA_LAUNCH_BLOCKING``) cannot be recorded.
    """
    if start is None:
        return "a wait whose collective is not in the step"
    if not all(tensor.is_cuda for tensor in tensors_of(start)):
        return f"{start.name} communicates on the CPU"
    # A peer call launches kernels and copies like any other.
    if not hasattr(start.target, "_schema"):
        return None
    name = group_of(start)
    backend = torch_adapter.backend_of_group(step.groups.get(name, name), "cuda")
    if backend != "nccl":
        return f"{start.name} communicates over {backend or 'an unknown backend'}, on the host"
    for variable in ("TORCH_NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING"):
        if os.environ.get(variable, "0") not in ("", "0"):
            return f"{start.name} would make the host wait, which {variable} asks for"
    return None


def _start(wait: Node) -> Node | None:
    """The collective that ``wait`` waits for; None where it is not in the graph."""
    source = wait.args[0]
    while isinstance(source, Node) and not is_collective(source):
        source = source.args[0] if source.args else None
    return source if isinstance(source, Node) else None
