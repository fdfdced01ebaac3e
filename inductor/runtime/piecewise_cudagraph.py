"""Runs a step in partitions: as CUDA graphs where they can be recorded, kernel by kernel elsewhere."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from weft import knobs
from weft.capture.graph import StepGraph
from weft.capture.step_interface import Update
from weft.inductor.graph.host_scalars import goes_to_gpu, host_nodes
from weft.inductor.graph.pass_runner import PassRunner, keeps_bits
from weft.inductor.graph.sizes import tensors_of
from weft.inductor.runtime.aten import AtenProgram, compile_aten
from weft.inductor.runtime.cuda_graph import GraphedProgram
from weft.inductor.runtime.cudagraph_partition import Partition, partition_step, result_name
from weft.inductor.runtime.graph_recorder import CudaRecorder, recorder_of
from weft.inductor.runtime.verify import verify_partitions

log = logging.getLogger(__name__)

aten = torch.ops.aten


def compile_recorded(
    step: StepGraph,
    recorder: CudaRecorder | None = None,
    device: torch.device | None = None,
    runner: PassRunner | None = None,
) -> Program:
    """Compile ``step`` to a program that runs as one CUDA graph, or in partitions if not all of it can be recorded.

    A step on no GPU, or on several, runs kernel by kernel.

    Args:
        step: the graph.
        recorder: records the partitions (default: CUDA graphs on the GPU of the step).
        device: see :func:`compile_aten`.
        runner: runs the passes over partitions.

    Raises:
        MalformedGraph: see :func:`compile_aten`.
        MalformedProgram: the verifier found a fault in the partitions (with the knob ``verify_graphs`` on).
    """
    gpus = {t.device for node in step.graph.nodes for t in tensors_of(node) if t.is_cuda}
    # A CUDA graph is captured on one stream of one GPU.
    if len(gpus) != 1:
        log.info("the step runs kernel by kernel, not as a CUDA graph: it is on %d GPUs", len(gpus))
        return compile_aten(step, device=device)
    recorder = recorder or recorder_of(gpus.pop())
    partitions = partition_step(step)
    if knobs.verify_graphs:
        verify_partitions(step, partitions)
    for partition in partitions:
        how = f"not recorded: {partition.why_not}" if partition.why_not else "as a CUDA graph"
        log.info("%d nodes %s", len(partition.step), how)
    if all(partition.why_not for partition in partitions):
        return compile_aten(step, device=device)
    if len(partitions) == 1:
        return GraphedProgram(compile_aten(step, device=device, planned=True), step, recorder)
    return PiecewiseProgram(step, partitions, recorder, device, runner)


class PiecewiseProgram:
    """The programs of the partitions of a step. Called like the program of the whole step.

    Attributes:
        partitions: the programs, in the order they run.
    """

    def __init__(
        self,
        step: StepGraph,
        partitions: Sequence[Partition],
        recorder: CudaRecorder,
        device: torch.device | None = None,
        runner: PassRunner | None = None,
    ) -> None:
        runner = runner or PassRunner()
        self.partitions = [_program(partition, recorder, device, runner) for partition in partitions]
        self._names = [entry.name for entry in step.inputs]
        results = [result_name(at) for at, what in enumerate(step.outputs) if not isinstance(what, Update)]
        last = {name: at for at, partition in enumerate(partitions) for name in partition.input_names}
        last_used = [
            [name for name in partition.input_names if last[name] == at] for at, partition in enumerate(partitions)
        ]
        # Each program with the names of its inputs, of its outputs, and of the inputs that no later program reads.
        self._plan = [
            (program, partition.input_names, partition.output_names, names)
            for program, partition, names in zip(self.partitions, partitions, last_used, strict=True)
        ]
        self._results = results

    @property
    def source(self) -> str:
        """The text of all programs, one after the other."""
        return "\n\n".join(program.source for program in self.partitions)

    @property
    def operations(self) -> Counter[str]:
        """Number of operations by kind in all programs, see :attr:`AtenProgram.operations`."""
        return sum((program.operations for program in self.partitions), Counter())

    def __call__(self, *inputs: Any) -> list[Any]:
        """See :meth:`AtenProgram.__call__`."""
        return self.boxed([*inputs])

    def boxed(self, inputs: list[Any]) -> list[Any]:
        """As :meth:`AtenProgram.boxed`."""
        values = dict(zip(self._names, inputs, strict=True))
        inputs.clear()
        for program, input_names, output_names, last_used in self._plan:
            given = [values[name] for name in input_names]
            # Before the call: the program frees what it is the last to read, also values between partitions.
            for name in last_used:
                del values[name]
            values.update(zip(output_names, program.boxed(given), strict=True))
        return [values[name] for name in self._results]


def _program(
    partition: Partition, recorder: CudaRecorder, device: torch.device | None, runner: PassRunner
) -> AtenProgram | GraphedProgram:
    if partition.why_not is not None:
        return compile_aten(runner.run("program", partition.step, [stage_host_copies]), device=device)
    program = compile_aten(partition.step, device=device, planned=True)
    return GraphedProgram(program, partition.step, recorder, partition.internal)


@keeps_bits
def stage_host_copies(step: StepGraph) -> StepGraph:
    """Route copies from the host to a GPU through page-locked memory, so that the host does not wait for the GPU.
    Changes ``step``."""
    host = host_nodes(step)
    for node in step.graph.nodes:
        if node.target is aten._to_copy.default and goes_to_gpu(node, host):
            node.target = staged_copy
    return step


def staged_copy(value: torch.Tensor, **how: Any) -> torch.Tensor:
    """``aten._to_copy`` of a CPU tensor to a GPU, asynchronous to the host.

    Args:
        value: the CPU tensor. The caller may change it as soon as this returns, because the GPU reads a copy in
            page-locked memory, which torch keeps until the transfer has ended.
        how: keyword arguments of ``aten._to_copy``, with ``device``.
    """
    on_gpu = torch.device(how["device"]).type == "cuda"
    locked = torch.empty_like(value, pin_memory=on_gpu).copy_(value)
    return aten._to_copy.default(locked, **{**how, "non_blocking": True})


Program = AtenProgram | GraphedProgram | PiecewiseProgram
