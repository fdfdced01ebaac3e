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
from weft.inductor.lower import device_kind
from weft.inductor.passes.noops import same_tensor
from weft.inductor.passes.write_in_place import write_in_place
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
    return torch_adapter.aot_autograd(compile_graph, _simplify, recompute=on_gpu)(module, example_inputs)


def _simplify(joint: torch.fx.Graph) -> None:
    """Take from forward and backward together what forward would save, and hand over at every call, for no use."""
    for node in joint.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.native_batch_norm_backward.default and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])  # in training the running statistics are not read
        same = same_tensor(node)
        if same is not None:
            node.replace_all_uses_with(same)
            joint.erase_node(node)


def _compile(graph: torch.fx.GraphModule, sources: Sequence[Source], mode: str) -> Boxed:
    """A callable over the list of inputs of ``graph``, which it empties."""
    step, constants = step_graph(graph, sources)
    if mode == "bitwise" or device_kind(step.graph.nodes) == "cpu":
        step = write_in_place(step)
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
