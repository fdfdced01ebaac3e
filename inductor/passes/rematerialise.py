"""Cheap values of forward are computed again in backward, where that saves memory.

Two degrees:

- What is free is always done. Backward reads some values of forward; each is kept, or computed from others that are
  kept by elementwise operations, which fuse into the kernel that reads it. Which to keep is a minimum cut through the
  elementwise operations between what must be kept and what backward reads: a vertex for each storage, whose capacity
  counts its bytes once for reading, once for being held, and once for writing where nothing but backward needs it in
  memory. So a float32 copy of a bfloat16 value, a normalised value or an activation is not kept beside its source. What
  would be computed again for one reader and read by another, library calls later, has to be written in between: the
  sums of a residual stream are kept, not the layers' results that they are made of.
- With a budget, more is computed again until the predicted peak fits: values that library calls read (the activation in
  front of a matrix product), through norms too, those first that save most bytes for a microsecond of recomputing.

Matrix products, attention, convolutions, collectives, random numbers and calls with effects are never computed again.
Operations recomputed are deterministic and run on the same inputs: keeps the bits of every result.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, field
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.costs import format_bytes
from weft.capture.graph import StepGraph, drop_dead, is_effect, is_random
from weft.inductor.liveness import Liveness, LiveRange, liveness
from weft.inductor.min_cut import UNBOUNDED, FlowGraph
from weft.inductor.passes.schedule_waits import issue_order
from weft.inductor.runtime.geometry import looks_into
from weft.torch_adapter import OpOverload

log = logging.getLogger(__name__)

Node = torch.fx.Node
aten = torch.ops.aten

# Bytes a microsecond that a kernel moves, and what starting one costs (microseconds).
_BANDWIDTH = 4.3e6
_LAUNCH = 2.0
# Operations of one recomputed value, and rounds of the search for a budget: bounds on the pass's own time.
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


class Rematerialise:
    """A pass that computes values again in backward instead of keeping them.

    Args:
        budget_bytes: the peak to reach if it can be (bytes, as :mod:`weft.inductor.liveness` predicts it); None does
            what is free only.
        smallest_bytes: smaller storages are kept (bytes).
    """

    __name__ = "rematerialise"

    def __init__(self, budget_bytes: int | None = None, *, smallest_bytes: int = 1 << 16) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes

    def __call__(self, step: StepGraph) -> StepGraph:
        """Changes ``step``."""
        rewriter = _Rewriter(step)
        chosen = _free(_Values(step, liveness(step), self.smallest_bytes))
        rewriter.recompute(chosen)
        log.debug("%d values are computed again, by %d operations", len(chosen), len(rewriter.copies))
        if self.budget_bytes is not None:
            self._fit(rewriter, self.budget_bytes)
        return step

    def _fit(self, rewriter: _Rewriter, budget: int) -> None:
        """Recompute more, largest saving a microsecond first, until the peak fits or no longer falls."""
        reached = UNBOUNDED
        for _ in range(_ROUNDS):
            found = liveness(rewriter.step, issue_order(rewriter.step))
            before, reached = reached, found.peak
            if reached <= budget or reached >= before:
                break
            chosen = _cheapest(_Values(rewriter.step, found, self.smallest_bytes), reached - budget)
            if not chosen:
                break
            rewriter.recompute(chosen)
        say = log.debug if reached <= budget else log.info
        say("peak memory predicted %s, asked for %s", format_bytes(reached), format_bytes(budget))


def is_elementwise(node: Node) -> bool:
    """Whether the node is deterministic, and fuses into an elementwise kernel that reads it."""
    target = node.target
    if not isinstance(target, OpOverload) or is_effect(node) or is_random(node):
        return False
    return torch.Tag.pointwise in target.tags or target in _ELEMENTWISE


@dataclass(eq=False)
class _Uses:
    """Who reads a storage: last position in forward, first after it, and whether a library call after it does."""

    early: int = -1
    late: int = UNBOUNDED
    by_library: bool = False


@dataclass
class _Values:
    """The storages of a step, as far as forward makes them, and who reads them.

    Attributes:
        position: of each node in the order they run.
        early: whether each node belongs to forward.
        overwritten: for each storage that forward writes in place, where it does so last.
    """

    step: StepGraph
    live: Liveness
    smallest: int
    position: dict[Node, int] = field(init=False)
    uses: dict[LiveRange, _Uses] = field(init=False)
    overwritten: dict[LiveRange, int] = field(init=False)
    libraries: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.position = {node: at for at, node in enumerate(self.live.order)}
        self.uses = {found: _Uses() for found in self.live.ranges if is_early(found.maker)}
        self.overwritten = {}
        self.libraries = [0]
        for node in self.live.order:
            self._note_uses(node)
            self.libraries.append(self.libraries[-1] + is_library_call(node))

    def _note_uses(self, node: Node) -> None:
        at, early, library = self.position[node], is_early(node), is_library_call(node)
        own = self.live.of.get(node, [])
        if early and "inplace" in node.meta:
            self.overwritten.update(dict.fromkeys(own, at))
        if node.target is operator.getitem:
            return
        for found in self.inputs(node):
            uses = self.uses.get(found)
            if uses is None:
                continue
            if early:
                uses.early = at
            elif not (looks_into(node) and found in own):
                uses.late = min(uses.late, at)
                uses.by_library |= library

    def inputs(self, node: Node) -> list[LiveRange]:
        """Storages that the node reads, each once."""
        return list(dict.fromkeys(found for used in node.all_input_nodes for found in self.live.of[used]))

    def can_recompute(self, found: LiveRange) -> bool:
        """Whether an elementwise operation of forward makes the storage, from values that are still to be had later."""
        return is_elementwise(found.maker) and self.is_repeatable(found)

    def is_repeatable(self, found: LiveRange) -> bool:
        """Whether the operation that makes the storage can run again later and finds what it found."""
        if found.size < self.smallest or found not in self.uses or found in self.overwritten:
            return False
        return not any(
            self.overwritten.get(source, -1) > self.position[used]
            for used in found.maker.all_input_nodes
            for source in self.live.of[used]
        )

    def is_in_memory_anyway(self, found: LiveRange) -> bool:
        """Whether forward itself needs the storage: a library call makes it, or runs before its last reader."""
        if not is_elementwise(found.maker):
            return True
        made, read = self.position[found.maker], self.uses[found].early
        return read > made and self.libraries[read + 1] > self.libraries[made + 1]


def is_early(node: Node) -> bool:
    """Whether the node belongs to forward (inputs do)."""
    return node.op == "placeholder" or node.meta.get("stage") == "forward"


def is_library_call(node: Node) -> bool:
    """Whether the node needs its inputs in memory: nothing fuses into it."""
    if node.op != "call_function":
        return node.op == "output"
    return not (looks_into(node) or is_elementwise(node) or node.target in _REDUCTIONS)


# ---- what is free


def _free(values: _Values) -> set[LiveRange]:
    """Storages to compute again in kernels that read them, by a minimum cut."""
    relevant = _relevant(values)
    number = {found: 2 + 2 * at for at, found in enumerate(relevant)}
    wanted = _first_wanted(values, relevant)
    graph, source, sink = FlowGraph(2 + 2 * len(relevant)), 0, 1
    for found, enters in number.items():
        uses = values.uses[found]
        graph.add(enters, enters + 1, _price(values, found))
        if uses.late < UNBOUNDED:
            graph.add(enters + 1, sink, UNBOUNDED)
        if uses.by_library or not values.can_recompute(found):
            graph.add(source, enters, UNBOUNDED)
        else:
            if uses.late < UNBOUNDED and values.libraries[uses.late] > values.libraries[wanted[found]]:
                graph.add(source, enters, 3 * found.size)  # written, held and read once more
            for used in values.inputs(found.maker):
                graph.add(number[used] + 1, enters, UNBOUNDED)
    _, on_sink_side = graph.minimum_cut(source, sink)
    return {found for found, enters in number.items() if on_sink_side[enters]}


def _relevant(values: _Values) -> list[LiveRange]:
    """Storages that backward reads, and those they could be computed from."""
    todo = [found for found, uses in values.uses.items() if uses.late < UNBOUNDED]
    seen = dict.fromkeys(todo)
    while todo:
        found = todo.pop()
        if values.can_recompute(found) and not values.uses[found].by_library:
            for used in values.inputs(found.maker):
                if used not in seen:
                    seen[used] = None
                    todo.append(used)
    return list(seen)


def _first_wanted(values: _Values, relevant: list[LiveRange]) -> dict[LiveRange, int]:
    """Where after forward each storage, or one that could be computed from it, is read first."""
    wanted = {found: values.uses[found].late for found in relevant}
    for found in sorted(relevant, key=lambda found: values.position[found.maker], reverse=True):
        if values.can_recompute(found) and not values.uses[found].by_library:
            for used in values.inputs(found.maker):
                wanted[used] = min(wanted[used], wanted[found])
    return wanted


def _price(values: _Values, found: LiveRange) -> int:
    """Bytes to read, hold and write so that backward finds the storage; at least one, so that fewer are kept."""
    if found.is_input or values.uses[found].by_library:
        times = 1
    else:
        times = 2 if values.is_in_memory_anyway(found) else 3
    return times * found.size + 1


# ---- what a budget asks for


@dataclass
class _Offer:
    """What recomputing a storage saves (bytes), what that takes (microseconds), and the storages made on the way."""

    saved: int
    time: float
    steps: set[LiveRange]


def _cheapest(values: _Values, excess: int) -> set[LiveRange]:
    """What to recompute of the storages held idle at the peak: those first that save most for their time, until they
    come to ``excess`` bytes."""
    at = values.live.peak_at
    idle = [found for found in values.live.alive(at) if found in values.uses and not found.is_input]
    idle = [found for found in idle if values.uses[found].early < at < values.uses[found].late < UNBOUNDED]
    offers = [offer for offer in (_offer(values, found) for found in idle) if offer is not None]
    chosen: set[LiveRange] = set()
    for offer in sorted(offers, key=lambda offer: offer.saved / offer.time, reverse=True):
        if excess <= 0:
            break
        chosen |= offer.steps
        excess -= offer.saved
    return chosen


def _offer(values: _Values, found: LiveRange) -> _Offer | None:
    """Recompute the storage from what is there when backward first reads it, or None: it cannot be, or saves
    nothing."""
    until = values.uses[found].late
    steps: dict[LiveRange, None] = {}
    sources: set[LiveRange] = set()
    todo = [found]
    while todo:
        wanted = todo.pop()
        steps[wanted] = None
        if not _is_cheap(wanted.maker) or not values.is_repeatable(wanted) or len(steps) > _LONGEST:
            return None
        for used in values.inputs(wanted.maker):
            stays = used.is_input or used.end >= until
            if stays or not _is_cheap(used.maker) or not values.is_repeatable(used):
                sources.add(used)
            elif used not in steps:
                todo.append(used)
    held = sum(source.size for source in sources if not source.is_input and source.end < until)
    moved = found.size + sum(source.size for source in sources)
    if found.size <= held:
        return None
    return _Offer(found.size - held, moved / _BANDWIDTH + _LAUNCH * len(steps), set(steps))


def _is_cheap(node: Node) -> bool:
    return is_elementwise(node) or node.target in _REDUCTIONS


# ---- the change of the graph


class _Rewriter:
    """Lets backward read copies of operations of forward.

    Attributes:
        copies: for each node of forward its copy, if it has one.
    """

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.copies: dict[Node, Node] = {}
        self.position: dict[Node, float] = {}

    def recompute(self, chosen: set[LiveRange]) -> None:
        """Make ``chosen`` again where backward first needs them."""
        again = {node for found in chosen for node in found.values if is_early(node)}
        self.position = {node: at for at, node in enumerate(self.step.graph.nodes)}
        for node in list(self.step.graph.nodes):
            if not is_early(node):
                for used in node.all_input_nodes:
                    if used in again:
                        self._copy_before(node, used, again)
                        node.replace_input_with(used, self.copies[used])
        drop_dead(self.step.graph)

    def _copy_before(self, user: Node, node: Node, again: set[Node]) -> None:
        """See to it that copies of ``node`` and of what it needs stand before ``user``."""
        todo = [node]
        while todo:
            wanted = todo[-1]
            missing = [used for used in wanted.all_input_nodes if used in again and not self._stands(used, user)]
            if missing:
                todo += missing
                continue
            todo.pop()
            if wanted not in self.copies:
                with self.step.graph.inserting_before(user):
                    self.copies[wanted] = _copied(self.step, wanted, self.copies)
            elif not self._stands(wanted, user):
                user.prepend(self.copies[wanted])
            self.position.setdefault(self.copies[wanted], self.position[user])
            self.position[self.copies[wanted]] = min(self.position[self.copies[wanted]], self.position[user])

    def _stands(self, node: Node, user: Node) -> bool:
        return node in self.copies and self.position[self.copies[node]] <= self.position[user]


def _copied(step: StepGraph, node: Node, copies: dict[Node, Node]) -> Node:
    copy = step.graph.node_copy(node, lambda used: copies.get(used, used))
    copy.meta = {**node.meta, "stage": "backward", "recomputed": True}
    args: Any = torch.fx.node.map_arg((copy.args, copy.kwargs), lambda used: used.meta["val"])
    with torch_adapter.only_mode(_fake_mode(node.meta["val"])), torch_adapter.below_autograd():
        copy.meta["val"] = node.target(*args[0], **args[1])  # type: ignore[operator]
    return copy


def _fake_mode(val: Any) -> Any:
    """Of a fake tensor, or of a list of them."""
    return _fake_mode(val[0]) if isinstance(val, (list, tuple)) else val.fake_mode
