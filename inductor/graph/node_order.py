"""The order of a graph's nodes, which is the order in which they are issued; and what stands together in it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_wait

Node = torch.fx.Node


def reorder(step: StepGraph, order: Sequence[Node]) -> None:
    """Let the nodes of the graph stand as in ``order``, which holds each of them once. Changes ``step``."""
    # Nodes are relinked, not copied: whoever holds a node (decisions, reports) keeps it.
    first = next(iter(step.graph.nodes))
    if first is not order[0]:
        first.prepend(order[0])
    for before, node in itertools.pairwise(order):
        if before.next is not node:
            before.append(node)


def put(node: Node, order: dict[Node, None]) -> None:
    """Append ``node`` to an order, after what it needs that is not there yet."""
    # A stack, since chains of operands are longer than Python lets functions recurse.
    todo = [node]
    while todo:
        needed = [used for used in todo[-1].all_input_nodes if used not in order]
        if needed:
            todo += reversed(needed)
        else:
            order[todo.pop()] = None


def together(order: Iterable[Node]) -> list[Node]:
    """An order in which elements stand with the list that they are picked from, so that it can go, and the waits for
    what one collective gives stand together, so that what it reads can go."""
    found: dict[Node, None] = {}
    for node in order:
        if node in found:
            continue
        for each in waits_of(start_of(node)) if is_wait(node) else [node]:
            found[each] = None
            # Elements of elements: multi-tensor calls return lists of lists.
            todo = _elements(each)
            while todo:
                found[element := todo.pop()] = None
                todo += _elements(element)
    return list(found)


def start_of(wait: Node) -> Node:
    """The collective that a wait is for."""
    operand: Any = wait.args[0]
    return operand.args[0] if operand.target is operator.getitem else operand


def waits_of(start: Node) -> list[Node]:
    """The waits for a collective, through the elements of a coalesced one."""
    users = [user for value in (start, *_elements(start)[::-1]) for user in value.users]
    return [user for user in users if is_wait(user)]


def _elements(node: Node) -> list[Node]:
    """What is picked from a list, the last first."""
    return [user for user in node.users if user.target is operator.getitem][::-1]
