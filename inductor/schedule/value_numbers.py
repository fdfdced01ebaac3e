"""Value numbers: what each output of a step computes, whatever buckets, transports and order compute it.

Two graphs compute the same where their outputs have the same numbers (value numbering, J. Cocke and J. T. Schwartz,
1970). The number of an operation follows from its target and the numbers of its operands. What a schedule may change
is left out of the number on purpose:

- A tensor in a coalesced collective has the number of the collective on that tensor alone. A wait has the number of
  what it waits for.
- The operand of a collective counts without the cast before it, since a transport may cast on the way. The dtype of the
  result is part of the number, so a lost cast is still seen.
- An element of a multi-tensor update or cast depends on its own row of operands, so updates may be split.
- The norm of all gradients depends on the set of gradients, so a reduction may hand over its sums of squares.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import group_of, is_collective, is_effect, is_wait
from weft.inductor.graph.collectives import (
    ALL_GATHER,
    collective_op,
    is_coalesced,
    kind_of,
    other_operands,
    payload_of,
    reduction_of,
    results_of,
)
from weft.inductor.graph.node_order import start_of
from weft.inductor.multi_tensor.cast import Cast
from weft.inductor.multi_tensor.norm import Norm, NormOfSquares
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.runtime.multi_tensor import Launcher
from weft.inductor.transports.arena_layout import whole_source
from weft.inductor.transports.peer_calls import PeerCall, PeerSquares
from weft.inductor.transports.peer_launch import BoundSquares

Node = torch.fx.Node

aten = torch.ops.aten


@dataclass(eq=False)
class StepValues:
    """What a step computes.

    Attributes:
        outputs: the number of each output, in order.
        effects: calls with effects and random draws, in order: the node's name and the numbers of its operands.
        counted: how often each collective other than an all-gather is done, by number.
        coalesced: of each collective on a list, the numbers of the tensors that it gives.
        gathers: the numbers of the all-gathers. A schedule may do them again.
        of: the number of each node.
        names: a node for each number, for messages.
    """

    outputs: tuple[Hashable, ...] = ()
    effects: list[tuple[str, Hashable]] = field(default_factory=list)
    counted: Counter[int] = field(default_factory=Counter)
    coalesced: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    gathers: set[int] = field(default_factory=set)
    of: dict[Node, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)


class ValueNumbering:
    """Numbers the values of several graphs by one table, so that equal numbers mean equal values."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._unhashable: dict[int, Any] = {}  # keeps targets alive, so that their ids stay their own

    def values(self, step: StepGraph) -> StepValues:
        """The values of ``step``, in time linear in its nodes and operands. Its nodes stand in topological order."""
        return _StepNumberer(self, step).run()

    def number(self, key: Hashable) -> int:
        """The number of a value that is computed as ``key`` says."""
        return self._numbers.setdefault(key, len(self._numbers))

    def target(self, target: Any) -> Hashable:
        """A key for what a node calls: equal operations have equal keys, others go by identity."""
        target = _operation(target)
        try:
            hash(target)
        except TypeError:
            self._unhashable[id(target)] = target
            return "id", id(target)
        return target


class _StepNumberer:
    def __init__(self, numbering: ValueNumbering, step: StepGraph) -> None:
        self.numbering = numbering
        self.step = step
        self.found = StepValues()
        self.members: dict[Node, list[int]] = {}  # by collective, the number of each tensor that it gives

    def run(self) -> StepValues:
        found = self.found
        for node in self.step.graph.nodes:
            if node.op == "output":
                found.outputs = tuple(self.operand(result) for result in self.step.results)
                break
            number = self.number(node)
            found.of[node] = number
            # The first node of a value names it in messages.
            found.names.setdefault(number, node.name)
        return found

    def number(self, node: Node) -> int:
        if node.op != "call_function":
            # Inputs keep their names through all rewrites, so that two graphs share their leaves.
            return self.numbering.number((node.op, node.name if node.op == "placeholder" else str(node.target)))
        if is_collective(node):
            return self.collective(node)
        if is_wait(node):
            # A wait changes when a value can be read, not what it is. Whether it is there is checked elsewhere.
            return self.found.of[node.args[0]]  # type: ignore[index]
        if is_effect(node):
            operands = self.operand((node.args, node.kwargs))
            self.found.effects.append((node.name, operands))
            # The name is part of the number: two random draws with equal operands are different values.
            return self.numbering.number(("effect", node.name, operands))
        if node.target is operator.getitem:
            return self.element(*node.args)  # type: ignore[arg-type]
        if isinstance(node.target, (PeerSquares, BoundSquares)):
            return self.numbering.number(("squares", tuple(self.members[start_of(node.all_input_nodes[0])])))
        return self.numbering.number(
            (self.numbering.target(node.target), self.operand(node.args), self.operand(node.kwargs))
        )

    # ---- collectives

    def collective(self, node: Node) -> int:
        """Number the tensors that a collective gives, and count them."""
        payload, results = payload_of(node), results_of(node)
        how = self.operation(node)
        # Tensor by tensor, as if each were sent alone: that is what makes a bucket equal to its members. Size and dtype
        # of the result are part of the number, so a lost cast is seen.
        if len(payload) == len(results):
            keys: list[Hashable] = [
                (how, self.of_payload(each), tuple(map(str, val.shape)), val.dtype)
                for each, val in zip(payload, results, strict=True)
            ]
        else:  # what a result is computed from is not known, so each depends on the whole payload
            keys = [(how, self.operand(payload), at) for at in range(len(results))]
        numbers = self.members[node] = [self.numbering.number(key) for key in keys]
        for number in numbers:
            self.found.names.setdefault(number, node.name)
        # A set, since regathers repeat an all-gather. All others are counted: a reduction in place that is done twice
        # adds twice.
        if kind_of(node) is ALL_GATHER.kind:
            self.found.gathers.update(numbers)
        else:
            self.found.counted.update(numbers)
        if not is_coalesced(node):
            return numbers[0]
        self.found.coalesced[node] = tuple(numbers)
        return self.numbering.number(("list", *numbers))

    def operation(self, node: Node) -> Hashable:
        """What a collective does, and over which group: of a call over peers the same as of the library's."""
        kind = kind_of(node)
        group = group_of(node).removesuffix(f"/{kind.stream}")  # a communicator of its own has the group's ranks
        # A bound call keeps the call that it was made from.
        call = getattr(node.target, "call", node.target)
        if isinstance(call, PeerCall):
            return kind.name, getattr(call, "op", ""), group
        row = collective_op(node.target)
        assert row is not None  # kind_of has found it
        # The same for all forms of an operation, and for those that differ in the dtype they sum in: it is that of the
        # result, which is numbered.
        what = kind.name, reduction_of(node), group
        if not row.further_operands:
            return what
        # What a further operand means is the operation's own. No transport over peers has a place for it.
        names = [row.op._schema.arguments[at].name for at in row.further_operands]
        further = [(name, value) for name, value in other_operands(node) if name in names]
        return *what, self.numbering.target(row.library or row.op), self.operand(further)

    def of_payload(self, payload: Any) -> Hashable:
        """The operand of a collective without casts: a transport may cast what it sends."""
        # Casts of both forms: one node per tensor, and an element of a multi-tensor cast.
        while isinstance(payload, Node):
            if payload.target is aten._to_copy.default and list(payload.kwargs) == ["dtype"]:
                payload = payload.args[0]
                continue
            call, at = _row(payload)
            if call is None or not isinstance(_operation(call.target), Cast):
                break
            payload = call.args[0][at]  # type: ignore[index]
        return self.operand(payload)

    # ---- elements

    def element(self, source: Node, at: Any) -> int:
        """The number of ``source[at]``."""
        # An element of a coalesced call is the collective on that tensor alone.
        if source in self.members:
            return self.members[source][at]
        # A multi-tensor call returns lists: `source` picks the list, `at` the row.
        call, which = (source.args[0], source.args[1]) if source.target is operator.getitem else (None, None)
        operation = _operation(call.target) if isinstance(call, Node) else None
        if isinstance(call, Node) and isinstance(operation, MultiTensor):
            key = self.row(call, operation, which, at)
            if key is not None:
                return self.numbering.number(key)
        return self.numbering.number(("element", self.found.of[source], self.operand(at)))

    def row(self, call: Node, target: MultiTensor, which: Any, at: int) -> Hashable | None:
        """What a multi-tensor call computes for row ``at`` of its list ``which``; None where rows depend on others."""
        # A row of a cast or an update is computed from its row of operands alone. So the number survives a split of the
        # call, or a cast that moves into a transport.
        if isinstance(target, Cast):
            return "cast", target.dtype, self.operand(call.args[0][at])  # type: ignore[index]
        if target.updated:
            return (
                target,
                which,
                *(
                    self.operand(argument[at] if isinstance(argument, (list, tuple)) and argument else argument)
                    for argument in call.args
                ),
            )
        if isinstance(target, Norm) and target.together:
            return self.norm_of_all(call, call.args[0])  # type: ignore[arg-type]
        if isinstance(target, NormOfSquares):
            squares: Any = call.args[0]
            if any(isinstance(each.target, (PeerSquares, BoundSquares)) for each in squares):
                return self.norm_of_all(call, call.args[1], squares)  # type: ignore[arg-type]
        return None

    def norm_of_all(self, call: Node, tensors: Sequence[Node], squares: Sequence[Node] = ()) -> Hashable:
        numbers = [self.found.of[whole_source(tensor)] for tensor in tensors]
        others = []
        for each in squares:
            if isinstance(each.target, (PeerSquares, BoundSquares)):
                numbers += self.members[start_of(each.all_input_nodes[0])]
            else:
                others.append(self.found.of[each])
        # Sorted: transports hand over their sums in the order of their collectives, and `apply_transports` declares
        # that sums may change in their last bits.
        return "norm of all", tuple(sorted(numbers)), tuple(others), call.meta["val"][0][0].dtype

    def operand(self, value: Any) -> Hashable:
        """A key for an operand: nodes by their numbers, containers item by item."""
        if isinstance(value, Node):
            return "value", self.found.of[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(self.operand, value))
        if isinstance(value, dict):
            return tuple((name, self.operand(item)) for name, item in value.items())
        if isinstance(value, slice):
            return "slice", self.operand((value.start, value.stop, value.step))
        # The type tells 1 from 1.0 and True, which are equal and not the same operand; repr tells 0.0 from -0.0.
        return type(value), repr(value) if isinstance(value, float) else self.numbering.target(value)


def _operation(target: Any) -> Any:
    """What a target computes: of the kernels of a multi-tensor call, that call."""
    # Binding replaces a call on lists by its compiled kernels, and steps are compared across it.
    return target.effects.functional if isinstance(target, Launcher) else target


def _row(node: Node) -> tuple[Node | None, Any]:
    """The multi-tensor call that a node is an element of a list of, and which element; (None, None) for others."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and source.target is operator.getitem and isinstance(source.args[0], Node):
        return source.args[0], node.args[1]
    return None, None
