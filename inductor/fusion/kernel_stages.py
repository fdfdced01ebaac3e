"""The first two stages of a compilation: passes over the captured graph, then generated kernels.

:mod:`weft.inductor.compiler` lists all stages.
"""

from __future__ import annotations

import torch

from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role
from weft.inductor.cache.graph_cache import cached
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.fusion.generate_kernels import GenerateKernels
from weft.inductor.graph.aliasing import storages
from weft.inductor.graph.pass_runner import Pass, PassRunner, is_enabled
from weft.inductor.passes.pipeline import ATEN_PASSES, kernel_passes, without_rewrites
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.kernels import arch_of
from weft.inductor.runtime.multi_tensor import multi_tensor_kernels, use_kernels


def unscheduled_graph(
    step: StepGraph,
    generates: bool,
    budget: int | None,
    runner: PassRunner,
    *,
    rewrites: bool = True,
    caches: bool = True,
) -> StepGraph:
    """The step after the stages ``graph`` and ``kernels``; without ``rewrites``, every collective is as captured;
    without ``caches``, made without the cache on disk, whose key takes the whole graph as text."""
    passes = kernel_passes(budget) if generates else ATEN_PASSES
    passes = passes if rewrites else without_rewrites(passes)
    if not generates:
        return runner.run("graph", step.copy(), passes)

    def make(graph: StepGraph) -> StepGraph:
        compile_pool.start_workers()
        made = kernel_graph(runner.run("graph", graph.copy(), passes), runner)
        begin_kernels(made)  # before the graph is written to the cache, and ranks compare theirs
        return made

    if not caches:
        return make(step)
    how = "" if rewrites else ", collectives as captured"
    return cached(step, make, f"within {budget}{how} without {runner.left_out.variant()}")


def kernel_graph(step: StepGraph, runner: PassRunner | None = None) -> StepGraph:
    """The step with generated kernels, not compiled yet, in place of all operations that have a lowering."""
    runner = runner or PassRunner()
    return runner.run("kernels", step, generation_passes(runner))


def generation_passes(runner: PassRunner) -> list[Pass]:
    """Generate kernels and order the graph that calls them. ``runner`` accounts for the time of each step of it."""
    return [GenerateKernels(runner), schedule_waits]


def begin_kernels(step: StepGraph) -> None:
    """Begin to compile what :class:`LoadKernels` is going to load, as far as it is known before the schedule. Does
    nothing outside of a compilation: a prediction needs no kernels, and may be for GPUs that are not here."""
    if not compile_pool.compiles_ahead():
        return
    anywhere = _readers_of_the_batch(step)
    for device, calls in kernel_calls_by_device(step).items():
        if device.type == "cuda":
            others = multi_tensor_kernels(step, device) if is_enabled(use_kernels) else []
            unaligned = [call.generated.source.unaligned() for call in calls if id(call) in anywhere]
            sources = [*others, *(call.generated.source for call in calls), *unaligned]
            compile_pool.begin(sources, arch_of(device))


def _readers_of_the_batch(step: StepGraph) -> set[int]:
    """The ids of the kernel calls that read tensors of the batch, which may begin anywhere in memory: ``ids[:, 1:]`` of
    one sequence is no copy. Their variants for such tensors are compiled beside all others. At the first launch that
    needs one, the step would wait for the compiler."""
    inputs = zip(step.placeholders, step.inputs, strict=True)
    batch = {key for node, given in inputs if given.role is Role.BATCH for key in storages(node)}
    reads = lambda node: any(batch & storages(operand) for operand in node.all_input_nodes)
    return {id(node.target) for node in step.graph.nodes if isinstance(node.target, KernelCall) and reads(node)}


def kernel_calls(step: StepGraph) -> list[KernelCall]:
    """The calls of generated kernels, in order."""
    return [node.target for node in step.graph.nodes if isinstance(node.target, KernelCall)]


def kernel_calls_by_device(step: StepGraph) -> dict[torch.device, list[KernelCall]]:
    """The calls of generated kernels of each device, in order."""
    found: dict[torch.device, list[KernelCall]] = {}
    for call in kernel_calls(step):
        found.setdefault(call.device, []).append(call)
    return found
