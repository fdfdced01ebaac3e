"""What a Llama step takes by the cost model, beside what was measured on an H200. No GPU is needed.

    python bench/predict_llama.py                        # all workloads, some minutes of CPU
    python bench/predict_llama.py --workloads 1b-2x2048
    python bench/predict_llama.py --cluster my.toml      # another GPU

Forward, loss and backward in bfloat16, with no communication and no optimizer, as weft compiles them for one GPU.
Measured is the same step with every block under torch.compile and the loss in eager (``baselines.md``, 8 H200).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from llama import SHAPES, Llama
from rich.console import Console
from rich.table import Table

import weft
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph
from weft.inductor.cost.build_task_graph import build
from weft.inductor.cost.cluster import Cluster, load_cluster
from weft.inductor.cost.compute_cost import is_attention
from weft.inductor.cost.gemm_shapes import is_gemm
from weft.inductor.cost.task_graph import Kind
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes

PARTS = ("matmul", "attention", "rest")
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, list[torch.Tensor | None]]]


@dataclass(frozen=True)
class Workload:
    """A model and its batch, and milliseconds measured of the whole step and of those parts that are known."""

    size: str
    batch: int
    length: int
    measured: float
    parts: tuple[float | None, float | None, float | None] = (None, None, None)

    @property
    def name(self) -> str:
        return f"{self.size}-{self.batch}x{self.length}"


WORKLOADS = [
    Workload("8b", 1, 2048, 161, (122, None, None)),
    Workload("8b", 1, 8192, 723, (531, 140, 57)),
    Workload("1b", 2, 2048, 61.5),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--cluster", default="h200x8", help="a shipped cluster, or a path to a TOML file")
    parser.add_argument("--layers", type=int, help="another number of layers; measured times are left out")
    options = parser.parse_args()
    cluster = load_cluster(options.cluster)
    table = Table("workload", "", *PARTS, "step ms", "launches", title=f"one {cluster.gpu.name}")
    for column in table.columns[2:]:
        column.justify = "right"
    for workload in WORKLOADS:
        if workload.name in options.workloads:
            add_rows(table, workload, cluster, options.layers)
    Console().print(table)


def add_rows(table: Table, workload: Workload, cluster: Cluster, layers: int | None) -> None:
    predicted, launches = milliseconds(compiled(workload, layers), cluster)
    total = sum(predicted.values())
    table.add_row(
        workload.name, "predicted", *(f"{predicted[part]:.1f}" for part in PARTS), f"{total:.1f}", str(launches)
    )
    if layers is None:
        parts = ["" if part is None else f"{part:g}" for part in workload.parts]
        table.add_row("", "measured", *parts, f"{workload.measured:g}", end_section=True)


def compiled(workload: Workload, layers: int | None) -> StepGraph:
    """The step of a workload as the graph of kernels that would run on a GPU."""
    with weft.fake_world(1):
        step, ids = llama_step(workload, layers)
        graph = weft.capture(step, ids, torch.zeros_like(ids))
    with garbage_collection_paused():
        return kernel_graph(run_passes(retarget(graph), KERNEL_PASSES))


def llama_step(workload: Workload, layers: int | None) -> tuple[Step, torch.Tensor]:
    shape = SHAPES[workload.size]
    with torch.device("meta"):
        model = Llama(replace(shape, layers=layers or shape.layers)).bfloat16()
    model.to_empty(device="cuda")

    def step(ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        loss = model(ids, labels)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return loss.detach(), gradients

    return step, torch.zeros(workload.batch, workload.length, dtype=torch.long, device="cuda")


def milliseconds(step: StepGraph, cluster: Cluster) -> tuple[dict[str, float], int]:
    """Predicted milliseconds by part, and how many calls take any."""
    task_graph, nodes = build(step, cluster)
    found = dict.fromkeys(PARTS, 0.0)
    for task, node in zip(task_graph.tasks, nodes, strict=True):
        part = "matmul" if is_gemm(node) else "attention" if is_attention(node) else "rest"
        found[part] += task.seconds * 1e3
    return found, sum(task.kind is Kind.COMPUTE for task in task_graph.tasks)


if __name__ == "__main__":
    main()
