"""Resharding: a gathered parameter is kept until its last use, or freed and gathered again.

A step can gather one value several times: for forward and backward, for each microbatch, for two modules that share a
weight. In the graph these are all-gathers of one node over one group. Which wrapper issued them, and its
``reshard_after_forward``, does not matter: :func:`gather_once` keeps only the first all-gather, and :func:`add_gathers`
splits the live range of the result by further all-gathers. So the schedule decides, whatever the user wrote.

A shard that the optimizer has updated is another node of the graph, so old and new values are never confused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph, copy_node
from weft.capture.node_kinds import WAIT
from weft.capture.node_meta import same_meta
from weft.inductor.cost.task_graph import Kind, TaskGraph
from weft.inductor.graph.aliasing import effects_of, readers_of, storages, with_views
from weft.inductor.graph.collectives import ALL_GATHER, single_calls
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.fake_values import take_memory
from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.runtime.placement import writing_form

Node = torch.fx.Node


@dataclass(eq=False)
class Gathered:
    """A gathered value and its uses.

    Attributes:
        start: the all-gather.
        wait: the wait for it, which its users read.
        uses: the nodes that compute with it, in order, without views of it.
        regatherable: how many of the uses, counted from the first, come before the first write to the shard. Before
            these uses it can be gathered again.
    """

    start: Node
    wait: Node
    uses: list[Node]
    regatherable: int


def gather_once(step: StepGraph) -> list[Gathered]:
    """Merge all-gathers of the same value into one, before its first use. Changes ``step``.

    Three kinds of gather stay unchanged and are not in the result: those whose result the caller gets, an operation
    writes to, or nothing reads.
    """
    escaped = escaping(step)
    place = {node: at for at, node in enumerate(step.graph.nodes)}
    written, writes = writes_of(place)
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in single_calls(step, ALL_GATHER.kind):
        waits = list(node.users)
        # With one gather in place of several, a result that the caller holds, or that is written to, would be seen by
        # all of them.
        ordinary = all(wait.target is WAIT and wait.users and wait not in escaped for wait in waits)
        if ordinary and written.isdisjoint(with_views(*waits)):
            # The shard's node is part of the key: the shard after an update is another node.
            groups.setdefault((node.target, *node.args, *node.kwargs.items()), []).append(node)
    values = []
    for starts in groups.values():
        first, *others = sorted(starts, key=place.__getitem__)
        kept, *others = [*first.users, *(wait for start in others for wait in start.users)]
        for wait in others:
            # Another gather may have been read first: the wait that is kept must precede all readers.
            earliest = min(wait.users, key=place.__getitem__)
            # It stays behind its start: `first` stands before the other gathers, and so before all of their readers.
            if place[earliest] < place[kept]:
                earliest.prepend(kept)
                place[kept] = place[earliest]
            # Views of the erased gather now look into the memory of the one that is kept; fakes must say so.
            take_memory(with_views(wait), wait.meta["val"], kept.meta["val"])
            wait.replace_all_uses_with(kept)
        # Waits before their starts: fx erases no node that has users.
        for node in (*others, *starts[1:]):
            step.graph.erase_node(node)
        uses = sorted(set(readers_of(kept)), key=place.__getitem__)
        # After the optimizer has written to the shard, another gather would give the new value.
        until = min((writes[key][0] for key in storages(first.all_input_nodes[0]) if key in writes), default=len(place))
        if uses:
            # Equal counts: a gather in front of the writing node itself still reads the old value.
            values.append(Gathered(first, kept, uses, sum(place[use] <= until for use in uses)))
    return values


def add_gathers(step: StepGraph, gathered: Gathered, at: Iterable[int]) -> list[Gathered]:
    """Gather a value again before some of its uses; each such use and those after it read the new gather. Changes
    ``step``.

    Args:
        at: indices into ``gathered.uses``, each less than ``gathered.regatherable``.

    Returns:
        One entry per gather of the value, in order.
    """
    uses, parts = gathered.uses, []
    # Each interval of uses between two cuts reads a gather of its own.
    cuts = [0, *sorted(at), len(uses)]
    for begin, end in itertools.pairwise(cuts[1:]):  # the uses before the first cut keep the gather that is there
        parts.append(_gather_for(step, gathered, uses[begin:end]))
    # Views that only moved uses read. Reversed, so that a view of a view goes first. Left in place, they would keep the
    # old gather live until here.
    for view in reversed(with_views(gathered.wait)[1:]):
        if not view.users:
            step.graph.erase_node(view)
    first = uses[: cuts[1]]
    return [Gathered(gathered.start, gathered.wait, first, len(first)), *parts]


@dataclass(frozen=True)
class Gap:
    """An interval of an order in which a gathered value is live and not used.

    Attributes:
        value: index of the value.
        use: index of the next use in ``Gathered.uses``.
        begin, end: positions in the order between the two uses, ``end`` excluded.
        size: bytes of the value.
        cost: of freeing the value here: seconds of the additional all-gather per byte-second of memory that it frees.
    """

    value: int
    use: int
    begin: int
    end: int
    size: int
    cost: float


def gaps(values: Sequence[Gathered], task_graph: TaskGraph, nodes: Sequence[Node], order: Sequence[int]) -> list[Gap]:
    """The gaps between uses of ``values`` in which they can be freed, in ascending order of ``cost``.

    Args:
        task_graph, nodes: the task graph of the step, and the node of each task.
        order: of the task graph; gaps are between positions in it.
    """
    tasks, task = task_graph.tasks, {node: at for at, node in enumerate(nodes)}
    place = {nodes[at]: position for position, at in enumerate(order)}
    clock = [0.0, *itertools.accumulate(tasks[at].seconds * (tasks[at].kind is Kind.COMPUTE) for at in order)]
    sizes = {storage.maker: storage.size for storage in task_graph.storages}
    found_gaps = []
    for number, value in enumerate(values):
        start = task[value.start]
        size, seconds = sizes.get(start, 0), tasks[start].seconds
        # Before the first use there is nothing to free. The planner's positions in `Decisions` count uses in this
        # order, which is the same on all ranks.
        for use in range(1, value.regatherable):
            begin, end = place[value.uses[use - 1]] + 1, place[value.uses[use]]
            # Seconds of computation, not positions: that is how long other tensors could use the memory.
            byte_seconds = size * (clock[end] - clock[begin]) if begin < end else 0.0
            if byte_seconds > 0:
                # A small cost means a gap that frees many bytes for a long time: in a step of equal layers, those of
                # the first layer, which backward comes to last.
                found_gaps.append(Gap(number, use, begin, end, size, seconds / byte_seconds))
    return sorted(found_gaps, key=lambda gap: (gap.cost, gap.value, gap.use))


def choose_gaps(gaps: Iterable[Gap], memory: torch.Tensor, target: int) -> list[Gap]:
    """The gaps in which to free values so that the peak is at most ``target`` bytes, or as close as possible.

    Greedy: take the gap of the lowest ``cost`` that contains the peak, until the peak is low enough. Gaps elsewhere
    would cost an all-gather and not lower the peak.

    Args:
        gaps: sorted by cost.
        memory: live bytes at each position of the order, with all values kept; int64. Changed.
    """
    # Like the greedy choice of spills by cost over benefit in register allocation: exact would be a covering problem,
    # and the memory curve is an estimate anyway.
    left, chosen = list(gaps), []
    while int(memory.max()) > target:
        # The first of equal peaks, on every machine: the choice becomes part of the agreed decisions.
        peak = int(memory.argmax())
        gap = next((gap for gap in left if gap.begin <= peak < gap.end), None)
        if gap is None:
            break
        left.remove(gap)
        chosen.append(gap)
        # Between the two uses the value is freed; the next use has its own gather just before it.
        memory[gap.begin : gap.end] -= gap.size
    return chosen


class GapSequence:
    """The gaps of :func:`choose_gaps` in the order in which lower and lower targets take them: what a target needs is
    the beginning of what a lower one needs.

    Args:
        gaps: sorted by cost.
        memory: live bytes at each position of the order, with all values kept.
    """

    def __init__(self, gaps: Sequence[Gap], memory: Sequence[int]) -> None:
        self._gaps = gaps
        self._memory = memory
        self._kept_peak = max(memory)

    @cached_property
    def _chosen(self) -> list[Gap]:
        return choose_gaps(self._gaps, torch.tensor(self._memory), 0)

    @cached_property
    def _peaks(self) -> list[int]:
        """After none, one, two, ... of the gaps, in bytes."""
        memory, peaks = torch.tensor(self._memory), [self._kept_peak]
        for gap in self._chosen:
            memory[gap.begin : gap.end] -= gap.size
            peaks.append(int(memory.max()))
        return peaks

    def __len__(self) -> int:
        return len(self._chosen)

    def fewest(self, target: int) -> int | None:
        """How many gaps bring the peak to ``target`` bytes; None where not even all of them together do."""
        if self._kept_peak <= target:  # the usual case, which needs no gaps
            return 0
        return next((count for count, peak in enumerate(self._peaks) if peak <= target), None)

    def regathers(self, count: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The regathers that the first ``count`` gaps need, see :class:`weft.inductor.schedule.decisions.Decisions`."""
        uses: dict[int, list[int]] = {}
        for gap in self._chosen[:count] if count else ():
            uses.setdefault(gap.value, []).append(gap.use)
        return tuple((value, tuple(sorted(uses[value]))) for value in sorted(uses))


def _gather_for(step: StepGraph, gathered: Gathered, uses: list[Node]) -> Gathered:
    """Insert another gather before ``uses[0]``; all of ``uses`` read it instead of the old one."""
    copies: dict[Node, Node] = {}
    copy = _Copier(step)
    with step.graph.inserting_before(uses[0]):
        # Just before its first use. The order search moves the start ahead, as far as memory allows.
        for node in (gathered.start, gathered.wait):
            copies[node] = copy(node, copies)
    views = set(with_views(gathered.wait))
    for use in uses:
        for read in use.all_input_nodes:
            # Views are copied with the gather: a use that reads the old view would keep the old result live.
            if read in views:
                with step.graph.inserting_before(use):
                    _copy_view(read, copies, copy)
                use.replace_input_with(read, copies[read])
    return Gathered(copies[gathered.start], copies[gathered.wait], uses, len(uses))


def _copy_view(view: Node, copies: dict[Node, Node], copy: _Copier) -> None:
    """Add to ``copies`` the chain of views from the old gather to ``view``."""
    chain = []
    while view not in copies:
        chain.append(view)
        view = view.all_input_nodes[0]
    for node in reversed(chain):
        copies[node] = copy(node, copies)


class _Copier:
    """Copies nodes. Copies whose originals share storage share a new storage: liveness tells values apart by storage,
    and would otherwise join the live ranges of both gathers."""

    def __init__(self, step: StepGraph) -> None:
        self.graph = step.graph
        self._storages: dict[int, Any] = {}

    def __call__(self, node: Node, copies: dict[Node, Node]) -> Node:
        copy = copy_node(self.graph, node, lambda used: copies.get(used, used))
        copy.meta = same_meta(node, val=self._fake(node.meta["val"]))
        return copy

    def _fake(self, val: Any) -> Any:
        if isinstance(val, (list, tuple)):
            return [self._fake(item) for item in val]
        key = torch_adapter.storage_key(val)
        if key not in self._storages:
            # On the meta device: the storage has an identity and a size, and no memory.
            meta = torch.empty(val.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
            self._storages[key] = meta.untyped_storage()
        layout = val.size(), val.stride(), val.storage_offset()
        return torch_adapter.new_fake(val.fake_mode, val.device, val.dtype, *layout, self._storages[key])


def writes_of(nodes: Iterable[Node]) -> tuple[set[Node], dict[int, list[int]]]:
    """The operands that ``nodes`` write to; and by storage the positions of the writes, in order."""
    operands: set[Node] = set()
    positions: dict[int, list[int]] = {}
    for at, node in enumerate(nodes):
        written = _written_operands(node)
        operands.update(written)
        for key in {key for operand in written for key in storages(operand)}:
            positions.setdefault(key, []).append(at)
    return operands, positions


def _written_operands(node: Node) -> list[Node]:
    """The operands that a node writes to: those of a multi-tensor update, or of an operation that was in place."""
    if isinstance(node.target, MultiTensor):
        operands = [node.args[at] for at in node.target.updated]
    elif (op := writing_form(node)) is not None and (what := effects_of(op)) is not None:
        operands = [node.args[at] if at < len(node.args) else node.kwargs.get(name) for at, name in what.writes]
    else:
        return []
    nodes: list[Node] = []
    torch.fx.node.map_arg(operands, nodes.append)
    return nodes
