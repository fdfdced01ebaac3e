"""Cuts the graph of one path through a step into segments, at the nodes where the step branches on a value.

A path is captured as one StepGraph with nodes :func:`branch` in it. Each segment becomes a
StepGraph of its own: an ordinary one, which compiles like a whole step. Between segments a value travels in one of two
ways. Inputs of the step that a segment writes are updated in place at its end, and later segments read them from their
places in Python state. All other values are returned by the segment that computes them, under the names of their nodes.

The nodes before a branch are the same on all paths through it, and so are their names. So a segment that was compiled
for one path serves the others.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from weft import torch_adapter
from weft.capture.graph import StepGraph, drop_dead
from weft.capture.node_kinds import WAIT, is_collective, is_effect, is_wait
from weft.capture.node_meta import Meta, same_meta
from weft.capture.step_interface import Input, Output, Return, Role, Update
from weft.capture.user_code import format_frames
from weft.errors import RuntimeCheckFailed

Node = torch.fx.Node
Outcome = bool | int

_LAYOUT_READS = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int)


def branch(value: Outcome, outcome: Outcome | None, *, held: Sequence[Any], written: Sequence[Any]) -> None:
    """Target of a node where the step goes on in a way that depends on ``value``; the nodes after it belong to one way.

    Args:
        value: what the step's Python asked for.
        outcome: the value for which the nodes after this one were captured; None where the capture ends here.
        held: the values that later nodes may use.
        written: pairs of an input that was written before this point, and its value at this point.

    Raises:
        RuntimeCheckFailed: the graph is run as one program, and the value is another one.
    """
    if outcome is not None and value != outcome:
        raise RuntimeCheckFailed(f"the captured branch is for the value {outcome}", f"the value {value}")


@dataclass(frozen=True)
class Segment:
    """The nodes of a path from one branch, or its beginning, to the next branch, or its end.

    Attributes:
        graph: what runs. If a branch ends the segment, the first of its returned values is the one that decides, and
            the others are those of ``kept``.
        sources: for each input of ``graph``: the number of the path's input that it is, or the name of a value that an
            earlier segment returned.
        kept: names of the values that it returns for later segments.
        used: names of the values of this and of earlier segments that later ones may need.
        digest: of all nodes up to its end as they were recorded, equal on all paths that share the segment.
        line: of the user's, where the branch is that ends it; "" at the end of a path.
    """

    graph: StepGraph
    sources: list[int | str]
    kept: list[str]
    used: frozenset[str]
    digest: str
    line: str

    @property
    def on_gpu(self) -> bool:
        """Whether a tensor of the segment is on a GPU."""
        vals = [node.meta.get("val") for node in self.graph.placeholders]
        return any(isinstance(val, torch.Tensor) and val.is_cuda for val in vals)


def is_branch(node: Node) -> bool:
    """Whether the step branches at this node."""
    return node.target is branch


def segments_of(path: StepGraph) -> tuple[list[Segment], Segment | None]:
    """The segments of a captured path that end at branches, in order, and the last one, which goes to the end of the
    step. There is none where the path ends at a branch."""
    location = _ValuePlaces(path)
    segments: list[Segment] = []
    nodes: list[Node] = []
    for node in path.graph.nodes:
        if is_branch(node):
            segments.append(_up_to(node, nodes, location))
            nodes = []
            if node.args[1] is None:
                return segments, None
        elif node.op == "call_function":
            nodes.append(node)
    return segments, _last(path, nodes, location)


class _ValuePlaces:
    """Where the value of each node is at a branch: in the memory of an input, or among the values that are kept."""

    def __init__(self, path: StepGraph) -> None:
        self.path = path
        self.placeholders = path.placeholders
        self._numbers = {node: at for at, node in enumerate(self.placeholders)}
        self._written: dict[Node, Node] = {}  # by placeholder: the node of its present value
        self._in_place = {node: node for node in self._numbers}
        self._kept: frozenset[Node] = frozenset()

    def changed(self, written: Iterable[tuple[Node, Node]]) -> list[tuple[Node, Node]]:
        """The pairs (placeholder, present value) of the inputs whose memory does not hold their present value yet.

        ``written`` are the pairs of those whose value is not the one that they had at the beginning.
        """
        present = {**{each: each for each in self._written}, **dict(written)}
        return [(each, now) for each, now in present.items() if self._written.get(each, each) is not now]

    def added(self, held: Iterable[Node]) -> list[Node]:
        """Those of the nodes whose values are not kept yet."""
        return [node for node in held if node not in self._kept]

    def advance(self, held: Iterable[Node], written: Iterable[tuple[Node, Node]]) -> None:
        """Go on to the next segment; only what is in use at the branch is kept."""
        self._written.update(self.changed(written))
        self._kept = frozenset(held)
        self._in_place = {self._written.get(each, each): each for each in self._numbers}

    def place(self, node: Node) -> tuple[Input, int] | None:
        """The input of the path whose memory holds the value of a node, and its number."""
        placeholder = self._in_place.get(node)
        return None if placeholder is None else self.input_of(placeholder)

    def place_of_layout(self, node: Node) -> tuple[Input, int] | None:
        """The input whose memory has the sizes and strides of a node's value; its values may be later ones.

        An update writes in place. Only one by ``out=`` may resize, and then sizes must have been read before.
        """
        if node not in self._numbers or not _same_layout(self._written.get(node, node), node):
            return self.place(node)
        return self.input_of(node)

    def input_of(self, placeholder: Node) -> tuple[Input, int]:
        """An input of the path and its number, by its placeholder."""
        number = self._numbers[placeholder]
        return self.path.inputs[number], number

    def is_kept(self, node: Node) -> bool:
        """Whether an earlier segment returned the value of a node for later ones."""
        return node in self._kept


def _same_layout(now: Node, before: Node) -> bool:
    new, old = now.meta["val"], before.meta["val"]
    numbers = [(*each.shape, *each.stride()) for each in (new, old)]
    return new.dim() == old.dim() and all(map(torch_adapter.surely_equal, *numbers))


class _SegmentWriter:
    """Writes the graph of one segment."""

    def __init__(self, nodes: list[Node], location: _ValuePlaces) -> None:
        self._location = location
        self._graph = torch.fx.Graph()
        self._copies: dict[Node, Node] = {}
        self._places: dict[int, Node] = {}
        self._last_input = self._graph._root
        self._inputs: list[Input] = []
        self._sources: list[int | str] = []
        self._outputs: list[Output] = []
        self._results: list[Any] = []
        for node in nodes:
            if is_wait(node) and location.is_kept(node.args[0]):  # type: ignore[arg-type]
                self._copies[node] = self._value(node.args[0])  # type: ignore[arg-type]  # waited for at the branch
            else:
                self._copy(node)

    def returns(self, value: Any, what: Output | None = None) -> None:
        """Add an output of the path, or a value for a later segment."""
        self._outputs.append(Return(len(self._outputs)) if what is None else what)
        self._results.append(torch.fx.map_arg(value, self._value))

    def keeps(self, node: Node) -> None:
        """Return the value of a node for later segments; a collective is waited for first."""
        self.returns(node)
        source = node.args[0] if node.target is operator.getitem else node
        if isinstance(source, Node) and is_collective(source) and source in self._copies:
            waited = self._graph.call_function(WAIT, (self._results[-1],))
            waited.meta = same_meta(node)
            self._results[-1] = waited

    def name_of(self, placeholder: Node | None) -> str:
        """The name of an input of the path in the segment; "" for None."""
        return "" if placeholder is None else self._input(*self._location.input_of(placeholder)).name

    def updates(self, placeholder: Node, value: Node) -> None:
        """Write an input of the path at the end of the segment."""
        self._outputs.append(Update(self.name_of(placeholder)))
        self._results.append(self._value(value))

    def segment(self, kept: Iterable[Node] = (), used: Iterable[Node] = (), cut: Node | None = None) -> Segment:
        """The finished segment, which ends at the branch ``cut``, or with the path."""
        self._graph.output(tuple(self._results))
        drop_dead(self._graph)
        graph = StepGraph(self._graph, self._inputs, self._outputs, self._location.path.groups).check()
        names = frozenset(node.name for node in used)
        meta = cut.meta if cut is not None else {}
        frames = list(meta.get("frames", ()))
        line = format_frames(frames, source=True) if frames else ""
        return Segment(graph, self._sources, [node.name for node in kept], names, meta.get("digest", ""), line)

    def _value(self, node: Node) -> Node:
        """The copy of a node; for one of an earlier segment, the input that has its value."""
        if node not in self._copies:
            found = self._location.place(node)
            if found is not None:
                self._copies[node] = self._input(*found)
            elif self._location.is_kept(node):
                self._copies[node] = self._placeholder(Input(node.name, Role.BATCH, node.name), node.name, node.meta)
            else:
                # Arithmetic on numbers, and copies of constants: computed again in each segment that needs it.
                assert not is_effect(node), f"{node} is not kept for later segments"
                self._copy(node)
        return self._copies[node]

    def _copy(self, node: Node) -> None:
        copy = self._graph.node_copy(node, self._with_layout if node.target in _LAYOUT_READS else self._value)
        copy.meta = same_meta(node)
        self._copies[node] = copy

    def _with_layout(self, node: Node) -> Node:
        """A copy of a node, or an input of the same sizes and strides."""
        found = self._location.place_of_layout(node)
        return self._value(node) if found is None else self._input(*found)

    def _input(self, entry: Input, number: int) -> Node:
        if number not in self._places:
            self._places[number] = self._placeholder(entry, number, self._location.placeholders[number].meta)
        return self._places[number]

    def _placeholder(self, entry: Input, source: int | str, meta: Meta) -> Node:
        with self._graph.inserting_after(self._last_input):
            made = self._last_input = self._graph.placeholder(entry.name)
        made.meta = {"val": meta["val"]}
        self._inputs.append(replace(entry, name=made.name))
        self._sources.append(source)
        return made


def _up_to(cut: Node, nodes: list[Node], location: _ValuePlaces) -> Segment:
    """The segment that ends at a branch."""
    held: Any = cut.kwargs["held"]
    written: Any = cut.kwargs["written"]
    writer = _SegmentWriter(nodes, location)
    writer.returns(cut.args[0])
    kept = location.added(held)
    for node in kept:
        writer.keeps(node)
    for placeholder, now in location.changed(written):
        writer.updates(placeholder, now)
    segment = writer.segment(kept, held, cut)
    location.advance(held, written)
    return segment


def _last(path: StepGraph, nodes: list[Node], location: _ValuePlaces) -> Segment:
    """The segment that ends with the path."""
    writer = _SegmentWriter(nodes, location)
    placeholders = {node.name: node for node in location.placeholders}
    updates: list[tuple[Node, Node]] = []
    for what, value in zip(path.outputs, path.results, strict=True):
        if isinstance(what, Update):
            updates.append((placeholders[what.input], value))
    changed = location.changed(updates)
    written = {placeholder.name: placeholder for placeholder, _ in changed}
    for what, value in zip(path.outputs, path.results, strict=True):
        if not isinstance(what, Update):
            # What lies in an input that an earlier segment has updated is a view of that input here.
            writer.returns(value, replace(what, memory=writer.name_of(written.get(what.memory))))
    for placeholder, now in changed:
        writer.updates(placeholder, now)
    return writer.segment()
