"""The parameter names (FQNs) that a collective moves: the parameter that it gathers, or whose gradient it reduces."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.step_interface import Role
from weft.inductor.graph.collectives import is_coalesced, payload_of
from weft.inductor.multi_tensor.operation import MultiTensor

Node = torch.fx.Node

# Nodes looked at between a collective and a parameter or the optimizer.
MAX_TRACE_DEPTH = 32


class Names:
    """Names the collectives of a step."""

    def __init__(self, step: StepGraph) -> None:
        self._paths = {entry.name: entry.path for entry in step.inputs if entry.role is Role.PARAMETER}
        # By call on lists: the place of each node in the first list that holds it. A list has all parameters of a step.
        self._places: dict[Node, dict[Node, int]] = {}

    def of(self, start: Node) -> tuple[str, ...]:
        """For each tensor that a collective communicates the path of the parameter that it gathers or whose gradient it
        reduces; the name of its node where there is none."""
        # A gather is named by what it reads, a reduction by what reads it.
        payload, results = payload_of(start), {0: start}
        if is_coalesced(start):
            results = {user.args[1]: user for user in start.users if user.target is operator.getitem}  # type: ignore
        return tuple(
            self._gathered(each) or (at in results and self._reduced(results[at])) or start.name
            for at, each in enumerate(payload)
        )

    def _gathered(self, node: Node) -> str:
        """Follows a shard to the parameter that it is made from, and from nothing else."""
        # Through casts and views. Where a second operand comes in, the value is no longer one parameter's.
        for _ in range(MAX_TRACE_DEPTH):
            before = _sources(node)
            if len(before) != 1:
                break
            node = before[0]
        return self._paths.get(node.name, "")

    def _reduced(self, start: Node) -> str:
        """Follows what is computed from a gradient alone to lists beside a list of parameters."""
        # Forwards to the optimizer: a gradient has no name of its own, but its place in the list beside the parameters
        # has.
        todo, seen = [start], {start}
        for node in todo:
            for user in node.users:
                found = self._beside(user, node) if isinstance(user.target, MultiTensor) else ""
                if found:
                    return found
                for after in _results_for(user, node):
                    if after not in seen and len(seen) < MAX_TRACE_DEPTH:
                        seen.add(after)
                        todo.append(after)
        return ""

    def _beside(self, call: Node, node: Node) -> str:
        """The parameter at the same place of the first list of a call."""
        # The parameters are the first list of every update.
        first: Any = call.args[0]
        if (places := self._places.get(call)) is None:
            lists = [of for of in call.args if isinstance(of, (list, tuple))]
            backwards = ((each, at) for of in lists[::-1] for at, each in reversed([*enumerate(of)]))
            places = self._places[call] = {each: at for each, at in backwards if isinstance(each, Node)}
        at = places.get(node)
        if at is None or not isinstance(first, (list, tuple)):
            return ""
        beside = next(iter(first[at : at + 1]), None)  # lists of sums have lengths of their own
        return self._paths.get(beside.name, "") if isinstance(beside, Node) else ""


def _sources(node: Node) -> list[Node]:
    """What ``node`` is computed from: of an element of a call on lists, the element at the same place."""
    operand = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(operand, Node) and operand.target is operator.getitem:
        call: Any = operand.args[0]
        lists = [of for of in call.args if isinstance(of, (list, tuple))]
        if isinstance(call.target, MultiTensor) and lists:
            return [lists[0][node.args[1]]]  # type: ignore[index]
    return node.all_input_nodes


def _results_for(call: Node, node: Node) -> Iterator[Node]:
    """What a call makes of ``node``: of a call on lists, the elements at the same place."""
    if not isinstance(call.target, MultiTensor):
        if call.op == "call_function" and (len(call.all_input_nodes) == 1 or call.target is operator.getitem):
            yield call
        return
    for of in call.args:
        if isinstance(of, (list, tuple)) and node in of:
            place = (of.index(node),)
            for list_ in call.users:
                yield from (user for user in list_.users if user.args[1:] == place)
