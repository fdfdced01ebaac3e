"""``weft.compile(..., replay_every=N)``: find a processor that computes wrong results without a word.

Every N-th call computes the step twice from the same state and compares. The graph gets one more output: a hash of each
tensor that a collective sends (the gradients of this rank, before other ranks' are added), and of each result. Sums of
the bits as integers do not depend on the order of the addition, and one wrong value changes them.

A wrong value spreads to all ranks through the next collective. So the first tensor that differs is looked for over all
ranks, in the order of the graph: what a rank sends comes before what others make of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.argument_checks import ArgumentChecks
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective
from weft.capture.record.streams import StreamCall
from weft.capture.step_interface import Create, Output, Return, Update
from weft.capture.user_code import format_frame
from weft.errors import InvalidArgument, ReplayDiffers
from weft.inductor.graph.emitter import Emit, emitter

_aten = torch.ops.aten

_REPEATABLE = {"check", "to_list", "stream_wait", "get_rng_state", "set_rng_state", "set_seed"}

# Integers of the sizes that elements have, in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class HashedTensors:
    """What the last output of a graph holds hashes of.

    Attributes:
        names: of the tensors, in the order in which the graph computes them.
    """

    names: tuple[str, ...]

    def first_difference(self, step: str, once: torch.Tensor, again: torch.Tensor, linked: bool) -> None:
        """Compare the hashes of both runs, on all ranks where the step links them. Collective then.

        Args:
            once, again: int64 [number of names].

        Raises:
            ReplayDiffers: on all ranks alike.
        """
        different = (once != again).nonzero().flatten()
        count = len(self.names)
        first = int(different[0]) if len(different) else count
        world = dist.get_world_size() if linked else 1
        rank = dist.get_rank() if linked else 0
        found = first * world + rank
        if linked:
            lowest = torch.tensor([found], device=once.device)
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
            found = int(lowest)
        if found < count * world:
            raise ReplayDiffers(step, found % world, self.names[found // world])


def with_hashes(step: StepGraph, name: str) -> tuple[StepGraph, HashedTensors]:
    """A copy of a step's graph with one more output, the hashes, and what they are hashes of.

    Raises:
        InvalidArgument: the step calls functions that change more than tensors, and would be called twice.
    """
    step = step.copy()
    effect = next((node for node in step.graph.nodes if node.meta.get("effect") and not _repeatable(node.target)), None)
    if effect is not None:
        frames = effect.meta.get("frames", ())
        raise refused(f"{name} runs {effect.target} at {format_frame(frames[0]) if frames else 'a line of yours'}")
    output = step.graph.output_node()
    meanings: dict[torch.fx.Node, Output] = {
        node: what for what, node in zip(step.outputs, step.results, strict=True) if isinstance(node, torch.fx.Node)
    }
    paths = {entry.name: entry.path for entry in step.inputs}
    names: list[str] = []
    hashes: list[torch.fx.Node] = []
    for node in list(step.graph.nodes):
        if node.op == "output":
            continue
        if is_collective(node):
            with step.graph.inserting_before(node):
                for sent in _tensors(node.all_input_nodes):
                    names.append(_sent(node))
                    hashes.append(_hash(emitter(step.graph, sent), sent))
        if node in meanings and node.op != "placeholder":
            with step.graph.inserting_before(output):
                for result in _tensors([node]):
                    names.append(_meaning(meanings[node], paths))
                    hashes.append(_hash(emitter(step.graph, result), result))
    if not hashes:
        raise refused(f"{name} computes no tensor")
    with step.graph.inserting_before(output):
        stacked = emitter(step.graph, hashes[0])(_aten.stack.default, hashes)
    results = step.results
    output.args = ((*results, stacked),)
    step.outputs.append(Return(sum(not isinstance(what, Update) for what in step.outputs)))
    return step, HashedTensors(tuple(names))


class ReplayedState:
    """Copies of the tensors that a program writes, and the states of torch's generators.

    Args:
        written: the tensors.
    """

    def __init__(self, written: Iterable[torch.Tensor]) -> None:
        self._kept = [(tensor, tensor.detach().clone()) for tensor in written]
        self._generator = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, value in self._kept:
                tensor.copy_(value)
        torch.set_rng_state(self._generator)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def refused(why: str) -> InvalidArgument:
    """The error for a step that cannot be run twice."""
    checks = ArgumentChecks("weft.compile")
    return checks.invalid("replay_every", "set", f"None here: {why}", "Leave it out, or that out of the step")


def _repeatable(target: object) -> bool:
    """Whether a call with effects may be made twice: it checks, waits for a stream, or sets what it finds set."""
    return isinstance(target, StreamCall) or getattr(target, "__name__", "") in _REPEATABLE


def _hash(emit: Emit, node: torch.fx.Node) -> torch.fx.Node:
    """The sum of a tensor's bits, as integers of the size of its elements; int64 []."""
    val = node.meta["val"]
    if val.is_complex():
        node = emit(_aten.view_as_real.default, node)
        val = node.meta["val"]
    if val.dtype.is_floating_point:
        node = emit(_aten.view.dtype, node, _BITS[val.element_size()])
    return emit(_aten.sum.default, node, dtype=torch.int64)


def _tensors(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    return [node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]


def _sent(collective: torch.fx.Node) -> str:
    """What a collective sends, in words."""
    kind = str(collective.target).split(".")[1]
    stage = collective.meta.get("stage", "")
    names = ", ".join(dict.fromkeys(collective.meta.get("param_names", ())))
    what = names or collective.meta.get("module", "") or "a tensor"
    if stage == "backward":
        what = f"the gradients of {what}"
    return f"{what} ({f'in {stage}, ' if stage else ''}as {kind} sends it)"


def _meaning(what: Output, paths: dict[str, str]) -> str:
    if isinstance(what, Update):
        return f"the new {paths[what.input]}"
    return what.path if isinstance(what, Create) else "what the step returns"
