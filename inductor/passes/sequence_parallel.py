"""Between two GEMMs of a tensor-parallel layer, each rank computes its part of the rows (sequence parallelism).

Under tensor parallelism every rank has the whole result of an all-reduce, and computes norms, residual additions and
the like for all tokens, as all other ranks do. An all-reduce is a reduce-scatter and an all-gather. This pass puts the
all-gather behind what is computed row by row in between (Korthikanti et al. 2022, arXiv 2205.05198)::

    all-reduce, addition, norm, GEMM   is   reduce-scatter, addition of the rank's rows, their norm, all-gather, GEMM

so that each rank computes one part of the rows, and what of them is saved for backward takes one part of the memory.
The gradient of a norm's weight, a sum over the rows, becomes a sum over the rank's rows and a small all-reduce.

Rows are the dimensions of an all-reduced tensor but the last one, flattened. Rules for operations by rows are those of
:mod:`weft.inductor.passes.row_rules` and :mod:`weft.inductor.passes.norm_rows`. Which values are sharded is the minimum
cut between the all-reduces and what needs all rows: fewest bytes gathered, and of several such cuts the one behind the
most operations. To cut right behind all all-reduces is one of the cuts, so no more bytes are gathered than all-reduces
gathered before. All-reduces of sums over rows are added.

A rank then reads rows that other ranks computed. So all other operands must be the same on all ranks of the group, see
:mod:`weft.inductor.graph.replicated`, and each collective of the region carries a hash of what the region computes:
where ranks disagree, all of them keep their collectives as they were captured
(:mod:`weft.inductor.schedule.agree_on_collectives`). Values that the user holds, writes in place, random draws, and
operations without a rule end the region.

Changes results: a reduce-scatter may sum in another order than an all-reduce, and sums over rows are sums of parts, in
float32 or wider. All ranks get the same bits, as from an all-reduce.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph, calls, drop_dead
from weft.capture.node_kinds import WAIT, group_of, is_effect
from weft.inductor.graph.aliasing import looks_into, readers_of, share_storage, storages
from weft.inductor.graph.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ranks_on_a_host, reduction_of
from weft.inductor.graph.emitter import emitter
from weft.inductor.graph.escapes import escaping
from weft.inductor.graph.fake_values import replace_uses
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.graph.replicated import described, replicated_over
from weft.inductor.graph.sizes import node_bytes, tensors_of
from weft.inductor.passes.drop_noops import same_tensor
from weft.inductor.passes.min_cut import UNBOUNDED, FlowGraph
from weft.inductor.passes.norm_rows import NORMS, plan_layer_norm
from weft.inductor.passes.row_rules import Form, RowPlan, RowRegion, Space
from weft.inductor.passes.tensor_lists import is_static

Node = torch.fx.Node

aten = torch.ops.aten

_LINEAR = ("sum", "avg")
# Orders of dimensions that a part has in other places.
_OF_IMAGES = (torch.channels_last, torch.channels_last_3d)
# How much longer a reduce-scatter and an all-gather take than an all-reduce, per pair and per byte that a rank
# receives; and the memory bandwidth of kernels. Fitted to predicted steps of a Llama of width 4,096 on 2, 4 and 8
# H200, with all-reduces of 8 to 64 MiB: the pass gains where it is applied, or loses at most 0.3% of a step.
SECONDS_PER_PAIR = 7e-6
SECONDS_PER_BYTE = 0.6e-6 / (1 << 20)
MEMORY_BYTES_PER_SECOND = 4e12
# The time that kernels save must be this many times the time that collectives lose, because times of collectives are
# predicted to 20%. On two GPUs kernels save too little.
LEAST_GAIN = 1.5
# How much all-reduces of sums over rows may add to what is sent, which else stays the same.
MOST_ADDED_BYTES = 0.01

# Beside elementwise operations. Each reads one tensor of the region.
_BY_ROWS = frozenset(
    {
        *(aten._to_copy.default, aten.alias.default, aten.detach.default),
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default),
        *(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default),
    }
)


@dataclass(frozen=True)
class Rows:
    """What a region is about: a process group, how many ranks it has, and the number of rows."""

    group: str
    ranks: int
    count: int


@dataclass(frozen=True)
class ShardedRegion:
    """A part of a step whose rows the ranks of a group share.

    Attributes:
        rows: group and number of rows.
        plans: how each node is computed, of the waits for all-reduces and of the nodes behind them, in order.
        gathered: those of the nodes that something outside needs whole.
    """

    rows: Rows
    plans: dict[Node, RowPlan]
    gathered: list[Node]

    @property
    def reduced(self) -> list[Node]:
        """The waits for all-reduces that become reduce-scatters."""
        return [node for node in self.plans if node.target is WAIT]

    @property
    def sums(self) -> list[Node]:
        """The sums over rows."""
        return [node for node, plan in self.plans.items() if plan.form is Form.SUM]


@changes_bits("a reduce-scatter may sum in another order than an all-reduce, and sums over rows are sums of parts")
def sequence_parallel(step: StepGraph) -> StepGraph:
    """Shard what is computed by rows between all-reduces, on GPUs of one host, where that pays. Changes ``step``."""
    for rows in all_rows(step):
        for region in find_regions(step, rows):
            if pays(step, region):
                shard(step, region)
    return step


# ---- which


def all_rows(step: StepGraph) -> list[Rows]:
    """The groups and numbers of rows of the all-reduces of ``step`` whose rows the ranks divide evenly."""
    found = (_rows_of(step, node) for node in step.collectives())
    return list(dict.fromkeys(rows for rows in found if rows is not None))


def _rows_of(step: StepGraph, start: Node) -> Rows | None:
    if start.target is not ALL_REDUCE.op or [user.target for user in start.users] != [WAIT]:
        return None
    val, payload = start.meta["val"], start.args[0].meta["val"]  # type: ignore[union-attr]
    if not is_static([val, payload]) or val.dim() < 2 or not val.numel() or not val.is_floating_point():
        return None
    ranks, count = _ranks(step, group_of(start)), val.numel() // val.shape[-1]
    plain = val.is_contiguous() and payload.is_contiguous() and "stream" not in start.meta
    even = ranks > 1 and count % ranks == 0
    return Rows(group_of(start), ranks, count) if plain and even and reduction_of(start) in _LINEAR else None


def _ranks(step: StepGraph, group: str) -> int:
    """How many ranks a process group has; 0 for one that this process does not have."""
    try:
        return len(torch_adapter.group_ranks(step.groups[group]))
    except RuntimeError:
        return 0


def find_regions(step: StepGraph, rows: Rows) -> list[ShardedRegion]:
    """What can be computed by rows without gathering more, in parts that share no value."""
    same = replicated_over(step, rows.group)
    written = [node for node in calls(step.graph) if "inplace" in node.meta]
    kept = {key for node in (*step.placeholders, *escaping(step)) for key in _memory(node)}
    # Memory that an operation outside the region writes to stays whole. What is outside is known when all plans are.
    while True:
        plans = _plans(step, rows, same, kept)
        more = {key for node in written if node not in plans for key in storages(node)} - kept
        if more.isdisjoint(key for node, plan in plans.items() if plan.form is Form.ROWS for key in _memory(node)):
            return _cut(plans, rows)
        kept |= more


def _memory(node: Node) -> set[int]:
    """The storages of a tensor; none of a list, whose elements are nodes with storages of their own."""
    return storages(node) if isinstance(node.meta.get("val"), torch.Tensor) else set()


def _plans(step: StepGraph, rows: Rows, same: set[Node], kept: set[int]) -> dict[Node, RowPlan]:
    """How all that can be computed by rows is computed, but for values in the storages ``kept``."""
    region = RowRegion(rows.count, None)
    overwritten = {key for node in calls(step.graph) if "inplace" in node.meta for key in storages(node)}
    for node in calls(step.graph):
        if "stream" in node.meta:
            continue
        plan = _reduced(step, node, rows) if node.target is WAIT else _plan(region, node, same)
        memory = _memory(node)
        # A sum gets memory of its own from the all-reduce, which the user may hold and the step may overwrite.
        own = plan is not None and plan.form is Form.SUM and "inplace" not in node.meta
        free = kept.isdisjoint(memory) and (node.target is not WAIT or overwritten.isdisjoint(memory))
        if plan is not None and (own or free):
            region.plans[node] = plan
    return region.plans


def _reduced(step: StepGraph, wait: Node, rows: Rows) -> RowPlan | None:
    (start,) = wait.all_input_nodes
    if _rows_of(step, start) != rows:
        return None
    return RowPlan(Form.ROWS, Space.TAKEN, wait.meta["val"].dim() - 1)


def _plan(region: RowRegion, node: Node, same: set[Node]) -> RowPlan | None:
    """How ``node`` is computed by rows; None where it is not, or has an operand that ranks may have differently."""
    inside = [used for used in node.all_input_nodes if used in region.plans]
    vals = tensors_of(node)
    if not inside or is_effect(node) or not vals or not is_static(vals):
        return None
    is_norm = node.target in NORMS or node.target is operator.getitem
    if is_norm:
        plan = plan_layer_norm(region, node)
    else:
        one = isinstance(node.meta["val"], torch.Tensor) and node.kwargs.get("memory_format") not in _OF_IMAGES
        plan = region.plan(node) if one and _is_by_rows(node) else None
    if plan is None or plan.form not in (Form.ROWS, Form.SUM):
        return None
    # Of a view that repeats elements only other operations of the region are made.
    if plan.form is Form.ROWS and not (_is_contiguous(node) or node.target is aten.expand.default):
        return None
    inner = max(val.dim() for each in (node, *inside) for val in tensors_of(each)) - plan.prefix
    others = [each for each in node.all_input_nodes if each not in region.plans]
    return plan if all(each in same and _is_alike_in_rows(each, inner) for each in others) else None


def _is_contiguous(node: Node) -> bool:
    return all(val.is_contiguous() for val in tensors_of(node))


def _is_alike_in_rows(operand: Node, inner: int) -> bool:
    """Whether an operand outside the region is the same for all rows: it has but the ``inner`` dimensions of a row."""
    val = operand.meta["val"]
    if not isinstance(val, torch.Tensor):
        return False
    return all(size == 1 for size in val.shape[: max(val.dim() - inner, 0)])


def _cut(plans: dict[Node, RowPlan], rows: Rows) -> list[ShardedRegion]:
    """The part of ``plans`` on the side of the all-reduces of a minimum cut, by what is connected."""
    at = {node: 2 * number for number, node in enumerate(plans)}  # and 2 * number + 1: all of its rows
    source, sink = 2 * len(at), 2 * len(at) + 1
    flow = FlowGraph(sink + 1)
    for node, vertex in at.items():
        if node.target is WAIT:
            flow.add(source, vertex, UNBOUNDED)
        for used in node.all_input_nodes:
            if used in at:  # a node is computed by rows only if its operands are
                flow.add(vertex, at[used], UNBOUNDED)
            # What is written in place is so on all ranks' rows, or on a rank's.
            if used in at and "inplace" in node.meta and share_storage(used, node):
                flow.add(at[used], vertex, UNBOUNDED)
        if plans[node].form is Form.SUM:
            continue
        # A list is read by its elements, and a view that repeats elements is made again.
        can_gather = isinstance(node.meta["val"], torch.Tensor) and _is_contiguous(node)
        flow.add(vertex, vertex + 1, node_bytes(node) if can_gather else UNBOUNDED)
        for user in node.users:
            flow.add(vertex + 1, at.get(user, sink), UNBOUNDED)
    _, beyond = flow.minimum_cut(source, sink)
    kept = {node: plan for node, plan in plans.items() if not beyond[at[node]]}
    # An all-reduce whose result is only needed whole stays one.
    lone = {node for node in kept if node.target is WAIT and kept.keys().isdisjoint(node.users)}
    kept = {node: plan for node, plan in kept.items() if node not in lone}
    # Views alone compute nothing.
    parts = [part for part in _connected(kept) if not all(map(looks_into, part))]
    return [ShardedRegion(rows, part, _gathered(part)) for part in parts]


def _connected(plans: dict[Node, RowPlan]) -> list[dict[Node, RowPlan]]:
    """``plans`` in parts of which none has an operand in another one."""
    seen: set[Node] = set()
    parts: list[dict[Node, RowPlan]] = []
    for node in plans:
        if node in seen:
            continue
        todo, found = [node], {node}
        for each in todo:
            near = {*each.all_input_nodes, *each.users}
            more = [other for other in near if other in plans and other not in found]
            found.update(more)
            todo += more
        seen |= found
        parts.append({each: plan for each, plan in plans.items() if each in found})
    return parts


def _gathered(plans: dict[Node, RowPlan]) -> list[Node]:
    return [node for node, plan in plans.items() if plan.form is Form.ROWS and not plans.keys() >= node.users.keys()]


# ---- whether it pays


def pays(step: StepGraph, region: ShardedRegion) -> bool:
    """Whether a region is on GPUs of one host, and large enough. Decided from sizes and the graph alone, as all ranks
    have them."""
    ranks = ranks_on_a_host(step.groups[region.rows.group])
    if ranks < 2 or any(wait.meta["val"].device.type != "cuda" for wait in region.reduced):
        return False
    reduced = sum(map(node_bytes, region.reduced))
    # In float32 or wider.
    added = sum(node.meta["val"].numel() * max(node.meta["val"].itemsize, 4) for node in region.sums)
    if added > MOST_ADDED_BYTES * reduced:
        return False
    part = 1 - 1 / ranks
    saved = _memory_traffic(step, region) * part - sum(map(node_bytes, _read_by_kernels(region)))
    lost = len(region.reduced) * SECONDS_PER_PAIR + reduced * part * SECONDS_PER_BYTE
    return saved / MEMORY_BYTES_PER_SECOND > LEAST_GAIN * lost


def _memory_traffic(step: StepGraph, region: ShardedRegion) -> int:
    """Bytes that the kernels of a region read and write when each computes all rows."""
    # A kernel is what is computed between two collectives. It reads what is reduced and writes what is gathered. Of a
    # kernel that others read from, one value counts: the others are mostly computed again from it.
    kernel = _last_captured(step.graph)
    reads = {(kernel[node], kernel[user]) for node in region.plans for user in node.users if user in region.plans}
    reads = {(one, other) for one, other in reads if one != other}
    passed_on = len(reads) + len({one for one, _ in reads})
    reduced = sum(map(node_bytes, region.reduced))
    return reduced + sum(map(node_bytes, region.gathered)) + passed_on * reduced // len(region.reduced)


def _read_by_kernels(region: ShardedRegion) -> list[Node]:
    """What a kernel outside reads whole, which would otherwise have computed it."""
    outside = lambda node: (user for user in readers_of(node) if user not in region.plans)
    return [node for node in region.gathered if any(map(_is_by_rows, outside(node)))]


def _is_by_rows(node: Node) -> bool:
    """Whether an operation is elementwise, or has a rule of its own."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in _BY_ROWS or node.target in NORMS


# ---- the rewrite


def shard(step: StepGraph, region: ShardedRegion) -> None:
    """Let each rank compute its rows of ``region``. Changes ``step``."""
    gathered = [at for at, node in enumerate(region.plans) if node in region.gathered]
    # Ranks that compute the same may read other values whole: gathers of one size would meet.
    text = f"{described(region.plans, step, region.rows.group)}\n{gathered}"
    starts = [wait.all_input_nodes[0] for wait in region.reduced]
    own = _OwnRows(step.graph, region.rows, hashlib.sha256(text.encode()).hexdigest()[:16])
    for node, plan in region.plans.items():
        own.compute(node, plan)
    for node in region.gathered:
        own.gather(node)
    for node in reversed(region.plans):
        step.graph.erase_node(node)
    for start in starts:
        step.graph.erase_node(start)
    drop_dead(step.graph)


def _last_captured(graph: torch.fx.Graph) -> dict[Node, int]:
    """For each node the position, among the captured collectives, of the last one that it depends on; -1 for none."""
    found: dict[Node, int] = {}
    for node in graph.nodes:
        before = (found[used] for used in node.all_input_nodes)
        found[node] = max([node.meta.get("capture_order", -1), *before])
    return found


class _OwnRows:
    """Computes the rank's rows of the nodes of a region (:class:`weft.inductor.passes.row_rules.Chunk`)."""

    def __init__(self, graph: torch.fx.Graph, rows: Rows, digest: str) -> None:
        self.graph = graph
        self.group, self.ranks, self.rows = rows.group, rows.ranks, rows.count // rows.ranks
        self.digest, self.started = digest, 0
        self.order = _last_captured(graph)
        self.parts: dict[Node, Node] = {}
        self.call: Any = None

    def get(self, node: Node) -> Node:
        """The rank's rows of a node of the region."""
        return self.parts[node]

    def part(self, node: Node, prefix: int, space: Space, dim: int = 0) -> Node:
        """There are no rows outside the region: which of them are this rank's, the graphs of ranks would not share."""
        raise AssertionError(f"{node.name} has rows outside the region")

    def compute(self, node: Node, plan: RowPlan) -> None:
        """Compute the rank's rows of ``node`` at its place, or its sum over them and then over the ranks."""
        with self.graph.inserting_before(node):
            self.call = emitter(self.graph, node)
            if node.target is WAIT:
                self.parts[node] = self._reduce(node)
            elif plan.emit is not None:
                self.parts[node] = plan.emit(self)
            else:
                assert plan.add is not None
                self._replace_sum(node, plan.add(self, None))

    def _reduce(self, wait: Node) -> Node:
        (start,) = wait.all_input_nodes
        source, op = start.args[:2]
        width = wait.meta["val"].shape[-1]
        with self.graph.inserting_before(start):
            flat = self._view(source, [self.rows * self.ranks, width])
            made = self._start(start, REDUCE_SCATTER.op, flat, op, self.ranks, self.group)
        return self.call(WAIT, made)

    def _replace_sum(self, node: Node, part: Node) -> None:
        """Put the sum over all ranks in the place of a sum over all rows."""
        val = node.meta["val"]
        start = self._start(node, ALL_REDUCE.op, part, "sum", self.group)
        whole = self.call(WAIT, start)
        if whole.meta["val"].dtype != val.dtype:
            whole = self.call(aten._to_copy.default, whole, dtype=val.dtype)
        replace_uses(self.graph, node, self._view(whole, list(val.shape)))

    def gather(self, node: Node) -> None:
        """Put all rows in the place of ``node``."""
        with self.graph.inserting_before(node):
            self.call = emitter(self.graph, node)
            part = self.parts[node]
            if not part.meta["val"].is_contiguous():
                part = self.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            whole = self.call(WAIT, self._start(node, ALL_GATHER.op, part, self.ranks, self.group))
            node.replace_all_uses_with(self._view(whole, list(node.meta["val"].shape)))

    def _start(self, like: Node, target: Any, *args: Any) -> Node:
        """A collective of the region, which is told from the others by its number: several are of one size."""
        node = emitter(self.graph, like)(target, *args)
        node.meta["agreed_rows"] = f"{self.digest} {self.started}"
        # Issued by these numbers, it comes behind all collectives that it depends on.
        node.meta["capture_order"] = self.order[like]
        self.started += 1
        return node

    def _view(self, node: Any, shape: list[int]) -> Node:
        """A view of sizes ``shape``; of a view of that, the tensor itself."""
        view = emitter(self.graph, node)(aten.view.default, node, shape)
        known = same_tensor(view)
        if known is None:
            return view
        self.graph.erase_node(view)
        return known
