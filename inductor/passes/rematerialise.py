"""Cheap values of forward are recomputed in backward where that saves memory (rematerialisation).

Two levels:

- Recomputation that costs no time is always done. Backward reads some values of forward. Each is kept, or recomputed
  from kept values by elementwise operations, which fuse into the kernel that reads it. Which values to keep is a
  minimum cut through the elementwise operations between what must be kept and what backward reads. Each storage is a
  vertex. Its capacity counts its bytes once for reading, once for being alive, and once for writing where nothing else
  needs it in memory. So a float32 copy of a bfloat16 value, a normalised value or an activation is not kept beside its
  source. A value that one kernel recomputes and another one reads several library calls later has to be written in
  between. So the sums of a residual stream are kept, not the outputs of the layers that they are made of.
- With a memory budget, more is recomputed until the predicted peak fits: values that library calls read (the activation
  in front of a GEMM), through norms too. Values that save the most bytes per microsecond go first.

GEMMs, attention, convolutions, collectives, random numbers and calls with effects are never recomputed. Recomputed
operations are deterministic and read the same inputs, so this keeps the bits of every result.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, field
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph, copy_node, drop_dead
from weft.capture.node_kinds import is_effect
from weft.capture.node_meta import same_meta
from weft.capture.sizes_in_bytes import format_bytes
from weft.inductor.graph.aliasing import looks_into
from weft.inductor.graph.liveness import Liveness, LiveRange, liveness
from weft.inductor.graph.pass_runner import keeps_bits
from weft.inductor.passes.min_cut import UNBOUNDED, FlowGraph
from weft.inductor.passes.schedule_waits import issue_order
from weft.torch_adapter import OpOverload

log = logging.getLogger(__name__)

Node = torch.fx.Node
aten = torch.ops.aten

# Bytes per microsecond that a kernel moves, and its launch overhead in microseconds: roughly an H200 (4.8 TB/s peak).
_BANDWIDTH = 4.3e6
_LAUNCH = 2.0
# Most operations per recomputed value, and most rounds of the search for a budget: they bound the time of the pass.
_LONGEST = 24
_ROUNDS = 8

_ELEMENTWISE = frozenset(
    {aten._to_copy.default, aten.cat.default, aten.stack.default, aten.reshape.default, aten.constant_pad_nd.default}
)
# Kernels of their own kind, which elementwise operations on their inputs fuse into.
_REDUCTIONS = frozenset(
    {
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.mean.dim,
        aten.mean.default,
        aten.amax.default,
        aten.amin.default,
        aten.var_mean.correction,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
    }
)


@keeps_bits
class Rematerialise:
    """A pass that computes values again in backward instead of keeping them.

    Args:
        budget_bytes: peak memory to reach if possible, in bytes as :mod:`weft.inductor.graph.liveness` predicts it.
            None: only recomputation that costs no time.
        smallest_bytes: storages below this size are kept.
    """

    __name__ = "rematerialise"

    def __init__(self, budget_bytes: int | None = None, *, smallest_bytes: int = 1 << 16) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes

    def __call__(self, step: StepGraph) -> StepGraph:
        """Recompute values in backward. Changes ``step``."""
        rewriter = _RecomputeRewriter(step)
        # What costs no time comes first and for every step, so a budget starts from a lower peak.
        chosen = _free(_Values(step, liveness(step), self.smallest_bytes))
        rewriter.recompute(chosen)
        log.debug("%d values are recomputed, by %d operations", len(chosen), len(rewriter.copies))
        if self.budget_bytes is not None:
            self._fit(rewriter, self.budget_bytes)
        return step

    def _fit(self, rewriter: _RecomputeRewriter, budget: int) -> None:
        """Recompute more, largest saving a microsecond first, until the peak fits or no longer falls."""
        # Each round changes the peak and where it is, so liveness is computed anew.
        reached = UNBOUNDED
        for _ in range(_ROUNDS):
            live = liveness(rewriter.step, issue_order(rewriter.step))
            before, reached = reached, live.peak
            # A round that does not lower the peak is left with values that cannot be recomputed: more rounds would only
            # cost time.
            if reached <= budget or reached >= before:
                break
            chosen = _cheapest(_Values(rewriter.step, live, self.smallest_bytes), reached - budget)
            if not chosen:
                break
            rewriter.recompute(chosen)
        say = log.debug if reached <= budget else log.info
        say("predicted peak memory %s, budget %s", format_bytes(reached), format_bytes(budget))


def is_elementwise(node: Node) -> bool:
    """Whether the node is deterministic, and fuses into an elementwise kernel that reads it."""
    target = node.target
    if not isinstance(target, OpOverload) or is_effect(node):
        return False
    return torch.Tag.pointwise in target.tags or target in _ELEMENTWISE


@dataclass(eq=False)
class _Uses:
    """Readers of a storage: the last position in forward, the first one after forward, and whether a library call is
    among those after forward."""

    early: int = -1
    late: int = UNBOUNDED
    by_library: bool = False


@dataclass
class _Values:
    """The storages that forward makes, and their readers.

    Attributes:
        position: of each node in the order of execution.
        overwritten: for each storage that forward writes in place, the position of the last write.
        library_calls: the nodes that need their inputs in memory, see :func:`is_library_call`.
        libraries: how many of them stand before each position.
        recomputable: the storages that an elementwise operation of forward makes from values that are still available
            later.
    """

    step: StepGraph
    live: Liveness
    smallest: int
    position: dict[Node, int] = field(init=False)
    uses: dict[LiveRange, _Uses] = field(init=False)
    overwritten: dict[LiveRange, int] = field(init=False)
    library_calls: frozenset[Node] = field(init=False)
    libraries: list[int] = field(init=False)
    recomputable: frozenset[LiveRange] = field(init=False)

    def __post_init__(self) -> None:
        self.position = {node: at for at, node in enumerate(self.live.order)}
        self.uses = {storage: _Uses() for storage in self.live.ranges if is_early(storage.maker)}
        self.overwritten = {}
        self.library_calls = frozenset(filter(is_library_call, self.live.order))
        self.libraries = [0]
        for node in self.live.order:
            self._note_uses(node)
            self.libraries.append(self.libraries[-1] + (node in self.library_calls))
        self.recomputable = frozenset(
            storage for storage in self.uses if is_elementwise(storage.maker) and self.is_repeatable(storage)
        )

    def _note_uses(self, node: Node) -> None:
        at, early, library = self.position[node], is_early(node), node in self.library_calls
        own = self.live.of.get(node, [])
        if early and "inplace" in node.meta:
            self.overwritten.update(dict.fromkeys(own, at))
        if node.target is operator.getitem:  # reads one element, not the whole list
            return
        for storage in self.inputs(node):
            uses = self.uses.get(storage)
            if uses is None:
                continue
            if early:
                uses.early = at
            elif not (looks_into(node) and storage in own):  # a view reads nothing; its readers count
                uses.late = min(uses.late, at)
                uses.by_library |= library

    def inputs(self, node: Node) -> list[LiveRange]:
        """Storages that the node reads, each once."""
        return list(dict.fromkeys(storage for used in node.all_input_nodes for storage in self.live.of[used]))

    def is_repeatable(self, storage: LiveRange) -> bool:
        """Whether the operation that makes the storage would read the same values later."""
        if storage.size < self.smallest or storage not in self.uses or storage in self.overwritten:
            return False
        return not any(
            self.overwritten.get(source, -1) > self.position[used]
            for used in storage.maker.all_input_nodes
            for source in self.live.of[used]
        )

    def is_in_memory_anyway(self, storage: LiveRange) -> bool:
        """Whether forward itself needs the storage: a library call makes it, or runs before its last reader."""
        if not is_elementwise(storage.maker):
            return True
        written, read = self.position[storage.maker], self.uses[storage].early
        return read > written and self.libraries[read + 1] > self.libraries[written + 1]


def is_early(node: Node) -> bool:
    """Whether the node belongs to forward. Inputs do."""
    return node.op == "placeholder" or node.meta.get("stage") == "forward"


def is_library_call(node: Node) -> bool:
    """Whether the node needs its inputs in memory: nothing fuses into it."""
    if node.op != "call_function":
        return node.op == "output"
    return not (looks_into(node) or is_elementwise(node) or node.target in _REDUCTIONS)


# ---- recomputation that costs no time


def _free(values: _Values) -> set[LiveRange]:
    """Storages to recompute in the kernels that read them, by a minimum cut.

    Each storage is a pair of vertices joined by an edge of its price; cutting that edge means to keep it. A storage
    whose first vertex is on the sink side is recomputed.
    """
    relevant = _relevant(values)
    number = {storage: 2 + 2 * at for at, storage in enumerate(relevant)}
    wanted = _first_wanted(values, relevant)
    graph, source, sink = FlowGraph(2 + 2 * len(relevant)), 0, 1
    for storage, enters in number.items():
        uses = values.uses[storage]
        graph.add(enters, enters + 1, _price(values, storage))
        if uses.late < UNBOUNDED:
            # Backward reads it, so the cut has to pass its own edge (it is kept) or edges in front of it (it is
            # recomputed).
            graph.add(enters + 1, sink, UNBOUNDED)
        # What cannot be recomputed must be on the source side. A library call reads its operand from memory, so
        # recomputing that saves no traffic.
        if uses.by_library or storage not in values.recomputable:
            graph.add(source, enters, UNBOUNDED)
        else:
            # If a library call separates two readers, one kernel cannot serve both: the recomputed value is written.
            if uses.late < UNBOUNDED and values.libraries[uses.late] > values.libraries[wanted[storage]]:
                graph.add(source, enters, 3 * storage.size)  # written, held and read once more
            # Not to be cut: to recompute a storage, each operand must be kept or recomputed too.
            for used in values.inputs(storage.maker):
                graph.add(number[used] + 1, enters, UNBOUNDED)
    _, on_sink_side = graph.minimum_cut(source, sink)
    return {storage for storage, enters in number.items() if on_sink_side[enters]}


def _relevant(values: _Values) -> list[LiveRange]:
    """Storages that backward reads, and those they could be computed from."""
    todo = [storage for storage, uses in values.uses.items() if uses.late < UNBOUNDED]
    seen = dict.fromkeys(todo)
    while todo:
        storage = todo.pop()
        if storage in values.recomputable and not values.uses[storage].by_library:
            for used in values.inputs(storage.maker):
                if used not in seen:
                    seen[used] = None
                    todo.append(used)
    return list(seen)


def _first_wanted(values: _Values, relevant: list[LiveRange]) -> dict[LiveRange, int]:
    """For each storage the first position after forward that reads it or a storage that can be recomputed from it."""
    wanted = {storage: values.uses[storage].late for storage in relevant}
    for storage in sorted(relevant, key=lambda storage: values.position[storage.maker], reverse=True):
        if storage in values.recomputable and not values.uses[storage].by_library:
            for used in values.inputs(storage.maker):
                wanted[used] = min(wanted[used], wanted[storage])
    return wanted


def _price(values: _Values, storage: LiveRange) -> int:
    """Bytes to read, keep and write if the storage is kept, plus 1, so that of equal cuts the one with fewer storages
    is chosen. An input is live anyway; what is in memory anyway need not be written."""
    if storage.is_input or values.uses[storage].by_library:
        times = 1
    else:
        times = 2 if values.is_in_memory_anyway(storage) else 3
    return times * storage.size + 1


# ---- recomputation for a memory budget


@dataclass
class _Saving:
    """Recomputation of a storage: bytes saved, time in microseconds, and the storages that are recomputed with it."""

    saved: int
    time: float
    steps: set[LiveRange]


def _cheapest(values: _Values, excess: int) -> set[LiveRange]:
    """The storages to recompute, of those that are alive but unused at the peak: most bytes per microsecond first,
    until ``excess`` bytes are saved."""
    at = values.live.peak_at
    idle = [storage for storage in values.live.alive(at) if storage in values.uses and not storage.is_input]
    idle = [storage for storage in idle if values.uses[storage].early < at < values.uses[storage].late < UNBOUNDED]
    savings = [saving for saving in (_saving(values, storage) for storage in idle) if saving is not None]
    # Greedy by ratio, as for knapsacks. Values share steps, so sums are estimates; the next round measures.
    chosen: set[LiveRange] = set()
    for saving in sorted(savings, key=lambda saving: saving.saved / saving.time, reverse=True):
        if excess <= 0:
            break
        chosen |= saving.steps
        excess -= saving.saved
    return chosen


def _saving(values: _Values, storage: LiveRange) -> _Saving | None:
    """Recomputation of the storage from what is alive when backward first reads it. None where that is not possible or
    saves nothing."""
    until = values.uses[storage].late
    steps: dict[LiveRange, None] = {}
    sources: set[LiveRange] = set()
    todo = [storage]
    while todo:
        wanted = todo.pop()
        steps[wanted] = None
        # Everything on the way has to be cheap and to read the same values again. Long chains are left alone, which
        # bounds time.
        if not _is_cheap(wanted.maker) or not values.is_repeatable(wanted) or len(steps) > _LONGEST:
            return None
        for used in values.inputs(wanted.maker):
            # Use what is live when backward first reads the value. Anything else is recomputed or kept for longer.
            stays = used.is_input or used.end >= until
            if stays or not _is_cheap(used.maker) or not values.is_repeatable(used):
                sources.add(used)
            elif used not in steps:
                todo.append(used)
    kept_bytes = sum(source.size for source in sources if not source.is_input and source.end < until)
    # Read the sources, write the value; a launch for each operation, though most of them fuse: an estimate on the high
    # side.
    moved = storage.size + sum(source.size for source in sources)
    # Keeping its sources alive would cost as much memory as it saves.
    if storage.size <= kept_bytes:
        return None
    return _Saving(storage.size - kept_bytes, moved / _BANDWIDTH + _LAUNCH * len(steps), set(steps))


def _is_cheap(node: Node) -> bool:
    return is_elementwise(node) or node.target in _REDUCTIONS


# ---- rewriting the graph


class _RecomputeRewriter:
    """Inserts copies of operations of forward for backward to read.

    Attributes:
        copies: for each node of forward its copy, if it has one.
    """

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.copies: dict[Node, Node] = {}
        self.position: dict[Node, float] = {}
        self._fake_mode = torch_adapter.fake_mode_of(step.graph)

    def recompute(self, chosen: set[LiveRange]) -> None:
        """Recompute ``chosen`` before their first use in backward."""
        recomputed = {node for storage in chosen for node in storage.values if is_early(node)}
        self.position = {node: at for at, node in enumerate(self.step.graph.nodes)}
        for node in list(self.step.graph.nodes):
            if not is_early(node):
                for used in node.all_input_nodes:
                    if used in recomputed:
                        self._copy_before(node, used, recomputed)
                        node.replace_input_with(used, self.copies[used])
        drop_dead(self.step.graph)

    def _copy_before(self, user: Node, node: Node, recomputed: set[Node]) -> None:
        """Insert copies of ``node``, and of its recomputed inputs, before ``user``."""
        todo = [node]
        while todo:
            wanted = todo[-1]
            inputs = (used for used in wanted.all_input_nodes if used in recomputed)
            missing = [used for used in inputs if not self._is_available(used, user)]
            if missing:
                todo += missing
                continue
            todo.pop()
            if wanted not in self.copies:
                with self.step.graph.inserting_before(user):
                    self.copies[wanted] = self._copied(wanted)
            # A copy made for a later user moves before this one; its own operands were moved first.
            elif not self._is_available(wanted, user):
                user.prepend(self.copies[wanted])
            self.position.setdefault(self.copies[wanted], self.position[user])
            self.position[self.copies[wanted]] = min(self.position[self.copies[wanted]], self.position[user])

    def _is_available(self, node: Node, user: Node) -> bool:
        return node in self.copies and self.position[self.copies[node]] <= self.position[user]

    def _copied(self, node: Node) -> Node:
        copy = copy_node(self.step.graph, node, lambda used: self.copies.get(used, used))
        copy.meta = same_meta(node, stage="backward", recomputed=True)
        args: Any = torch.fx.node.map_arg((copy.args, copy.kwargs), lambda used: used.meta["val"])
        # The fake value is computed anew: the copy has memory of its own.
        with torch_adapter.only_mode(self._fake_mode), torch_adapter.below_autograd():
            copy.meta["val"] = node.target(*args[0], **args[1])  # type: ignore[operator]
        return copy
