"""Where the time of a predicted step goes, beside the least time that each part could take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from weft.capture.node_kinds import group_of
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.cost.cluster import Gpu
from weft.inductor.cost.compute_cost import ComputeCosts, is_attention
from weft.inductor.cost.gemm_shapes import is_gemm
from weft.inductor.cost.simulate import Simulation
from weft.inductor.cost.task_graph import Kind
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.torch_adapter import OpOverload

Node = torch.fx.Node

GEMM, ATTENTION, MEMORY, OPTIMIZER = "GEMM", "attention", "memory-bound kernels", "optimizer"
COMPUTATION = (GEMM, ATTENTION, MEMORY, OPTIMIZER)
SLOWED, IDLE = "slowed by communication", "idle"


@dataclass(frozen=True)
class StepPart:
    """A part of the step's time. The ``seconds`` of all parts add up to those of the step.

    Attributes:
        name: one of :data:`COMPUTATION`, ``SLOWED``, "exposed" and a mesh axis, or ``IDLE``.
        seconds: that the compute stream spends on it.
        calls: kernels or collectives.
        least_seconds: the same work at the peak rates of the cluster description; for exposed communication, all
            communication of the axis, of which the rest is hidden.
        limit: what ``least_seconds`` refers to.
    """

    name: str
    seconds: float
    calls: int
    least_seconds: float
    limit: str


@dataclass(frozen=True)
class UnpricedCalls:
    """Calls of one operation that the cost model has no rule for: their time is that of their bytes."""

    operation: str
    count: int
    seconds: float


def part_of(node: Node) -> str:
    """The part of a step that a node's computation belongs to."""
    if is_gemm(node):
        return GEMM
    if is_attention(node):
        return ATTENTION
    return OPTIMIZER if node.meta.get("stage") == "optimizer" else MEMORY


def parts(simulation: Simulation, nodes: Sequence[Node], costs: ComputeCosts) -> list[StepPart]:
    """All parts of a step, computation first. ``nodes`` are those of the tasks of ``simulation``."""
    gpu = costs.gpu
    spent = dict.fromkeys(COMPUTATION, 0.0)
    least = dict.fromkeys(COMPUTATION, 0.0)
    calls = dict.fromkeys(COMPUTATION, 0)
    for task, node in zip(simulation.task_graph.tasks, nodes, strict=True):
        if task.kind is Kind.COMPUTE:
            part = part_of(node)
            spent[part] += task.seconds
            least[part] += min(costs.least_seconds(node), task.seconds)
            calls[part] += 1
    found = [StepPart(name, spent[name], calls[name], least[name], _limit(name, gpu)) for name in COMPUTATION]
    slowed = sum(simulation.slowed_seconds.values())
    found.append(StepPart(SLOWED, slowed, 0, 0.0, "collectives without interference"))
    for axis, (exposed, alone, count) in _communication(simulation, nodes).items():
        found.append(StepPart(f"exposed {axis}", exposed, count, alone, "all communication of the axis, one by one"))
    rest = simulation.seconds - sum(part.seconds for part in found)
    return [*found, StepPart(IDLE, max(rest, 0.0), 0, 0.0, "")]


def exposed_by_axis(simulation: Simulation, nodes: Sequence[Node]) -> dict[str, float]:
    """Exposed seconds of the collectives of each mesh axis, of every axis that communicates."""
    return {axis: exposed for axis, (exposed, _, _) in _communication(simulation, nodes).items()}


def _communication(simulation: Simulation, nodes: Sequence[Node]) -> dict[str, tuple[float, float, int]]:
    """By axis: exposed seconds, seconds of all collectives alone, and their number."""
    found: dict[str, tuple[float, float, int]] = {}
    for at, task in enumerate(simulation.task_graph.tasks):
        if task.kind is Kind.START:
            exposed, alone, count = found.get(axis := group_of(nodes[at]), (0.0, 0.0, 0))
            found[axis] = exposed + simulation.exposed.get(at, 0.0), alone + task.seconds, count + 1
    return dict(sorted(found.items()))


def _limit(part: str, gpu: Gpu) -> str:
    if part == GEMM:
        return f"large GEMMs in the dtype of each; bfloat16 {gpu.matmul.get('bfloat16', 0.0) / 1e12:,.0f} TFLOP/s"
    if part == ATTENTION:
        rates = gpu.attention_forward, gpu.attention_backward
        return f"long causal attention, {' and '.join(f'{rate / 1e12:,.0f}' for rate in rates)} TFLOP/s"
    return f"bytes at {gpu.copy_bandwidth / 1e12:.2f} TB/s"


def model_operations(nodes: Iterable[Node], costs: ComputeCosts) -> float:
    """Floating-point operations of the model on one rank: GEMMs, convolutions and attention, without what the compiler
    recomputes in backward."""
    return sum(
        costs.operations(node) for node in nodes if node.op == "call_function" and not node.meta.get("recomputed")
    )


def unpriced(simulation: Simulation, nodes: Sequence[Node], costs: ComputeCosts) -> list[UnpricedCalls]:
    """Computation that is neither a generated kernel nor a library call with known operations, the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for task, node in zip(simulation.task_graph.tasks, nodes, strict=True):
        if task.kind is Kind.COMPUTE and not _has_rule(node, costs):
            name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "call")
            count, seconds = found.get(name, (0, 0.0))
            found[name] = count + 1, seconds + task.seconds
    rows = [UnpricedCalls(name, count, seconds) for name, (count, seconds) in found.items()]
    return sorted(rows, key=lambda row: (-row.seconds, row.operation))


def _has_rule(node: Node, costs: ComputeCosts) -> bool:
    if isinstance(node.target, (KernelCall, MultiTensor)) or costs.operations(node):
        return True
    # Copies, fills and sums read and write their bytes, as the model says.
    name = str(node.target).partition(".")[2].partition(".")[0]
    return name in _BY_BYTES


_BY_BYTES = frozenset(
    {"clone", "copy", "_to_copy", "cat", "fill", "zeros", "ones", "full", "zero", "embedding", "index_select", "arange"}
    | {"stack", "contiguous", "reshape", "zeros_like", "ones_like", "full_like", "constant_pad_nd", "flatten"}
)
