"""``torch.compile(model, backend="weft")``: weft as a Dynamo backend, with Dynamo's guards and graph breaks.

Dynamo traces a function. AOTAutograd turns its graph into functional forward and backward graphs. weft compiles each of
these like a captured step: StepGraph, passes, Program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from weft import knobs, torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.capture.graph import StepGraph, calls
from weft.capture.record.aot import Source, dynamo_sources, step_graph
from weft.capture.record.value_gradients import register_in_graph
from weft.inductor.compiler import MODES, Mode, compile_graph
from weft.inductor.lowering.lower import device_kind
from weft.inductor.passes.drop_noops import same_tensor
from weft.inductor.passes.write_in_place import write_in_place
from weft.inductor.runtime.aten import AtenProgram
from weft.short_tracebacks import shortens_tracebacks

log = logging.getLogger(__name__)

Boxed = Callable[[list[Any]], Sequence[Any]]


@shortens_tracebacks
def weft(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: Mode = "default",
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph. ``torch.compile`` calls this.

    Args:
        mode: ``"default"`` runs generated kernels on GPUs; ``"bitwise"`` runs ATen kernels everywhere.
        options: values of knobs (``weft.knobs``) while this model is compiled.

    Raises:
        UnknownOption: a mode that weft does not know.
        UnknownKnob, InvalidKnob: an option that is no knob, or a value that the knob does not accept.
        InvalidArgumentType: ``options`` is no dictionary of names.
    """
    checks = ArgumentChecks('torch.compile(backend="weft")')
    checks.one_of("mode", mode, list(MODES))
    if not (options is None or (isinstance(options, dict) and all(isinstance(name, str) for name in options))):
        allowed, remedy = "a dictionary from names of knobs to values", 'Write options={"verify_graphs": True}'
        raise checks.wrong_type("options", options, allowed, remedy)
    with knobs.override(**(options or {})):
        pass  # raises for invalid options before any work
    sources = dynamo_sources(module)
    register_in_graph(module.graph)

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        with knobs.override(**(options or {})):
            return _compile(graph, sources, mode)

    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in example_inputs)
    return torch_adapter.aot_autograd(compile_graph, _simplify, recompute=on_gpu)(module, example_inputs)


def _simplify(joint: torch.fx.Graph) -> None:
    """Remove operations of the joint graph whose results forward would save without need."""
    for node in calls(joint):
        if node.target is torch.ops.aten.native_batch_norm_backward.default and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])  # training does not read the running statistics
        same = same_tensor(node)
        if same is not None:
            node.replace_all_uses_with(same)
            joint.erase_node(node)


def _compile(graph: torch.fx.GraphModule, sources: Sequence[Source], mode: Mode) -> Boxed:
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
    """The program of a Dynamo graph. It is not recorded as a CUDA graph: results of a replay are copied, and that would
    copy everything that forward saves for backward."""
    on_aten = mode == "bitwise" or device_kind(step.graph.nodes) == "cpu"
    with knobs.override(cuda_graphs=False):
        program = compile_graph(step, mode, first=[write_in_place] if on_aten else [])
    assert isinstance(program, AtenProgram)
    return program
