"""What of a step a CUDA graph can hold."""

from __future__ import annotations

import os

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from weft import torch_adapter
from weft.capture.graph import StepGraph, group_of, is_collective, is_wait
from weft.capture.streams import StreamCall
from weft.capture.user_code import format_frame
from weft.inductor.passes.host import tensors_of, to_memory

Node = torch.fx.Node


def why_not(node: Node, step: StepGraph) -> str | None:
    """Why a call cannot be recorded in a CUDA graph, as a sentence; None where it can be."""
    if isinstance(node.target, StreamCall) or node.meta.get("effect"):
        return f"{node.name} calls Python code of the step at every call"
    if node.target is to_memory:
        return f"{node.name} takes numbers from the host"
    if is_collective(node):
        return _why_not_communicate(node, step)
    if is_wait(node):
        return _why_not_communicate(_start(node), step)
    tensors = tensors_of(node)
    given = [(used, tensor) for used in node.all_input_nodes for tensor in tensors_of(used)]
    off = next((used for used, tensor in given if not tensor.is_cuda), None)
    if off is not None:
        return f"{node.name} reads {off.name}, which is on the CPU"
    if any(not tensor.is_cuda for tensor in tensors):
        return f"{node.name} is a tensor on the CPU"
    if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()) or _decided_by_data(node):
        return f"{node.name} depends on a number that only the data decides"
    number = next((used for used in node.all_input_nodes if isinstance(used.meta.get("val"), torch.SymFloat)), None)
    if number is not None and tensors:
        return f"{node.name} takes the number {number.name}, which may be another at every call"
    return None


def where(node: Node) -> str:
    """The user's line of a node, in brackets after a sentence; "" where nothing is known of it."""
    frames = node.meta.get("frames", ())
    return f" ({format_frame(frames[0])})" if frames else ""


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
    """Kernels over the memory of peers are recorded like others. NCCL's calls are too, where nothing on the host must
    watch them.

    The watchdog of torch's process group (2.11 and later) polls events in a mode that disturbs no capture of another
    thread, and leaves recorded calls alone; so an error on another rank shows as a hang of a replay, not as a timeout.
    Calls that block the host (``TORCH_NCCL_BLOCKING_WAIT``, ``CUDA_LAUNCH_BLOCKING``) cannot be recorded at all.
    """
    if start is None:
        return "a wait whose collective is not in the step"
    if not all(tensor.is_cuda for tensor in tensors_of(start)):
        return f"{start.name} communicates on the CPU"
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
    """The collective that a node waits for."""
    given = wait.args[0]
    while isinstance(given, Node) and not is_collective(given):
        given = given.args[0] if given.args else None
    return given if isinstance(given, Node) else None
