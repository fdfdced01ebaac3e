"""``torch.compile(model, backend="weft")``: the second door, for people who want Dynamo's guards and graph breaks.

Dynamo hands over the graph of a function, AOTAutograd makes functional forward and backward graphs of it, and each of
these goes the way of a captured step: StepGraph, passes, program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from weft import knobs, torch_adapter
from weft.capture.aot import Source, dynamo_sources, step_graph
from weft.capture.graph import StepGraph
from weft.errors import UnknownOption
from weft.inductor.compiler import MODES, compile_graph
from weft.inductor.runtime.aten import AtenProgram

log = logging.getLogger(__name__)

Boxed = Callable[[list[Any]], Sequence[Any]]


def weft(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str = "default",
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's; what ``torch.compile`` calls.

    Args:
        mode: ``"default"`` runs generated kernels on GPUs; ``"bitwise"`` runs ATen kernels everywhere.
        options: values of knobs (``weft.knobs``) that hold while this model is compiled.

    Raises:
        UnknownOption: a mode that weft does not know.
        UnknownKnob, InvalidKnob: an option that is no knob, or a value that it does not take.
    """
    if mode not in MODES:
        raise UnknownOption("mode", mode, list(MODES))
    with knobs.override(**(options or {})):
        pass  # a mistake in the options is said before the work
    sources = dynamo_sources(module)

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        with knobs.override(**(options or {})):
            return _compile(graph, sources, mode)

    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in example_inputs)
    return torch_adapter.aot_autograd(compile_graph, recompute=on_gpu)(module, example_inputs)


def _compile(graph: torch.fx.GraphModule, sources: Sequence[Source], mode: str) -> Boxed:
    """A callable over the list of inputs of ``graph``, which it empties."""
    step, constants = step_graph(graph, sources)
    log.debug("%s", step)
    program = _program(step, mode)
    log.info("compiled a graph of %d nodes, %d inputs", len(step), len(step.inputs))

    def run(inputs: list[Any]) -> Sequence[Any]:
        inputs += constants
        return program.boxed(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _program(step: StepGraph, mode: str) -> AtenProgram:
    """How graphs of this door become programs: not as CUDA graphs, which would copy all that forward saves for
    backward."""
    with knobs.override(cuda_graphs=False):
        program = compile_graph(step, mode)
    assert isinstance(program, AtenProgram)
    return program
