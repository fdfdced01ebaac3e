"""StepGraph: one training step as a functional graph whose inputs and outputs say what they are.

The graph is a plain :class:`torch.fx.Graph` of ATen and ``_c10d_functional`` operations over *values*: no node
mutates anything a later node reads. What an in-place operation of the step did is written as the functional operation
that computes the new value, and the output list says which input that value replaces.

What a node carries in ``node.meta`` is declared in :mod:`weft.capture.node_meta`: its fake value, the user's line, the
module and the stage that it belongs to, and what the compiler decided about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from weft import torch_adapter
from weft.capture.node_kinds import group_of, is_collective, is_effect, is_wait, mutates
from weft.capture.node_meta import meta_fault
from weft.capture.printer import print_graph
from weft.capture.step_interface import Input, Output, Update
from weft.errors import MalformedGraph


@dataclass
class StepGraph:
    """A captured step.

    Attributes:
        graph: the FX graph; its output node holds one flat tuple, aligned with ``outputs``.
        inputs: one entry per placeholder, in order.
        outputs: the meaning of each output.
        groups: for each name of a process group in the graph (a mesh axis, equal on every rank) the name that torch
            gave the group on this rank.
    """

    graph: torch.fx.Graph
    inputs: list[Input]
    outputs: list[Output]
    groups: dict[str, str] = field(default_factory=dict)

    @property
    def placeholders(self) -> list[torch.fx.Node]:
        """The placeholder nodes, aligned with ``inputs``."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[Any, ...]:
        """Arguments of the output node, aligned with ``outputs``."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]

    def input(self, name: str) -> Input:
        """The input whose placeholder has this name."""
        return next(entry for entry in self.inputs if entry.name == name)

    def updates(self) -> Iterator[tuple[Input, torch.fx.Node]]:
        """Pairs of an input and the node that computes its new value."""
        by_name = {entry.name: entry for entry in self.inputs}
        for what, node in zip(self.outputs, self.results, strict=True):
            if isinstance(what, Update):
                yield by_name[what.input], node

    def collectives(self) -> list[torch.fx.Node]:
        """The nodes that start collectives, in order."""
        return [node for node in self.graph.nodes if is_collective(node)]

    def copy(self) -> StepGraph:
        """A copy with nodes of its own, which passes may change; the fake values are shared."""
        graph = torch.fx.Graph()
        nodes: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                graph.output(torch.fx.node.map_arg(node.args[0], nodes.__getitem__))
            else:
                nodes[node] = copy_node(graph, node, nodes.__getitem__)
        return StepGraph(graph, list(self.inputs), list(self.outputs), dict(self.groups))

    def check(self) -> StepGraph:
        """Verify the grammar of a StepGraph and return it.

        Raises:
            MalformedGraph: a placeholder without an entry, an output without a meaning, a node that uses a later one,
                a call that mutates its arguments, a collective that nothing waits for, an unknown process group,
                metadata that does not follow the schema of :mod:`weft.capture.node_meta`, an update of other sizes or
                dtype than its input.
        """
        _check(self)
        return self

    def __len__(self) -> int:
        return len(self.graph.nodes)

    def __str__(self) -> str:
        return print_graph(self)


def copy_node(
    graph: torch.fx.Graph, node: torch.fx.Node, new: Callable[[torch.fx.Node], torch.fx.Node]
) -> torch.fx.Node:
    """A copy of ``node`` in ``graph``, with its metadata, that reads ``new`` of each of its operands."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), new)  # type: ignore[misc]
    copied = torch_adapter.new_node(graph, node.op, node.target, args, kwargs, node.name)
    # Assigning to an attribute of a node takes it out of the graph's table of operations and back in.
    copied.meta.update(node.meta)
    if node.type is not None:
        copied.type = node.type
    return copied


def calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that call something, in order: no inputs and not the output. A list, because callers erase nodes."""
    return [node for node in graph.nodes if node.op == "call_function"]


def drop_dead(graph: torch.fx.Graph) -> int:
    """Erase nodes without users and without effects, last first; returns their number."""
    erased = 0
    for node in reversed(graph.nodes):
        if not node.users and not is_effect(node):
            graph.erase_node(node)
            node.meta.pop("val", None)  # torch keeps erased nodes for as long as the graph
            erased += 1
    return erased


def _check(step: StepGraph) -> None:
    nodes = list(step.graph.nodes)
    names = [node.name for node in nodes if node.op == "placeholder"]
    _require(names == [entry.name for entry in step.inputs], step, None, "placeholders and inputs differ")
    _require(len(step.results) == len(step.outputs), step, None, "outputs without a meaning")
    known = set(names)
    for what in step.outputs:
        _require(not isinstance(what, Update) or what.input in known, step, None, f"{what} updates no input")
    _check_updates(step)
    earlier: set[torch.fx.Node] = set()
    for node in nodes:
        _require(earlier.issuperset(node.all_input_nodes), step, node, "uses a later node")
        earlier.add(node)
        if node.op == "call_function":
            _require(not mutates(node.target), step, node, "mutates an argument")
            if is_collective(node):
                _require(any(_waited(user) for user in node.users), step, node, "collective that nothing waits for")
            if group := group_of(node):
                _require(group in step.groups, step, node, f"unknown process group {group!r}")
        fault = meta_fault(node)
        _require(fault is None, step, node, fault or "")


def _check_updates(step: StepGraph) -> None:
    """The new value of an input has its sizes and its dtype."""
    placeholders = {node.name: node.meta.get("val") for node in step.placeholders}
    for entry, node in step.updates():
        old, new = placeholders[entry.name], node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            continue
        if old.dtype != new.dtype or [*map(str, old.shape)] != [*map(str, new.shape)]:
            what = f"{new.dtype} {list(new.shape)}, not {old.dtype} {list(old.shape)}"
            _require(False, step, node, f"the new value of {entry.path} is {what}")


def _waited(user: torch.fx.Node) -> bool:
    """Coalesced collectives return a list: each element is waited for after its getitem."""
    return is_wait(user) or any(is_wait(after) for after in user.users)


def _require(holds: bool, step: StepGraph, node: torch.fx.Node | None, what: str) -> None:
    if not holds:
        raise MalformedGraph(what, neighbourhood(step.graph.nodes, node))


def neighbourhood(nodes: Iterable[torch.fx.Node], node: torch.fx.Node | None, around: int = 5) -> str:
    """The lines of the graph around ``node``, the node itself marked."""
    listed = list(nodes)
    at = listed.index(node) if node is not None else 0
    window = listed[max(0, at - around) : at + around + 1]
    return "\n".join(f"{'-->' if n is node else '   '} {n.format_node() or n.name}" for n in window)
