"""Sharded values gathered once and kept, or gathered again where they are needed again.

A step may gather one value several times: for forward and for backward, for every microbatch, for two modules that
share a weight. In a graph these are all-gathers of one node over one group; which wrapper asked for them, and whether
it said ``reshard_after_forward``, is not looked at. :func:`gather_once` keeps the first of them, :func:`gather_again`
cuts a gathered value's life in two with a gather more. So whatever a step was written with, a schedule may choose.

A graph says values, not places: a shard that an optimizer has updated is another node, and is never taken for the one
before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import WAIT, StepGraph
from weft.inductor.comm.problem import Kind, Problem
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.passes.escapes import escaping
from weft.inductor.runtime.geometry import looks_into, storages
from weft.inductor.runtime.placement import effects_of, writing_form

Node = torch.fx.Node

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


@dataclass(eq=False)
class Gathered:
    """A sharded value, gathered, and who reads it whole.

    Attributes:
        start: the all-gather.
        wait: what the readers wait for.
        uses: the nodes that compute with it, in order; views of it are not among them.
        again: how many of the uses, from the first on, come before the shard is written to in place: before them, it
            can be gathered again.
    """

    start: Node
    wait: Node
    uses: list[Node]
    again: int


def gather_once(step: StepGraph) -> list[Gathered]:
    """Let every sharded value be gathered once, before its first use. Changes ``step``.

    Left as they are, and out of the result: gathers whose result the caller gets, an operation writes to, or nobody
    reads.
    """
    held = escaping(step)
    place = {node: at for at, node in enumerate(step.graph.nodes)}
    writes = _first_writes(place)
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in step.graph.find_nodes(op="call_function", target=GATHER):
        waits = list(node.users)
        ordinary = all(wait.target is WAIT and wait.users and wait not in held for wait in waits)
        if ordinary and not _is_written(waits):
            groups.setdefault((*node.args, *node.kwargs.items()), []).append(node)
    found = []
    for starts in groups.values():
        first, *others = sorted(starts, key=place.__getitem__)
        kept, *others = [*first.users, *(wait for start in others for wait in start.users)]
        for wait in others:
            earliest = min(wait.users, key=place.__getitem__)
            if place[earliest] < place[kept]:
                earliest.prepend(kept)
                place[kept] = place[earliest]
            wait.replace_all_uses_with(kept)
        for node in (*others, *starts[1:]):
            step.graph.erase_node(node)
        readers = {user for view in _views(kept) for user in view.users if not looks_into(user)}
        uses = sorted(readers, key=place.__getitem__)
        until = min((writes[key] for key in storages(first.all_input_nodes[0]) if key in writes), default=len(place))
        if uses:
            found.append(Gathered(first, kept, uses, sum(place[use] <= until for use in uses)))
    return found


def gather_again(step: StepGraph, gathered: Gathered, at: Iterable[int]) -> list[Gathered]:
    """Gather a value once more before each of its uses number ``at``; that use and those after it read the new gather.
    Changes ``step``.

    Returns:
        The value as it is gathered from then on, one entry a gather.
    """
    uses, parts = gathered.uses, []
    cuts = [0, *sorted(at), len(uses)]
    for begin, end in itertools.pairwise(cuts[1:]):
        parts.append(_gather_for(step, gathered, uses[begin:end]))
    for view in reversed(_views(gathered.wait)[1:]):
        if not view.users:
            step.graph.erase_node(view)
    first = uses[: cuts[1]]
    return [Gathered(gathered.start, gathered.wait, first, len(first)), *parts]


@dataclass(frozen=True)
class Gap:
    """Where a gathered value only waits for its next use.

    Attributes:
        value: which one.
        use: the number of the next use.
        begin, end: positions in an order between the uses, ``end`` not included.
        size: bytes held.
        worth: seconds that another gather takes, for a byte held for a second.
    """

    value: int
    use: int
    begin: int
    end: int
    size: int
    worth: float


def gaps(values: Sequence[Gathered], problem: Problem, nodes: Sequence[Node], order: Sequence[int]) -> list[Gap]:
    """The gaps between uses of ``values`` that a gather more could close, those first that are least worth holding.

    Args:
        problem, nodes: of the graph that the values are in.
        order: of the problem; gaps are between positions in it.
    """
    tasks, task = problem.tasks, {node: at for at, node in enumerate(nodes)}
    place = {nodes[at]: position for position, at in enumerate(order)}
    clock = [0.0, *itertools.accumulate(tasks[at].seconds * (tasks[at].kind is Kind.COMPUTE) for at in order)]
    sizes = {storage.maker: storage.size for storage in problem.storages}
    found = []
    for number, value in enumerate(values):
        start = task[value.start]
        size, seconds = sizes.get(start, 0), tasks[start].seconds
        for use in range(1, value.again):
            begin, end = place[value.uses[use - 1]] + 1, place[value.uses[use]]
            held = size * (clock[end] - clock[begin]) if begin < end else 0.0
            if held > 0:
                found.append(Gap(number, use, begin, end, size, seconds / held))
    return sorted(found, key=lambda gap: (gap.worth, gap.value, gap.use))


def let_go(gaps: Iterable[Gap], memory: torch.Tensor, target: int) -> list[Gap]:
    """The gaps to close so that no more than ``target`` bytes are held, or fewer where closing all does not do:
    greedily, of those that are open at the peak the one that is least worth holding.

    Args:
        gaps: sorted by worth.
        memory: bytes held at each position of the order, with all gaps open. Is changed.
    """
    left, chosen = list(gaps), []
    while int(memory.max()) > target:
        peak = int(memory.argmax())
        gap = next((gap for gap in left if gap.begin <= peak < gap.end), None)
        if gap is None:
            break
        left.remove(gap)
        chosen.append(gap)
        memory[gap.begin : gap.end] -= gap.size
    return chosen


def _gather_for(step: StepGraph, gathered: Gathered, uses: list[Node]) -> Gathered:
    """A gather for some of the uses, which read it from then on."""
    copies: dict[Node, Node] = {}
    copy = _Copier(step)
    with step.graph.inserting_before(uses[0]):
        for node in (gathered.start, gathered.wait):
            copies[node] = copy(node, copies)
    views = set(_views(gathered.wait))
    for use in uses:
        for read in use.all_input_nodes:
            if read in views:
                with step.graph.inserting_before(use):
                    _copy_view(read, copies, copy)
                use.replace_input_with(read, copies[read])
    return Gathered(copies[gathered.start], copies[gathered.wait], uses, len(uses))


def _copy_view(view: Node, copies: dict[Node, Node], copy: _Copier) -> None:
    chain = []
    while view not in copies:
        chain.append(view)
        view = view.all_input_nodes[0]
    for node in reversed(chain):
        copies[node] = copy(node, copies)


class _Copier:
    """Copies nodes; fakes that share memory go on doing so, in a memory of their own."""

    def __init__(self, step: StepGraph) -> None:
        self.graph = step.graph
        self._storages: dict[int, Any] = {}

    def __call__(self, node: Node, copies: dict[Node, Node]) -> Node:
        made = self.graph.node_copy(node, lambda used: copies.get(used, used))
        made.meta = {**node.meta, "val": self._fake(node.meta["val"])}
        return made

    def _fake(self, val: Any) -> Any:
        if isinstance(val, (list, tuple)):
            return [self._fake(item) for item in val]
        key = torch_adapter.storage_key(val)
        if key not in self._storages:
            meta = torch.empty(val.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
            self._storages[key] = meta.untyped_storage()
        layout = val.size(), val.stride(), val.storage_offset()
        return torch_adapter.new_fake(val.fake_mode, val.device, val.dtype, *layout, self._storages[key])


def _views(wait: Node) -> list[Node]:
    """``wait`` and the views of it, each after what it looks into."""
    found = [wait]
    for view in found:
        found += [user for user in view.users if looks_into(user)]
    return found


def _first_writes(place: dict[Node, int]) -> dict[int, int]:
    """By storage, the place of the first operation that writes to it."""
    found: dict[int, int] = {}
    for node, at in place.items():
        for written in _written(node):
            for key in storages(written):
                found.setdefault(key, at)
    return found


def _is_written(waits: list[Node]) -> bool:
    """Whether an operation writes to a gathered value."""
    views = [view for wait in waits for view in _views(wait)]
    return any(view in _written(user) for view in views for user in view.users)


def _written(node: Node) -> list[Node]:
    """The arguments that a node writes to."""
    if isinstance(node.target, MultiTensor):
        given = [node.args[at] for at in node.target.updated]
    elif (op := writing_form(node)) is not None and (what := effects_of(op)) is not None:
        given = [node.args[at] if at < len(node.args) else node.kwargs.get(name) for at, name in what.writes]
    else:
        return []
    found: list[Node] = []
    torch.fx.node.map_arg(given, found.append)
    return found
