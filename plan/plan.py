"""``weft.plan``: what a step will do on a cluster, predicted without a GPU.

The step is captured, moved to GPUs in the graph, and scheduled for the cluster: by the same functions that compile it
for real and that ``weft.explain(...).scheduled()`` calls. Nothing runs and no kernel is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft import torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_kinds import group_of, is_collective
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.iterator_arguments import IteratorArguments, check_items_of_call
from weft.capture.record.tracer import capture_step
from weft.capture.segments import Outcome, is_branch
from weft.capture.sizes_in_bytes import tensor_bytes
from weft.capture.step_interface import Role
from weft.capture.user_code import format_frame
from weft.compile import CompiledStep
from weft.errors import BranchesOnInteger, MemoryLimitUnreachable
from weft.inductor.cost.cluster import Cluster, load_cluster
from weft.inductor.cost.collective_cost import collective_of
from weft.inductor.cost.compute_cost import ComputeCosts
from weft.inductor.graph.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, kind_of
from weft.inductor.graph.retarget import retarget
from weft.inductor.graph.sizes import tensors_of
from weft.inductor.lowering.lower import device_kind
from weft.inductor.schedule.planner import schedule as plan_schedule
from weft.inductor.schedule.planner import usable_memory
from weft.inductor.schedule.schedule_result import Schedule
from weft.inductor.schedule.scheduled_graph import KeptSchedules, predicted_schedule
from weft.plan.batch import with_batch
from weft.plan.breakdown import exposed_by_axis, model_operations, parts, unpriced
from weft.plan.memory_roles import TensorAtPeak, memory_by_role
from weft.plan.prediction import MemoryTimeline, PlannedCollective, Prediction
from weft.plan.timeline import block_of, lanes
from weft.short_tracebacks import shortens_tracebacks

Node = torch.fx.Node

_CHECKS = ArgumentChecks("weft.plan")
_MOST_BRANCHES = 64  # on values, that a step may have
_TIMELINE_POINTS = 400  # of memory over time
_TOP_TENSORS = 10


@shortens_tracebacks
def plan(
    step: Callable[..., object],
    *args: object,
    cluster: str | os.PathLike[str] | Cluster = "h200x8",
    memory_limit: float | None = None,
    **kwargs: object,
) -> Prediction:
    """Predict what a training step will do on a cluster: time, memory, communication. Nothing runs.

    Call it inside :func:`weft.fake_world`, which gives the step its process groups:

        with weft.fake_world(1024):
            ...                                   # build the model and the optimizer as on a GPU
            print(weft.plan(train_step, ids, labels, cluster="h200x8"))

    Args:
        step: the training step, compiled by :func:`weft.compile` or not.
        *args: of a call of it, with fake tensors or real ones. An iterator among them gives the items of a call.
        **kwargs: of that call.
        cluster: a name of docs/clusters.md, the path of a description, or a description.
        memory_limit: GiB that a rank may hold; default: nine tenths of the GPU's memory. A step that does not fit is
            planned all the same, with ``fits`` false.

    Raises:
        CannotCapture: the step does something that a graph cannot hold.
        BranchesOnInteger: the step goes on in a way that depends on a whole number that it computes.
        UnknownOption: a cluster that weft does not know.
    """
    return StepPlanner(step, args, kwargs).predict(cluster, memory_limit)


class StepPlanner:
    """A captured step that is predicted for any cluster and limit. What predictions share is made once.

    Attributes:
        name: of the step.
        graph: the captured step, on GPUs.
        branches: the user's lines at which the step branches on a value, with the outcome that was assumed.
        planned: the schedule of the last prediction for each cluster, by its name.
        kernels: the graphs of kernels that predictions schedule, by their budget of recomputation.
        schedules: what was decided for each cluster and limit, where that is kept.
        rebatched: makes the planner of the same step for another first size of its arguments.
    """

    rebatched: Callable[[int], StepPlanner]

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None):
        _CHECKS.function_or_callable("step", step, "Pass the function and then its arguments")
        inner = step.step if isinstance(step, CompiledStep) else step
        self.name = getattr(step, "__name__", type(step).__name__)
        self.rebatched = lambda batch: StepPlanner(step, *with_batch(args, kwargs or {}, batch))
        captured, branches = IteratorArguments().with_items(args, kwargs or {}, functools.partial(_captured, inner))
        with garbage_collection_paused():
            self._of(_on_gpus(captured.graph), branches, {})

    @classmethod
    def restored(
        cls,
        name: str,
        graph: StepGraph,
        branches: list[tuple[str, Outcome]],
        kernels: MutableMapping[int | None, StepGraph],
        rebatched: Callable[[int], StepPlanner],
    ) -> StepPlanner:
        """A planner of a step that was captured before, with the attributes of the planner that captured it."""
        planner = cls.__new__(cls)
        planner.name, planner.rebatched = name, rebatched
        planner._of(graph, branches, kernels)
        return planner

    def _of(
        self, graph: StepGraph, branches: list[tuple[str, Outcome]], kernels: MutableMapping[int | None, StepGraph]
    ) -> None:
        self.graph, self.branches, self.kernels = graph, branches, kernels
        self.planned: dict[str, Schedule] = {}
        self.schedules: KeptSchedules | None = None

    @property
    def size(self) -> int:
        """Nodes of the largest graph that was scheduled so far."""
        return max(map(len, self.kernels.values()), default=0)

    def schedule(self, cluster: Cluster, memory_limit: int | None = None) -> Schedule:
        """The schedule for a cluster within ``memory_limit`` bytes.

        Raises:
            MemoryLimitUnreachable: nothing fits.
        """
        with garbage_collection_paused():
            return predicted_schedule(self.graph, cluster, memory_limit, self.kernels, self.schedules)

    def least_memory(self, cluster: Cluster) -> Schedule:
        """The schedule of the lowest peak that is found without recomputation."""
        self.schedule(cluster)  # for the graph of kernels
        try:
            return plan_schedule(self.kernels[None], cluster, 1)
        except MemoryLimitUnreachable as error:
            return plan_schedule(self.kernels[None], cluster, error.peak)

    def predict(self, cluster: str | os.PathLike[str] | Cluster, memory_limit: float | None = None) -> Prediction:
        """The prediction for a cluster; ``memory_limit`` in GiB."""
        with garbage_collection_paused():
            return self._predicted(cluster, memory_limit)

    def _predicted(self, cluster: str | os.PathLike[str] | Cluster, memory_limit: float | None) -> Prediction:
        limit = _CHECKS.gibibytes("memory_limit", memory_limit)
        described = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        problem = ""
        try:
            schedule = self.schedule(described, limit)
        except MemoryLimitUnreachable as error:
            problem = str(error)
            schedule = self.schedule(described)
        self.planned[described.name] = schedule
        with torch_adapter.only_mode():
            found = self._prediction(described, schedule, usable_memory(described) if limit is None else limit)
        return replace(found, warnings=[*found.warnings, *([problem] if problem else [])])

    def _prediction(self, cluster: Cluster, schedule: Schedule, limit: int) -> Prediction:
        simulation, nodes, costs = schedule.simulation, schedule.nodes, ComputeCosts(cluster.gpu)
        memory = memory_by_role(schedule.step, simulation, nodes)
        tokens, samples = self._batch()
        shared = self._sharing()
        seconds = simulation.seconds
        operations = model_operations(self.graph.graph.nodes, costs)
        peak_rate = cluster.gpu.stated_peak
        return Prediction(
            name=self.name,
            cluster=cluster.name,
            gpu=cluster.gpu.name,
            world_size=torch_adapter.world_size(),
            rank=world.rank if (world := current_fake_world()) else 0,
            gpus_per_node=cluster.gpus_per_node,
            step_seconds=seconds,
            interval=(seconds * cluster.residuals[0], seconds * cluster.residuals[1]) if cluster.residuals else None,
            tokens=tokens,
            samples=samples,
            shared_by=shared,
            tokens_per_second=None if tokens is None or not seconds else tokens / shared / seconds,
            mfu=operations / seconds / peak_rate if peak_rate and seconds else None,
            model_operations=operations,
            peak_bytes=simulation.peak,
            limit_bytes=limit,
            fits=simulation.peak <= limit,
            exposed_seconds=exposed_by_axis(simulation, nodes),
            parts=parts(simulation, nodes, costs),
            collectives=_collectives(schedule),
            memory_timeline=_timeline(schedule, memory.over_time),
            top_tensors=memory.tensors[:_TOP_TENSORS],
            peak_by_module=_by_module(memory.tensors),
            input_bytes=self._input_bytes(),
            timeline=lanes(simulation, nodes),
            changes=[],
            scaling=[],
            unpriced=unpriced(simulation, nodes, costs),
            assumptions=self._assumptions(cluster, shared),
            warnings=list(schedule.warnings),
            versions=self._versions(),
            simulation=simulation,
        )

    def _batch(self) -> tuple[int | None, int | None]:
        """Elements of the largest argument of whole numbers, and the first size of the largest argument."""
        roles = {entry.name: entry.role for entry in self.graph.inputs}
        batch = [node.meta["val"] for node in self.graph.placeholders if roles[node.name] is Role.BATCH]
        tensors = [val for val in batch if isinstance(val, torch.Tensor) and val.dim()]
        whole = [_elements(val) for val in tensors if val.dtype in (torch.int64, torch.int32)]
        largest = max(tensors, key=_elements, default=None)
        return max(whole, default=None), None if largest is None else torch_adapter.hint(largest.shape[0])

    def _sharing(self) -> int:
        """How many ranks work on one batch: those of the groups that exchange values of two or more dimensions in
        forward which are no parameters, by collectives that give all of them the same."""
        depends = _derived_from_batch(self.graph)
        sizes = {
            group_of(node): len(torch_adapter.group_ranks(self.graph.groups[group_of(node)]))
            for node in self.graph.graph.nodes
            if is_collective(node)
            and node.meta.get("stage") == "forward"
            and any(used in depends and any(t.dim() > 1 for t in tensors_of(used)) for used in node.all_input_nodes)
            and kind_of(node) in (ALL_GATHER.kind, REDUCE_SCATTER.kind, ALL_REDUCE.kind)
        }
        return math.prod(sizes.values())

    def _input_bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for entry, node in zip(self.graph.inputs, self.graph.placeholders, strict=True):
            found[entry.role.value] = found.get(entry.role.value, 0) + (tensor_bytes(node.meta["val"]) or 0)
        return found

    def _assumptions(self, cluster: Cluster, shared: int) -> list[str]:
        found = [f"{line}: the step goes on as if the value were {outcome}" for line, outcome in self.branches]
        found.append(
            f"times of {cluster.name}: measured steps took {cluster.residuals[0]:.3f} to {cluster.residuals[1]:.3f} "
            "times the prediction; within one node only"
            if cluster.residuals
            else f"no step was measured on {cluster.name}: its figures are stated, and there is no interval"
        )
        if cluster.network is not None:
            found.append(f"network: {cluster.network.bandwidth * 8 / 1e9:,.0f} Gbit/s for each GPU, without other jobs")
        found.append("all ranks are as fast as this one, and data loading takes no time of the step")
        found.append(
            "caches of the allocator and of libraries beyond the planned memory are part of the tenth in reserve"
        )
        if shared > 1:
            found.append(f"{shared} ranks share one batch, by the activations that they exchange")
        return found

    def _versions(self) -> dict[str, str]:
        lines = (
            f"{node.target} {[tuple(map(str, t.shape)) for t in tensors_of(node)]}" for node in self.graph.graph.nodes
        )
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        return {"torch": torch.__version__, "graph": digest, "nodes": str(len(self.graph))}


def _on_gpus(captured: StepGraph) -> StepGraph:
    """A captured step as the graph that is planned: without its branches, and on GPUs."""
    graph = captured.copy()
    for node in [node for node in graph.graph.nodes if is_branch(node)]:
        graph.graph.erase_node(node)  # it would hold everything that any path after it may need
    drop_dead(graph.graph)
    return retarget(graph) if device_kind(graph.graph.nodes) == "cpu" else graph


def _captured(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CapturedStep, list[tuple[str, Outcome]]]:
    """A step captured to its end: where it branches on a computed condition, that is taken to be false."""
    outcomes: tuple[Outcome, ...] = ()
    assumed: list[tuple[str, Outcome]] = []
    while len(outcomes) <= _MOST_BRANCHES:
        captured = capture_step(step, args, kwargs, outcomes=outcomes)
        check_items_of_call()
        if captured.complete:
            return captured, assumed
        ends = next(node for node in reversed(captured.graph.graph.nodes) if is_branch(node))
        frames = ends.meta.get("frames", ())
        line = format_frame(frames[0]) if frames else "a line without source"
        value = ends.args[0]
        if isinstance(value, Node) and isinstance(value.meta.get("val"), (torch.SymInt, torch.SymFloat)):
            raise BranchesOnInteger(line)
        outcomes = (*captured.outcomes, False)
        assumed.append((line, False))
    raise BranchesOnInteger(assumed[-1][0])


def _derived_from_batch(step: StepGraph) -> set[Node]:
    """The nodes that are computed from an argument of the step."""
    roles = {entry.name: entry.role for entry in step.inputs}
    found: set[Node] = set()
    for node in step.graph.nodes:
        if roles.get(node.name) is Role.BATCH or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _elements(val: torch.Tensor) -> int:
    return math.prod(torch_adapter.hint(size) or 0 for size in val.shape)


def _collectives(schedule: Schedule) -> list[PlannedCollective]:
    simulation, nodes = schedule.simulation, schedule.nodes
    starts = [at for at, node in enumerate(nodes) if is_collective(node)]
    tasks = simulation.task_graph.tasks
    modules = {task.name: block_of(node.meta.get("module", "")) for task, node in zip(tasks, nodes, strict=True)}
    found = []
    for at, bucket in zip(starts, schedule.reports, strict=True):
        ranks = torch_adapter.group_ranks(schedule.step.groups[bucket.group])
        beside: dict[str, float] = {}
        for name, share in bucket.beside:
            beside[modules[name]] = beside.get(modules[name], 0.0) + share
        hidden_by = sorted(filter(None, beside), key=lambda name: -beside[name])
        found.append(
            PlannedCollective(
                bucket.kind,
                str(collective_of(schedule.step, nodes[at]).dtype).removeprefix("torch."),
                bucket.group,
                len(ranks),
                bucket.members,
                bucket.bytes,
                bucket.transport,
                simulation.task_graph.tasks[at].link,
                bucket.began,
                bucket.seconds,
                bucket.took,
                bucket.exposed,
                tuple(hidden_by[:3]),
                bucket.why,
            )
        )
    return sorted(found, key=lambda collective: collective.start)


def _by_module(tensors: Sequence[TensorAtPeak]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        module = block_of(tensor.module)
        of_role = found.setdefault(tensor.role, {})
        of_role[module] = of_role.get(module, 0) + tensor.bytes
    return found


def _timeline(schedule: Schedule, over_time: Mapping[str, Sequence[int]]) -> MemoryTimeline:
    """Memory at few points: of each stretch of the step the position with most memory, so that the peak is shown."""
    simulation = schedule.simulation
    stretches: dict[int, int] = {}
    for at, (time, live) in enumerate(zip(simulation.issued, simulation.memory, strict=True)):
        number = int(time / simulation.seconds * _TIMELINE_POINTS) if simulation.seconds else 0
        if number not in stretches or live > simulation.memory[stretches[number]]:
            stretches[number] = at
    places = sorted(stretches.values())
    return MemoryTimeline(
        [simulation.issued[at] for at in places],
        [simulation.memory[at] for at in places],
        {role: [bytes_[at] for at in places] for role, bytes_ in over_time.items() if any(bytes_)},
    )
