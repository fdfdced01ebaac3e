"""StepGraph: one training step as a functional graph whose inputs and outputs say what they are.

The graph is a plain :class:`torch.fx.Graph` of ATen and ``_c10d_functional`` operations over *values*: no node
mutates anything a later node reads. What an in-place operation of the step did is written as the functional operation
that computes the new value, and the output list says which input that value replaces.

Every node carries in ``node.meta``:

``val``      the fake tensor (or size, or list of them) that stands for its result
``frames``   the user's file and line, innermost first, as :class:`weft.capture.user_code.Frame`
``module``   dotted path of the module whose forward made it ("" outside any module)
``stage``    ``"forward"``, ``"backward"`` or ``"optimizer"``
``inplace``  the in-place operation the step really called, where there was one (an executor may use it again)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from weft.errors import MalformedGraph


class Role(enum.Enum):
    """What an input of the step is to the training run."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    BUFFER = "buffer"
    BATCH = "batch"
    SCALAR = "scalar"


@dataclass(frozen=True)
class Input:
    """One placeholder of the graph.

    Attributes:
        name: the placeholder's name in the graph.
        role: what the tensor or number is.
        path: where it lives, as the user would write it (``model.blocks.0.weight``, ``args[0]``).
        sharding: text of global shape, mesh and placements where the tensor is one rank's part of a DTensor, else "".
    """

    name: str
    role: Role
    path: str
    sharding: str = ""


@dataclass(frozen=True)
class Update:
    """An output that becomes the new value of the input called ``input``."""

    input: str


@dataclass(frozen=True)
class Create:
    """An output that is put at a place in the user's Python state (``path``) where no tensor was before."""

    path: str


@dataclass(frozen=True)
class Return:
    """An output that the step returns: leaf number ``index`` of its flattened return value."""

    index: int


Output = Update | Create | Return


@dataclass
class StepGraph:
    """A captured step.

    Attributes:
        graph: the FX graph; its output node holds one flat tuple, aligned with ``outputs``.
        inputs: one entry a placeholder, in order.
        outputs: what becomes of each output.
        groups: names of process groups as they stand in the graph (mesh axis names, the same on every rank) to the
            names torch registered them under on this rank.
    """

    graph: torch.fx.Graph
    inputs: list[Input]
    outputs: list[Output]
    groups: dict[str, str] = field(default_factory=dict)

    @property
    def placeholders(self) -> list[torch.fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[Any, ...]:
        """Arguments of the output node, aligned with ``outputs``."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]

    def input(self, name: str) -> Input:
        return next(entry for entry in self.inputs if entry.name == name)

    def updates(self) -> Iterator[tuple[Input, torch.fx.Node]]:
        """Pairs of an input and the node that computes its new value."""
        by_name = {entry.name: entry for entry in self.inputs}
        for what, node in zip(self.outputs, self.results, strict=True):
            if isinstance(what, Update):
                yield by_name[what.input], node

    def collectives(self) -> list[torch.fx.Node]:
        return [node for node in self.graph.nodes if is_collective(node)]

    def copy(self) -> StepGraph:
        """A graph of its own nodes, which passes may change; fake values are shared."""
        graph = torch.fx.Graph()
        nodes: dict[torch.fx.Node, torch.fx.Node] = {}
        results = graph.graph_copy(self.graph, nodes)
        graph.output(results)
        return StepGraph(graph, list(self.inputs), list(self.outputs), dict(self.groups))

    def check(self) -> StepGraph:
        """Verify the grammar of a StepGraph and return it.

        Raises:
            MalformedGraph: a placeholder without an entry, an output without a meaning, a node that uses a later one,
                a call that mutates its arguments, a collective that nothing waits for, an unknown process group.
        """
        _check(self)
        return self

    def __len__(self) -> int:
        return len(self.graph.nodes)

    def __str__(self) -> str:
        from weft.capture.printer import print_graph

        return print_graph(self)


WAIT = torch.ops._c10d_functional.wait_tensor.default

# Of operations that start collectives: torch's, and weft's (see inductor/passes/wire_dtype.py).
_NAMESPACES = ("_c10d_functional", "weft_c10d")


def is_collective(node: torch.fx.Node) -> bool:
    """Whether the node starts a collective (its wait is a node of its own): an operation, or a callable that says so
    (``collective``) and over which group (``group``)."""
    if node.op != "call_function" or node.target is WAIT:
        return False
    return getattr(node.target, "namespace", "") in _NAMESPACES or getattr(node.target, "collective", False)


def is_wait(node: torch.fx.Node) -> bool:
    """Whether the node waits for a collective and hands on what it is given: the operation, or a callable that says so
    (``waits``)."""
    return node.target is WAIT or getattr(node.target, "waits", False)


def is_effect(node: torch.fx.Node) -> bool:
    """Whether the node must stay even when nothing uses its result (collectives, checks, opaque calls, random
    state)."""
    return (
        node.op in ("placeholder", "output")
        or is_collective(node)
        or is_wait(node)
        or bool(node.meta.get("effect"))
        or is_random(node)
    )


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node draws from a random generator, so that its order among such nodes matters."""
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def drop_dead(graph: torch.fx.Graph) -> int:
    """Erase nodes without users and without effects, last first; returns how many."""
    erased = 0
    for node in reversed(graph.nodes):
        if not node.users and not is_effect(node):
            graph.erase_node(node)
            erased += 1
    return erased


def _check(step: StepGraph) -> None:
    nodes = list(step.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    names = [node.name for node in nodes if node.op == "placeholder"]
    _require(names == [entry.name for entry in step.inputs], step, None, "placeholders and inputs differ")
    _require(len(step.results) == len(step.outputs), step, None, "outputs without a meaning")
    known = set(names)
    for what in step.outputs:
        _require(not isinstance(what, Update) or what.input in known, step, None, f"{what} updates no input")
    for node in nodes:
        _require(all(order[used] < order[node] for used in node.all_input_nodes), step, node, "uses a later node")
        if node.op == "call_function":
            _require(not _mutates(node.target), step, node, "mutates an argument")
        if is_collective(node):
            _require(any(_waited(user) for user in node.users), step, node, "collective that nothing waits for")
        group = group_of(node)
        _require(not group or group in step.groups, step, node, f"unknown process group {group!r}")


def _waited(user: torch.fx.Node) -> bool:
    """Coalesced collectives return a list: each element is waited for after its getitem."""
    return is_wait(user) or any(is_wait(after) for after in user.users)


def group_of(node: torch.fx.Node) -> str:
    """Name of the process group that a node's operation works over, "" for one that takes no group."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target.group if is_collective(node) else ""  # type: ignore[union-attr]
    for at, argument in enumerate(schema.arguments):
        if argument.name in ("group_name", "group"):
            named = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            return named if isinstance(named, str) else ""
    return ""


def _mutates(target: Callable[..., Any] | str) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _require(holds: bool, step: StepGraph, node: torch.fx.Node | None, what: str) -> None:
    if not holds:
        raise MalformedGraph(what, neighbourhood(step.graph.nodes, node))


def neighbourhood(nodes: Iterable[torch.fx.Node], node: torch.fx.Node | None, around: int = 5) -> str:
    """The lines of the graph around ``node``, the node itself marked."""
    listed = list(nodes)
    at = listed.index(node) if node is not None else 0
    window = listed[max(0, at - around) : at + around + 1]
    return "\n".join(f"{'-->' if n is node else '   '} {n.format_node() or n.name}" for n in window)
