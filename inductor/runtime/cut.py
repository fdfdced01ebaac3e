"""Cut a step into pieces, so that a CUDA graph holds as much of it as it can.

The first piece is what the host can compute before all else: numbers, draws, batches on their way to the GPU. The rest
is cut where something cannot be recorded: a number that the GPU brings to the host, a call of Python code, a collective
over the CPU. Order is kept, but for the first piece.

Between pieces go tensors and numbers that operations made. Views and sizes are made again where they are needed, and an
input is updated in the last piece that reads its memory, or later.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.capture.graph import Input, Output, Return, Role, StepGraph, Update, is_collective, is_effect, is_wait
from weft.inductor.passes.host import goes_to_gpu, host_nodes, tensors_of
from weft.inductor.passes.order import waits_of
from weft.inductor.runtime.capturable import where, why_not
from weft.inductor.runtime.geometry import looks_into, storages

Node = torch.fx.Node

_HOST = 0
# A piece of fewer calls is not worth a recording, unless it is all there is.
_FEWEST = 8


@dataclass
class Piece:
    """A stretch of a step, a step by itself.

    Attributes:
        step: its graph; what goes to other pieces is returned.
        takes: names of the values that it is called with, aligned with the inputs of ``step``.
        makes: names of the values that it returns, aligned with the outputs that are not updates.
        why_not: why it is not recorded; None where it can be.
        internal: numbers of the values among ``makes`` that only go to other pieces.
    """

    step: StepGraph
    takes: list[str] = field(default_factory=list)
    makes: list[str] = field(default_factory=list)
    why_not: str | None = None
    internal: frozenset[int] = frozenset()


def result_name(at: int) -> str:
    """What output number ``at`` of the whole step is called among the values."""
    return f"result {at}"


def cut(step: StepGraph) -> list[Piece]:
    """The pieces of a step, in the order to run them."""
    return _Cutter(step).run()


class _Cutter:
    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.host = host_nodes(step)
        self.reasons: list[str | None] = ["the host computes it"]
        self.at: dict[Node, int] = {}  # the piece of each call; what is made again where it is needed has none

    def run(self) -> list[Piece]:
        self._assign(self._unrecordable())
        self._join()
        updates = self._updates()
        results = self._results(updates)
        builders = [_Builder(self, number) for number in range(len(self.reasons))]
        for node, number in self.at.items():
            builders[number].call(node)
        for (placeholder, value), number in updates.items():
            builders[number].update(placeholder, value)
        for at, number in results.items():
            builders[number].returns(self.step.results[at], result_name(at))
        wanted = {name for builder in builders for name in builder.takes}
        pieces = [builder.build(wanted, reason) for builder, reason in zip(builders, self.reasons, strict=True)]
        return [piece for piece in pieces if piece.step.outputs or self._matters(piece)]

    def _matters(self, piece: Piece) -> bool:
        """Whether a piece without outputs does anything (checks of numbers, draws, calls of Python code)."""
        return any(node.op == "call_function" and is_effect(node) for node in piece.step.graph.nodes)

    # ---- which piece

    def _unrecordable(self) -> dict[Node, str]:
        """The calls that cannot be recorded, each with its reason. A collective and its waits go together: an event of
        a recording cannot be waited for outside of it, nor one from outside in it."""
        found = {}
        for node in self.step.graph.nodes:
            if node.op != "call_function" or node.target is operator.getitem or self._again(node):
                continue  # an element is in the piece of its list
            if (why := why_not(node, self.step)) is not None:
                found[node] = why + where(node)
        return found

    def _again(self, node: Node) -> bool:
        """Whether the node is made again by each piece that needs it: views, and what follows from sizes."""
        if node in self.host or is_wait(node):
            return False
        if node.target is operator.getitem:
            return self._again(node.args[0]) if isinstance(node.args[0], Node) else False
        if node.op != "call_function" or is_collective(node) or node.meta.get("effect"):
            return False
        if torch.Tag.data_dependent_output in getattr(node.target, "tags", ()):
            return False
        return looks_into(node) or not _computes(node)

    def _assign(self, unrecordable: dict[Node, str]) -> None:
        while True:
            self._number(unrecordable)
            torn = {
                node: "a collective is waited for in another piece"
                for node in self.at
                if is_collective(node) and self.reasons[self.at[node]] is None
                for wait in waits_of(node)
                if self.at[wait] != self.at[node]
            }
            if not torn:
                return
            unrecordable |= torn
            unrecordable |= {wait: why for node, why in torn.items() for wait in waits_of(node)}

    def _number(self, unrecordable: dict[Node, str]) -> None:
        del self.reasons[1:]
        self.at = {}
        for node in self.step.graph.nodes:
            if node.op != "call_function" or self._again(node):
                continue
            if node in self.host or goes_to_gpu(node, self.host):
                self.at[node] = _HOST
            elif node.target is operator.getitem:
                self.at[node] = self.at[node.args[0]]
            else:
                why = unrecordable.get(node)
                if len(self.reasons) == 1 or (self.reasons[-1] is None) != (why is None):
                    self.reasons.append(why)
                self.at[node] = len(self.reasons) - 1

    def _join(self) -> None:
        """Let recordable pieces that are too small run with those around them."""
        counts = [0] * len(self.reasons)
        for node, number in self.at.items():
            counts[number] += _computes(node)
        recordable = [number for number, why in enumerate(self.reasons) if why is None]
        if len(recordable) < 2:
            return
        for number in recordable:
            if counts[number] < _FEWEST:
                self.reasons[number] = "it is small"
        reasons: list[str | None] = [self.reasons[_HOST]]
        new = [_HOST]
        for why in self.reasons[1:]:
            if len(reasons) == 1 or why is None or reasons[-1] is None:
                reasons.append(why)
            new.append(len(reasons) - 1)
        self.reasons = reasons
        self.at = {node: new[number] for node, number in self.at.items()}

    # ---- what goes out

    def _updates(self) -> dict[tuple[Node, Node], int]:
        """For each input that is updated, and its new value, the piece that does it."""
        by_name = {node.name: node for node in self.step.placeholders}
        end = len(self.reasons) - 1
        readers: dict[int, int] = {}

        def read(value: Node, number: int) -> None:
            for key in storages(self._base(value)):
                readers[key] = max(number, readers.get(key, 0))

        for node, number in self.at.items():
            for used in node.all_input_nodes if node.target is not operator.getitem else ():
                read(used, number)
        for _, value in self.step.updates():
            if self._base(value).op == "placeholder":
                read(value, end)
        found = {}
        for entry, value in self.step.updates():
            placeholder = by_name[entry.name]
            last = max((readers.get(key, 0) for key in storages(placeholder)), default=0)
            found[placeholder, value] = max(last, self.at.get(self._base(value), end))
        return found

    def _results(self, updates: dict[tuple[Node, Node], int]) -> dict[int, int]:
        """For each output that is created or returned, the piece that hands it out: the one that makes it; for the old
        value of an input the one that updates it."""
        updated = {key: number for (node, _), number in updates.items() for key in storages(node)}
        found = {}
        for at, (what, value) in enumerate(zip(self.step.outputs, self.step.results, strict=True)):
            if isinstance(what, Update):
                continue
            base = self._base(value) if isinstance(value, Node) else None
            if base is None or base.op == "placeholder":
                numbers = [updated[key] for key in (storages(base) if base is not None else ()) if key in updated]
                found[at] = max(numbers, default=len(self.reasons) - 1)
            else:
                found[at] = self.at.get(base, len(self.reasons) - 1)
        return found

    def _base(self, node: Node) -> Node:
        """What a view that is made again looks into."""
        while node.op == "call_function" and node not in self.at and looks_into(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node


def _computes(node: Node) -> bool:
    """Whether a call makes tensors: all but views and arithmetic on numbers."""
    return not looks_into(node) and (bool(tensors_of(node)) or bool(node.meta.get("effect")))


class _Builder:
    """Writes one piece."""

    def __init__(self, cutter: _Cutter, number: int) -> None:
        self.cutter = cutter
        self.number = number
        self.graph = torch.fx.Graph()
        self.nodes: dict[Node, Node] = {}
        self.takes: dict[str, Node] = {}
        self.inputs: list[Input] = []
        self.outputs: list[tuple[Output, Any, str]] = []
        self.last: Node | None = None  # the last placeholder

    def call(self, node: Node) -> None:
        self.nodes[node] = self.graph.node_copy(node, self.value)

    def update(self, placeholder: Node, value: Node) -> None:
        target = self.value(placeholder)
        self.outputs.append((Update(target.name), self.value(value), ""))

    def returns(self, value: Any, name: str) -> None:
        made = self.value(value) if isinstance(value, Node) else value
        self.outputs.append((Return(len(self.outputs)), made, name))

    def value(self, node: Node) -> Node:
        """The node of this piece for a value of the step: made here, made here again, or taken from before."""
        if node not in self.nodes:
            given = node.op == "placeholder" or node in self.cutter.at
            self.nodes[node] = self._take(node) if given else self.graph.node_copy(node, self.value)
        return self.nodes[node]

    def _take(self, node: Node) -> Node:
        self.takes[node.name] = node
        with self.graph.inserting_after(self.last) if self.last else self.graph.inserting_before():
            made = self.graph.placeholder(node.name)
        made.meta = dict(node.meta)
        self.last = made
        if node.op == "placeholder":
            entry = self.cutter.step.input(node.name)
            self.inputs.append(Input(made.name, entry.role, entry.path, entry.sharding))
        else:
            recorded = self.cutter.reasons[self.cutter.at[node]] is None
            self.inputs.append(Input(made.name, Role.BUFFER if recorded else Role.BATCH, node.name))
        return made

    def build(self, wanted: set[str], reason: str | None) -> Piece:
        """The piece, which also hands out those of its values that are ``wanted``."""
        internal = []
        for node, made in self.nodes.items():
            if node.name in wanted and self.cutter.at.get(node) == self.number:
                internal.append(node.name)
                self.outputs.append((Return(len(self.outputs)), made, node.name))
        self.graph.output(tuple(value for _, value, _ in self.outputs))
        step = StepGraph(self.graph, self.inputs, [what for what, _, _ in self.outputs], dict(self.cutter.step.groups))
        makes = [name for what, _, name in self.outputs if not isinstance(what, Update)]
        inner = frozenset(at for at, name in enumerate(makes) if name in internal)
        return Piece(step, list(self.takes), makes, reason, inner)
