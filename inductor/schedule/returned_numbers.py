"""Numbers that only the caller reads are taken out of a step while it is scheduled.

A rank that logs (``if rank == 0: log(loss.item())``) reads numbers that the other ranks do not read. Without the reads,
all ranks have the same graph, and so one schedule. Afterwards the reads are put at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft.capture.graph import StepGraph, copy_node
from weft.capture.node_kinds import is_effect, is_wait
from weft.capture.step_interface import Return
from weft.inductor.graph.aliasing import looks_into, storages
from weft.inductor.graph.collectives import waits_for_gather
from weft.inductor.graph.sizes import tensors_of
from weft.inductor.schedule.reshard import writes_of

Node = torch.fx.Node


@dataclass(eq=False)
class WithoutNumbers:
    """A step without numbers that only the caller reads.

    Attributes:
        step: a copy where there are such numbers. Behind its other results it has what these are read from.
        whole: the step with the numbers.
        numbers: nodes of ``whole``, in order.
        read: what they read, nodes of ``whole``.
    """

    step: StepGraph
    whole: StepGraph
    numbers: dict[Node, None]
    read: list[Node]

    def joined(self, scheduled: StepGraph) -> StepGraph:
        """``scheduled``, which was made of ``step``, with the numbers at its end. Changes it."""
        if not self.numbers:
            return scheduled
        end = scheduled.graph.output_node()
        others = len(scheduled.results) - len(self.read)
        new = dict(zip(self.whole.placeholders, scheduled.placeholders, strict=True))
        new |= dict(zip(self.read, scheduled.results[others:], strict=True))
        with scheduled.graph.inserting_before(end):
            for node in self.numbers:
                new[node] = copy_node(scheduled.graph, node, new.__getitem__)
        left = iter(scheduled.results[:others])
        end.args = (tuple(new[each] if _among(each, self.numbers) else next(left) for each in self.whole.results),)
        scheduled.outputs[:] = self.whole.outputs
        return scheduled.check()


def without_returned_numbers(step: StepGraph) -> WithoutNumbers:
    """Take the numbers that only the caller reads out of a step. ``step`` is not changed."""
    numbers = _returned_numbers(step)
    if not numbers:
        return WithoutNumbers(step, step, numbers, [])
    read = [used for node in numbers for used in node.all_input_nodes if used not in numbers]
    read = [used for used in dict.fromkeys(read) if used.op != "placeholder"]
    without = step.copy()
    copies = dict(zip(step.graph.nodes, without.graph.nodes, strict=True))
    kept = [pair for pair in zip(step.outputs, step.results, strict=True) if not _among(pair[1], numbers)]
    kept += [(Return(len(step.outputs) + at), each) for at, each in enumerate(read)]
    without.outputs[:] = [what for what, _ in kept]
    without.graph.output_node().args = (torch.fx.node.map_arg(tuple(each for _, each in kept), copies.__getitem__),)
    for node in reversed(numbers):
        without.graph.erase_node(copies[node])
    return WithoutNumbers(without.check(), step, numbers, read)


def _returned_numbers(step: StepGraph) -> dict[Node, None]:
    end, found = step.graph.output_node(), dict[Node, None]()
    for node in reversed(step.graph.nodes):
        if _is_number(node) and all(user is end or user in found for user in node.users):
            found[node] = None
    if not found:
        return {}
    overwritten = writes_of(step.graph.nodes)[1].keys()
    for used in {used for node in found for used in node.all_input_nodes if used not in found}:
        # At the end of the step, the memory of what a number is read from must still hold the same. Where one number
        # has to stay in its place, all do: that is rare.
        kept = used.op == "placeholder" or (tensors_of(used) and _outlives(used))
        if not kept or not overwritten.isdisjoint(storages(used)):
            return {}
    return dict.fromkeys(reversed(found))


def _among(result: Any, numbers: dict[Node, None]) -> bool:
    return isinstance(result, Node) and result in numbers


def _is_number(node: Node) -> bool:
    return node.op == "call_function" and not tensors_of(node) and not is_effect(node)


def _outlives(node: Node) -> bool:
    """Whether returning the value from the step leaves its schedule the same. A gathered value could no longer be freed
    and gathered again."""
    return not waits_for_gather(node) if is_wait(node) else not looks_into(node)
