"""A report on the kernels of a step: their time against the roofline, and the calls that ATen runs, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.utils.flop_counter import flop_registry

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_wait
from weft.capture.user_code import format_frame
from weft.inductor.cache.kernel_cache import Resources
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.cost.cluster import Gpu
from weft.inductor.cost.measure_kernel import microseconds
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.lowering.registry import LOWERINGS
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.multi_tensor import Launcher

Node = torch.fx.Node


@dataclass(frozen=True)
class KernelUse:
    """One kernel of a step.

    Attributes:
        source: the kernel's text and name.
        count: launches per step.
        operations: operations of the captured step that one launch computes.
        lines: the user's lines that these come from.
        bytes: bytes that a launch has to read and write.
        roofline_us: microseconds for these bytes at the GPU's copy bandwidth.
        resources: registers, shared memory and spills; None if it was not compiled.
        measured_us: microseconds of a launch on scratch tensors; None if it was not measured.
    """

    source: KernelSource
    count: int
    operations: int
    lines: tuple[str, ...]
    bytes: int
    roofline_us: float
    resources: Resources | None
    measured_us: float | None = None

    @property
    def name(self) -> str:
        """Name of the kernel in the program."""
        return self.source.name


@dataclass(frozen=True)
class AtenCalls:
    """Calls of one operation that no generated kernel computes, with the reason."""

    operation: str
    count: int
    why: str


@dataclass(frozen=True)
class KernelReport:
    """A report on a step on a GPU.

    Attributes:
        gpu: the GPU that the numbers are for.
        graph: the step as calls of kernels.
        kernels: all different kernels, those that move most bytes per step first.
        calls: calls that are not generated.
        seconds: by stage of the compilation, its time.
        recorded: for each piece of the partitioned step, its number of calls and why it is no CUDA graph (None if it is
            one). Empty without a GPU, where this is not decided.
    """

    gpu: Gpu
    graph: StepGraph
    kernels: list[KernelUse]
    calls: list[AtenCalls]
    seconds: Mapping[str, float]
    recorded: list[tuple[int, str | None]] = field(default_factory=list)

    def measured(self) -> KernelReport:
        """A copy of the report with the time of each kernel, measured on the GPU it was compiled for.

        Raises:
            NotOnGpu: the kernels were generated, but for no GPU of this machine.
        """
        calls = {call.generated.source: node for node, call in _kernel_calls(self.graph)}
        times = {source: microseconds(node) for source, node in calls.items()}
        return replace(self, kernels=[replace(use, measured_us=times[use.source]) for use in self.kernels])


def report(
    graph: StepGraph, gpu: Gpu, seconds: Mapping[str, float], recorded: list[tuple[int, str | None]] | None = None
) -> KernelReport:
    """The report on ``graph``, a step after fusion.

    Kernels that are not loaded on a GPU are compiled for ``gpu``, which need not be present.

    Raises:
        KernelCompilationFailed, TritonMissing: see ``compile_pool.build``.
    """
    uses = list(_uses(graph, gpu))
    missing = [use.source for use in uses if use.resources is None]
    compiled = dict(zip(missing, compile_pool.build(missing, gpu.arch), strict=True))
    uses = [replace(use, resources=compiled[use.source].resources) if use.source in compiled else use for use in uses]
    uses.sort(key=lambda use: -use.bytes * use.count)
    return KernelReport(gpu, graph, uses, list(_aten_calls(graph)), dict(seconds), recorded or [])


def _kernel_calls(graph: StepGraph) -> Iterator[tuple[Node, KernelCall]]:
    return ((node, node.target) for node in graph.graph.nodes if isinstance(node.target, KernelCall))


def _uses(graph: StepGraph, gpu: Gpu) -> Iterator[KernelUse]:
    same: dict[KernelSource, list[KernelCall]] = {}
    for _, call in _kernel_calls(graph):
        same.setdefault(call.generated.source, []).append(call)
    for source, calls in same.items():
        frames = dict.fromkeys(origin.frame for call in calls for origin in call.origins if origin.frame)
        # A kernel that is called on several sizes counts with their mean.
        moved = sum(call.bytes for call in calls) // len(calls)
        kernel = calls[0].kernel
        yield KernelUse(
            source,
            len(calls),
            len(calls[0].origins),
            tuple(map(format_frame, frames)),
            moved,
            moved / gpu.copy_bandwidth * 1e6,
            getattr(kernel, "resources", None),
        )


# ---- calls that are not generated


def _aten_calls(graph: StepGraph) -> Iterator[AtenCalls]:
    counts: Counter[tuple[str, str]] = Counter()
    for node in graph.graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, KernelCall) and _computes(node):
            name = getattr(node.target, "__name__", "") if not hasattr(node.target, "_schema") else str(node.target)
            counts[name, _why(node)] += 1
    for (name, why), count in counts.most_common():
        yield AtenCalls(name, count, why)


def _computes(node: Node) -> bool:
    """Whether a call has new tensors as results or has an effect: not views, list elements or arithmetic on numbers."""
    val = node.meta.get("val")
    tensors = isinstance(val, (torch.Tensor, list, tuple))
    return not is_wait(node) and (bool(node.meta.get("effect")) or (tensors and not looks_into(node)))


def _why(node: Node) -> str:
    if node.meta.get("effect"):
        return "Python code of the step"
    if is_collective(node):
        return "communicates"
    if isinstance(node.target, (MultiTensor, Launcher)):
        return "a kernel over lists of tensors"
    if getattr(node.target, "overloadpacket", None) in flop_registry or "attention" in str(node.target):
        return "a library's kernel"
    if node.target in LOWERINGS:
        return "not in this case (a layout, a type, no elements, or data decide)"
    return "no lowering"
