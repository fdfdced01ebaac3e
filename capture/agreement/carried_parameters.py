"""The parameters that the collectives of a step carry: which of them they gather, or reduce the gradients of."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_wait
from weft.capture.step_interface import Create, Role, Update

Node = torch.fx.Node


def parameter_orders(step: StepGraph) -> dict[str, tuple[str, str]]:
    """For each kind of collective that carries parameters or their gradients: which parameters, and in which order.

    Both as hashes. Ranks may carry different ones, each those whose optimizer state it holds. But where all carry the
    same ones, they have to carry them in the same order.
    """
    parameters = CarriedParameters(step)
    carried: dict[str, list[str]] = {}
    for node in step.collectives():
        carried.setdefault(operation_name(node), []).append(",".join(parameters.of(node)))
    digest = lambda names: hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return {kind: (digest(sorted(names)), digest(names)) for kind, names in carried.items() if any(names)}


class CarriedParameters:
    """Which parameters a collective gathers or reduces the gradients of."""

    def __init__(self, step: StepGraph) -> None:
        self._parameters = {entry.name: entry.path for entry in step.inputs if entry.role is Role.PARAMETER}
        self._results: dict[Node, str] = {}
        # Per call, computed once: a step has one collective a parameter, and each looks itself up in the optimizer's
        # lists of all parameters.
        self._lists: dict[Node, list[_ListOperand]] = {}
        self._elements: dict[Node, dict[Any, list[Node]]] = {}
        inputs = {entry.name: entry for entry in step.inputs}
        for what, node in zip(step.outputs, step.results, strict=True):
            if isinstance(node, Node) and (path := _gradient(what, inputs)):
                self._results.setdefault(node, path.removesuffix(".grad"))

    def of(self, start: Node) -> list[str]:
        """Their paths, sorted; empty for a collective of other values."""
        gathered = {path for used in start.all_input_nodes if (path := self._gathered(used))}
        return sorted(gathered or self._reduced(start))

    def _gathered(self, node: Node) -> str:
        """The parameter that ``node`` is a view, cast or padded copy of."""
        while node.op != "placeholder" and _moves_data(node) and len(tensors := _tensors(node)) == 1:
            (node,) = tensors
        return self._parameters.get(node.name, "")

    def _reduced(self, start: Node) -> set[str]:
        """The parameters whose gradients are computed from the result, element by element."""
        found: set[str] = set()
        todo, seen = [start], {start}
        for node in todo:
            if node in self._results:
                found.add(self._results[node])
                continue
            for user in node.users:
                if path := self._beside(user, node):
                    found.add(path)
                    continue
                after = {*self._made_of(user, node)} - seen
                seen |= after
                todo += after
        return found

    def _beside(self, call: Node, node: Node) -> str:
        """The parameter that an optimizer's call on lists has at the place of ``node``."""
        lists = self._lists_of(call)
        at = next((others.places[node] for others in lists[1:] if node in others.places), None)
        beside = None if at is None or at >= len(lists[0].items) else lists[0].items[at]
        return self._parameters.get(beside.name, "") if isinstance(beside, Node) else ""

    def _made_of(self, call: Node, node: Node) -> list[Node]:
        """What ``call`` makes of ``node`` element by element: of a call on lists, the elements at the same place."""
        if operation_name(call).startswith("aten::_foreach_"):
            at = next((given.places[node] for given in self._lists_of(call) if node in given.places), None)
            if at is not None:
                return self._elements_of(call).get(at, [])
        return [call] if is_wait(call) or _moves_data(call) or _by_element(call) else []

    def _lists_of(self, call: Node) -> list[_ListOperand]:
        """The lists among the positional operands of ``call``."""
        if (found := self._lists.get(call)) is None:
            found = self._lists[call] = [
                _ListOperand(given, {each: at for at, each in reversed([*enumerate(given)]) if isinstance(each, Node)})
                for given in call.args
                if isinstance(given, (list, tuple))
            ]
        return found

    def _elements_of(self, call: Node) -> dict[Any, list[Node]]:
        """The users that take one element of the list that ``call`` returns, by its place."""
        if (found := self._elements.get(call)) is None:
            found = self._elements[call] = {}
            for user in call.users:
                if user.target is operator.getitem:
                    found.setdefault(user.args[1], []).append(user)
        return found


class _ListOperand(NamedTuple):
    """A list that a call takes, and the first place of each node in it."""

    items: Sequence[Any]
    places: dict[Node, int]


def _gradient(what: Any, inputs: dict[str, Any]) -> str:
    """The place of a gradient or parameter that an output replaces or creates."""
    if isinstance(what, Update):
        entry = inputs[what.input]
        return entry.path if entry.role in (Role.GRADIENT, Role.PARAMETER) else ""
    return what.path if isinstance(what, Create) and what.path.endswith(".grad") else ""


def _tensors(node: Node) -> list[Node]:
    return [used for used in node.all_input_nodes if isinstance(used.meta.get("val"), (torch.Tensor, list, tuple))]


_MOVES = ("aten::_to_copy", "aten::copy", "aten::constant_pad_nd", "aten::clone", "aten::cat", "aten::split", "weft::")


def _moves_data(node: Node) -> bool:
    """Views, casts, padding, and the elements of lists."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return schema.name.startswith(_MOVES) or any(result.alias_info is not None for result in schema.returns)


def _by_element(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not is_collective(node)


def operation_name(node: Node) -> str:
    """The name of what a node calls: `aten::add` of an operation of torch."""
    return getattr(getattr(node.target, "_schema", None), "name", getattr(node.target, "__name__", repr(node.target)))
