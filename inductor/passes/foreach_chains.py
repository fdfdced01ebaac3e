"""Chains of ``_foreach_*`` operations on lists of equal sizes are fused into one multi-tensor call each."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from weft.capture.graph import calls
from weft.inductor.multi_tensor.foreach import EXPRESSIONS, Foreach, Lists, Operand, Scalars, Step
from weft.inductor.passes.tensor_lists import (
    equal_scalars,
    iterable_by_kernels,
    multi_tensor_call,
    readable_by_kernels,
    same_layouts,
)

Node = torch.fx.Node


def fuse_foreach_chains(graph: torch.fx.Graph) -> None:
    """Replace each chain by a :class:`Foreach`; intermediate operations become dead. Changes ``graph``.

    A chain ends where a node outside it reads a result, so that the whole chain can run at the place of its last
    member."""
    for chain in _chains(graph):
        chain.replace(graph)


def _chains(graph: torch.fx.Graph) -> Iterator[_Chain]:
    open_: dict[Any, _Chain] = {}
    for node in calls(graph):
        key = _key(node)
        # A node outside of a chain reads its result, so the chain has to be complete here.
        for other in [k for k, chain in open_.items() if k != key and chain.is_read_by(node)]:
            yield open_.pop(other)
        if key is None:
            continue
        if key in open_ and not open_[key].takes(node):
            yield open_.pop(key)
        open_.setdefault(key, _Chain()).add(node)
    yield from list(open_.values())


def _key(node: Node) -> Any:
    """Layouts and device of the lists of a ``_foreach`` operation; None for any other node."""
    if node.target not in EXPRESSIONS or not all(isinstance(v, torch.Tensor) for v in node.meta["val"]):
        return None
    lists: list[Any] = [arg for arg in node.args if _is_tensor_list(arg)]
    if not iterable_by_kernels(lists) or not same_layouts(lists):
        return None
    scalars = [arg for arg in (*node.args, *node.kwargs.values()) if not isinstance(arg, (list, tuple))]
    if not readable_by_kernels(scalars, lists[0][0]):
        return None
    vals = node.meta["val"]
    same_dtypes = all(new.dtype == old.meta["val"].dtype for new, old in zip(vals, lists[0], strict=True))
    return tuple((val.shape, val.stride(), val.device) for val in vals) if same_dtypes else None


def _is_tensor_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and all(
        isinstance(getattr(a, "meta", {}).get("val"), torch.Tensor) for a in arg
    )


def _with_one_scalar(node: Node) -> tuple[Any, list[Any]]:
    """Operation and arguments of ``node``; a list of numbers that are all the same is one number."""
    op: Any = node.target
    arguments: list[Any] = list(node.args)
    if op._overloadname == "ScalarList" and equal_scalars(arguments[-1]):
        return op.overloadpacket.Scalar, [*arguments[:-1], arguments[-1][0]]
    return op, arguments


class _Chain:
    """Members of a chain in order.

    Attributes:
        elements: for each element taken from a member, that member's number and the element's.
        arguments: of the call that will replace it.
        olds: for each step, the list argument that eager overwrote with what it computes, -1 for none.
    """

    def __init__(self) -> None:
        self.members: list[Node] = []
        self.elements: dict[Node, tuple[int, int]] = {}
        self.arguments: list[Any] = []
        self.steps: list[Step] = []
        self.olds: list[int] = []

    def is_read_by(self, node: Node) -> bool:
        """Whether a node that is not of the chain needs a result; the elements of members are noted on the way."""
        if node.target is operator.getitem and node.args[0] in self.members:
            self.elements[node] = (self.members.index(node.args[0]), node.args[1])  # type: ignore[arg-type]
            return False
        return any(used in self.elements or used in self.members for used in node.all_input_nodes)

    def takes(self, node: Node) -> bool:
        """Whether each list of ``node`` is from outside, or all that one member computed."""
        arguments: Any = node.args
        for arg in arguments:
            if _is_tensor_list(arg):
                inside = [self.elements[a] for a in arg if a in self.elements]
                if inside and inside != [(inside[0][0], at) for at in range(len(arg))]:
                    return False
            elif isinstance(arg, Node) and arg in self.elements:
                return False
        return not any(self._scalar_inside(value) for value in node.kwargs.values())

    def _scalar_inside(self, value: Any) -> bool:
        return isinstance(value, Node) and value in self.elements

    def add(self, node: Node) -> None:
        op, arguments = _with_one_scalar(node)
        operands = tuple(self._operand(arg) for arg in arguments if not isinstance(arg, bool))
        named = tuple((name, self._operand(value)) for name, value in node.kwargs.items())
        first = operands[0]
        assert isinstance(first, Lists)
        old = self.olds[first.at] if first.computed else first.at
        self.olds.append(old if node.meta.get("inplace") is not None else -1)
        self.steps.append(Step(op, operands, named))
        self.members.append(node)

    def _operand(self, arg: Any) -> Operand:
        if _is_tensor_list(arg):
            if arg[0] in self.elements:
                return Lists(self.elements[arg[0]][0], True)
            return Lists(self._argument(list(arg)), False)
        if isinstance(arg, (list, tuple)):
            return Scalars(self._argument(list(arg)))
        return arg if type(arg) in (int, float) else Scalars(self._argument(arg))

    def _argument(self, value: Any) -> int:
        if value not in self.arguments:
            self.arguments.append(value)
        return self.arguments.index(value)

    def replace(self, graph: torch.fx.Graph) -> None:
        outside = lambda user: user not in self.members
        kept = sorted({self.elements[e][0] for e in self.elements if any(map(outside, e.users))})
        if not kept:
            return
        # Only the last value that eager wrote to a list may take its memory.
        last = {self.olds[step]: step for step in kept}
        takes = {step: self.olds[step] if last[self.olds[step]] == step else -1 for step in kept}
        kept.sort(key=lambda step: takes[step] >= 0)
        call = Foreach(tuple(self.steps), tuple((step, takes[step]) for step in kept))
        vals = [self.members[step].meta["val"] for step in kept]
        results = multi_tensor_call(graph, self.members[-1], call, tuple(self.arguments), vals)
        for element, (step, at) in self.elements.items():
            if step in kept:
                element.replace_all_uses_with(results[kept.index(step)][at], outside)
