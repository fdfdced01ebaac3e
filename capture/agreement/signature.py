"""The signature of a graph: the text of its collectives, which must be equal on every rank.

Ranks compare signatures before the first collective runs. Two graphs with equal signatures issue the same collectives
in the same order, with the same groups, dtypes, sizes and parameters. What each rank computes between them is its own
affair, as it is in a step that is not compiled: batches and shards of uneven sizes, numbers made from them, generators,
and Python that depends on the rank do not appear in the text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from weft.capture.agreement.claims import even_part
from weft.capture.agreement.text_difference import REMARK
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_wait, sizes_differ_by_rank
from weft.capture.step_interface import Create, Role, Update
from weft.capture.user_code import format_frame

Node = torch.fx.Node


def signature(step: StepGraph) -> str:
    """One line per collective, in order: operation, operands that are no tensors, dtype and elements of what it
    carries, the parameters that this belongs to, stage and module. The user's line stands behind it as a remark.

    Sizes are compared where partners must know them. Unequal parts of an all-to-all differ between ranks (see
    :mod:`weft.capture.agreement.claims`), and a size that only the data decides is a symbol, of which the name is
    compared and never the value.
    """
    names, parameters = _SymbolNames(), _Parameters(step)
    return "\n".join(_line(node, names, parameters) for node in step.collectives())


def _line(node: Node, names: _SymbolNames, parameters: _Parameters) -> str:
    payload = [used.meta["val"] for used in node.all_input_nodes if isinstance(used.meta.get("val"), torch.Tensor)]
    sizes = [names.shown(val.numel()) for val in payload]
    if sizes_differ_by_rank(node.target):  # which of several tensors the sizes split is not known here
        part = even_part(node)
        sizes = ["in parts that differ" if part is None else f"{part} each"] * len(payload)
    carried = ", ".join(f"{val.dtype} [{size}]" for val, size in zip(payload, sizes, strict=True))
    belongs = parameters.of(node)
    whose = f" of {', '.join(belongs)}" if belongs else ""
    where = " ".join(filter(None, (node.meta.get("stage"), node.meta.get("module"))))
    frames = node.meta.get("frames", ())
    line = f"{REMARK}{format_frame(frames[0])}" if frames else ""
    return f"{_name(node)}({_operands(node)}): {carried}{whose}{f'; {where}' if where else ''}{line}"


def _name(node: Node) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", getattr(node.target, "__name__", repr(node.target)))


def _operands(node: Node) -> str:
    """The operands that are neither tensors nor split sizes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # a callable, which says what it does by its name and group
        return str(getattr(node.target, "group", ""))
    shown = []
    for at, argument in enumerate(schema.arguments):
        value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        if "split_sizes" not in argument.name and not _holds_nodes(value):
            shown.append(f"{argument.name}={value}")
    return ", ".join(shown)


def _holds_nodes(value: Any) -> bool:
    return isinstance(value, Node) or (isinstance(value, (list, tuple)) and any(map(_holds_nodes, value)))


class _SymbolNames:
    """Names of symbolic sizes, by first appearance in the text: torch numbers symbols by all that a rank traced."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def shown(self, size: int | torch.SymInt) -> str:
        """A number, or the text of an expression over renamed symbols. Nothing is asked of the symbols."""
        if isinstance(size, int):
            return str(size)
        rename = lambda found: self._names.setdefault(found[0], f"n{len(self._names)}")
        return re.sub(r"\b[su]\d+\b", rename, str(size))


class _Parameters:
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
        if _name(call).startswith("aten::_foreach_"):
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


_MOVES = ("aten::_to_copy", "aten::constant_pad_nd", "aten::clone", "aten::cat", "aten::split", "weft::")


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
