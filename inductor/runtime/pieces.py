"""A step that runs in pieces, those of them as CUDA graphs that can be."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph, Update
from weft.inductor.passes.host import goes_to_gpu, host_nodes, tensors_of
from weft.inductor.runtime.aten import AtenProgram, compile_aten
from weft.inductor.runtime.cuda_graph import GraphedProgram
from weft.inductor.runtime.cut import Piece, cut, result_name
from weft.inductor.runtime.graph_recorder import Recorder, recorder_of

log = logging.getLogger(__name__)

aten = torch.ops.aten


def compile_recorded(step: StepGraph, recorder: Recorder | None = None, device: torch.device | None = None) -> Program:
    """Make a program that runs ``step`` as a CUDA graph, or in pieces where not all of it can be recorded.

    Args:
        recorder: records the pieces (default: CUDA graphs on the GPU of the step).
        device: see :func:`compile_aten`.
    """
    gpus = {t.device for node in step.graph.nodes for t in tensors_of(node) if t.is_cuda}
    if len(gpus) != 1:
        log.info("the step runs kernel by kernel, not as a CUDA graph: it is on %d GPUs", len(gpus))
        return compile_aten(step, device=device)
    recorder = recorder or recorder_of(gpus.pop())
    pieces = cut(step)
    for piece in pieces:
        log.info(
            "%d nodes %s", len(piece.step), f"not recorded: {piece.why_not}" if piece.why_not else "as a CUDA graph"
        )
    if all(piece.why_not for piece in pieces):
        return compile_aten(step, device=device)
    if len(pieces) == 1:
        return GraphedProgram(compile_aten(step, device=device, planned=True), step, recorder)
    return PiecewiseProgram(step, pieces, recorder, device)


class PiecewiseProgram:
    """Called like the program of the whole step.

    Attributes:
        pieces: the programs, in the order they run.
    """

    def __init__(
        self, step: StepGraph, pieces: Sequence[Piece], recorder: Recorder, device: torch.device | None = None
    ) -> None:
        self.pieces = [_program(piece, recorder, device) for piece in pieces]
        self._names = [entry.name for entry in step.inputs]
        results = [result_name(at) for at, what in enumerate(step.outputs) if not isinstance(what, Update)]
        last = {name: at for at, piece in enumerate(pieces) for name in piece.takes}
        self._plan = [
            (program, piece.takes, piece.makes, [name for name in piece.takes if last[name] == at])
            for at, (program, piece) in enumerate(zip(self.pieces, pieces, strict=True))
        ]
        self._results = results

    @property
    def source(self) -> str:
        """The text of all programs, one after the other."""
        return "\n\n".join(program.source for program in self.pieces)

    @property
    def operations(self) -> Counter[str]:
        return sum((program.operations for program in self.pieces), Counter())

    def __call__(self, *inputs: Any) -> list[Any]:
        values = dict(zip(self._names, inputs, strict=True))
        for program, takes, makes, done in self._plan:
            made = program(*[values[name] for name in takes])
            for name in done:
                del values[name]
            values.update(zip(makes, made, strict=True))
        return [values[name] for name in self._results]


def _program(piece: Piece, recorder: Recorder, device: torch.device | None) -> AtenProgram | GraphedProgram:
    if piece.why_not is not None:
        _stage_copies(piece.step)
        return compile_aten(piece.step, device=device)
    program = compile_aten(piece.step, device=device, planned=True)
    return GraphedProgram(program, piece.step, recorder, piece.internal)


def _stage_copies(step: StepGraph) -> None:
    """Let copies of what the host has to a GPU go through page-locked memory: the host need not wait for the GPU."""
    host = host_nodes(step)
    for node in step.graph.nodes:
        if node.target is aten._to_copy.default and goes_to_gpu(node, host):
            node.target = staged_copy


def staged_copy(value: torch.Tensor, **how: Any) -> torch.Tensor:
    """``aten._to_copy`` of a tensor on the CPU to a GPU, done when the GPU comes to it.

    The caller may change ``value`` at once: what is copied is a copy in page-locked memory, which torch keeps until the
    GPU has read it.
    """
    on_gpu = torch.device(how["device"]).type == "cuda"
    locked = torch.empty_like(value, pin_memory=on_gpu).copy_(value)
    return aten._to_copy.default(locked, **{**how, "non_blocking": True})


Program = AtenProgram | GraphedProgram | PiecewiseProgram
