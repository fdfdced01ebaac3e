"""The output projection and cross-entropy run by chunks of rows, forward and backward: full logits never exist.

With a vocabulary of 128k the logits of 8,192 tokens take 4 GiB in float32, and a step holds several such tensors at
once. In the graph of a whole step the gradient of the loss is known before the logits are. So each chunk of rows can be
computed to the end: logits, log-softmax, loss, gradient of the logits, and from that the chunk's part of the gradients
of the hidden states and of the weight. This takes three GEMMs, as before, and computes nothing twice.

The pass starts at a log-softmax (or logsumexp) whose input comes from a matrix product. It follows everything that is
computed row by row from the logits (:mod:`weft.inductor.passes.row_rules`), however the loss was written. It leaves a
step alone, and logs why at level DEBUG, where an operation reads the whole logits or where the gradient of the loss
depends on the value of the loss.

Changes results: GEMMs of fewer rows may sum in another order. The weight's gradient is a sum over chunks in the
weight's dtype: each chunk's product is added in float32 and rounded once. In bfloat16 its error grows from 1/2 to at
most about sqrt(chunks)/2 units in the last place. Losses of rows, and gradients of a bias, are summed in float32 or
wider.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.graph import StepGraph
from weft.capture.node_kinds import is_collective, is_effect
from weft.capture.node_meta import meta_of, source_line
from weft.capture.sizes_in_bytes import format_bytes
from weft.inductor.graph.fake_values import replace_uses
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.passes.row_rules import Form, RowPlan, RowRegion, Selection, Space, filled_with, slice_arguments

log = logging.getLogger(__name__)

Node = torch.fx.Node
aten = torch.ops.aten

_NORMALISERS = (aten._log_softmax.default, aten.logsumexp.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default)


@changes_bits(
    "products of fewer rows may sum in another order, and the weight's gradient is a sum over chunks in its own dtype"
)
class ChunkLoss:
    """A pass that computes losses over large vocabularies by chunks of rows.

    Args:
        chunk_bytes: largest size in bytes of a tensor of a chunk.
        smallest_bytes: losses whose logits take fewer bytes, in the widest dtype they appear in, stay whole.
        least_rows: rows of a chunk at least, whatever their bytes, so that GEMMs stay efficient.
        multiple: chunks other than the last have a multiple of this many rows.
    """

    __name__ = "chunk_loss"

    def __init__(
        self,
        *,
        chunk_bytes: int = 512 << 20,
        smallest_bytes: int = 256 << 20,
        least_rows: int = 2048,
        multiple: int = 128,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.smallest_bytes = smallest_bytes
        self.least_rows = least_rows
        self.multiple = multiple

    def __call__(self, step: StepGraph) -> StepGraph:
        """Chunk each large loss of ``step``. Changes ``step``."""
        losses: dict[Node, tuple[Node, Selection | None]] = {}
        for node in step.graph.nodes:
            if node.target in _NORMALISERS:
                head, selection = _head_of(node)
                if head is not None:
                    losses.setdefault(head, (node, selection))
        # One region per head, though forward and backward may normalise its logits several times.
        for head, (node, selection) in losses.items():
            try:
                self._rewrite(_Region(step, head, selection))
            # A loss that stays whole is correct, only larger. The reason is for whoever wonders about memory.
            except _CannotChunk as reason:
                log.debug("the loss at %s is computed whole: %s", source_line(node) or node.name, reason)
        return step

    def _rewrite(self, region: _Region) -> None:
        count = region.rows.number(Space.TAKEN)
        row_bytes = region.row_bytes()
        if row_bytes * count < self.smallest_bytes:
            raise _CannotChunk(f"its logits take only {format_bytes(row_bytes * count)}")
        # Equal chunks, so that all but the last share their shapes and kernels.
        most = max(self.chunk_bytes // row_bytes, self.least_rows)
        most = max(most // self.multiple, 1) * self.multiple
        chunks = -(-count // most)
        if chunks == 1:
            raise _CannotChunk(f"its {count} rows are one chunk")
        rows = -(-count // (chunks * self.multiple)) * self.multiple
        bounds = [(start, min(start + rows, count)) for start in range(0, count, rows)]
        log.debug("%d rows of %s in %d chunks", count, region.head.name, len(bounds))
        _ChunkRewriter(region).run(bounds)


class _CannotChunk(Exception):
    """The reason why a loss is computed whole."""


def _head_of(node: Node) -> tuple[Node | None, Selection | None]:
    """The GEMM that makes the logits that ``node`` normalises, and the rows that are selected from it. Follows the
    widest operand upwards."""
    selection = None
    sizes = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    if not sizes:
        return None, None
    width = sizes[-1]
    # Casts, scalings and soft-caps keep the width of the vocabulary: follow the first operand that has it.
    while node.target not in _PRODUCTS:
        candidates = [used for used in node.all_input_nodes if _is_tensor(used) and used.meta["val"].dim() > 0]
        widths = ((used, used.meta["val"].shape) for used in candidates)
        wide = [used for used, shape in widths if len(shape) > 1 and torch_adapter.surely_equal(shape[-1], width)]
        if node.op != "call_function" or not wide:
            return None, None
        if node.target is aten.slice.Tensor:
            dim, *where = slice_arguments(node)
            sizes = tuple(wide[0].meta["val"].shape[:-1])
            if dim < len(sizes):
                if selection is not None:  # `Selection` describes one slice of rows
                    return None, None
                selection = Selection(sizes, (dim, *where), tuple(node.meta["val"].shape[:-1]))
        node = wide[0]
        width = node.meta["val"].shape[-1]
    return node, selection


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


class _Region:
    """The nodes that are computed row by row from the logits, and those that read their results.

    Attributes:
        rows: the rows, and how each node of the region is computed.
        exits: nodes whose value the rest of the step reads, with their plans.
        totals: nodes that hold the divisor of a mean.
        late: nodes up to the last node of the region that depend on an exit, in the order of the graph.
        constants: nodes that read only sizes of the region or of late nodes.

    Raises:
        _CannotChunk: an operation needs all rows at once.
    """

    def __init__(self, step: StepGraph, head: Node, selection: Selection | None) -> None:
        self.step = step
        self.head = head
        self.nodes = list(step.graph.nodes)
        self.order = {node: at for at, node in enumerate(self.nodes)}
        count, self.width = head.meta["val"].shape
        if any(type(size) is not int for used in (head, *head.all_input_nodes) for size in used.meta["val"].shape):
            raise _CannotChunk("its sizes are only known at run time")
        if selection is not None and math.prod(selection.sizes) != count:
            raise _CannotChunk("its rows are not selected from the whole logits")
        self.rows = RowRegion(count, selection)
        self.plans = self.rows.plans
        self.exits: dict[Node, RowPlan] = {}
        self.totals: list[Node] = []
        self.late: dict[Node, None] = {}
        self.constants: list[Node] = []
        self._grow()
        self._prune()
        self._find_late_nodes()

    def row_bytes(self) -> int:
        """Bytes of a row of the largest tensor."""
        vals = [node.meta["val"] for node, plan in self.plans.items() if plan.form is Form.ROWS]
        count = self.rows.number(Space.TAKEN)
        return max(val.numel() * val.dtype.itemsize for val in vals) // count

    def is_large(self, node: Node) -> bool:
        """Whether the node of the region has about as many elements per row as the logits, or is no value by rows."""
        plan = self.plans[node]
        if plan.form is not Form.ROWS:
            return True
        return 2 * node.meta["val"].numel() > self.rows.number(plan.space) * self.width

    def _grow(self) -> None:
        """Follow the users of the logits until their values are small."""
        space = Space.TAKEN if self.rows.selection is None else Space.ALL
        self.plans[self.head] = _head_plan(self.head, space)
        # A heap in the order of the graph: when a node is visited, all of its operands have been.
        todo: list[tuple[int, Node]] = []
        self._push_users(todo, self.head)
        while todo:
            node = heapq.heappop(todo)[1]
            if node in self.plans or node in self.exits or node in self.totals:
                continue
            source = node.args[0] if node.args else None
            if node.target is operator.getitem and self._form(source) is Form.LOSS:
                self._pick(todo, node)
                continue
            plan = self._plan(node) if node.op == "call_function" else None
            if plan is None:
                large = [used for used in node.all_input_nodes if used in self.plans and self.is_large(used)]
                # A reader of small values only is outside the region: these values become exits.
                if large:
                    raise _CannotChunk(f"{node.name} reads all rows of {large[0].name}")
            # The region ends at sums over rows and at GEMMs, whose results have the width of the hidden states.
            elif plan.form is Form.SUM or node.target in _PRODUCTS:
                self.exits[node] = plan
            else:
                self.plans[node] = plan
                self._push_users(todo, node)

    def _form(self, node: Any) -> Form | None:
        plan = self.plans.get(node) if isinstance(node, Node) else None
        return plan.form if plan is not None else None

    def _push_users(self, todo: list[tuple[int, Node]], node: Node) -> None:
        for user in node.users:
            heapq.heappush(todo, (self.order[user], user))

    def _pick(self, todo: list[tuple[int, Node]], node: Node) -> None:
        """Add a result of ``nll_loss_forward``: the loss (0) or the total weight (1), which divides a mean."""
        loss = node.args[0]
        assert isinstance(loss, Node)
        if node.args[1] == 1:
            self.totals.append(node)
        elif loss.args[3] == 0:
            self.plans[node] = RowPlan(Form.ROWS, Space.TAKEN, 1, lambda chunk: chunk.get(loss))
            self._push_users(todo, node)
        else:
            self.exits[node] = self.plans[loss]

    def _plan(self, node: Node) -> RowPlan | None:
        for used in node.all_input_nodes:
            if used not in self.plans:
                self._add_operand(used)
        return self.rows.plan(node)

    def _add_operand(self, node: Node) -> None:
        """Add a node that is as large as the logits but not computed from them (one-hot labels)."""
        if node.op != "call_function" or not _is_tensor(node) or is_effect(node) or node in self.exits:
            return
        val = node.meta["val"]
        # Storage, not sizes: an expanded scalar has the shape of the logits and takes no memory.
        stored = val.untyped_storage().nbytes() if val.layout is torch.strided else 0
        large = self.rows.number(Space.TAKEN) * self.width
        if type(stored) is not int or stored * 2 < large * val.dtype.itemsize:
            return
        for used in node.all_input_nodes:
            if used not in self.plans:
                self._add_operand(used)
        plan = self.rows.plan(node)
        if plan is not None and plan.form is Form.ROWS:
            self.plans[node] = plan

    def _prune(self) -> None:
        """Drop small nodes that neither read large ones nor are read by them."""
        needed: set[Node] = set()
        for node in sorted(self.plans, key=self.order.__getitem__, reverse=True):
            used_by = any(user in needed for user in node.users)
            if used_by or self.is_large(node) or self._reads_large(node):
                needed.add(node)
        for node in [node for node in self.plans if node not in needed]:
            del self.plans[node]
        for node in [node for node in self.exits if not self._reads_large(node)]:
            del self.exits[node]
        # Small values by rows that others read are concatenated over the chunks.
        for node, plan in self.plans.items():
            outside = [user for user in node.users if user not in self.plans and user not in self.exits]
            if plan.form is Form.ROWS and not self.is_large(node) and outside:
                self.exits[node] = plan
        if any(plan.space is Space.ALL for plan in self.exits.values()):
            raise _CannotChunk("rows that the loss does not select are read")

    def _reads_large(self, node: Node) -> bool:
        return any(used in self.plans and self.is_large(used) for used in node.all_input_nodes)

    def _find_late_nodes(self) -> None:
        """Find the nodes that depend on exits; no node of the region may."""
        self.last = max((*self.plans, *self.exits), key=self.order.__getitem__)
        for node in self.nodes[self.order[self.head] : self.order[self.last] + 1]:
            if node in self.totals:
                continue
            waits = [used for used in node.all_input_nodes if used in self.late or used in self.exits]
            inside = node in self.plans or node in self.exits
            # `ones_like(loss)`, the seed of backward, reads only a size. Counted as late, it would make all of backward
            # depend on the loss.
            if not inside and filled_with(node) is not None:
                if waits or any(used in self.plans for used in node.all_input_nodes):
                    self.constants.append(node)
            elif not inside and waits:
                self.late[node] = None
            elif inside and any(used in self.late or used not in self.plans for used in waits):
                raise _CannotChunk(f"{node.name} needs {waits[0].name}, which needs all rows")
        self._check_order()

    def _check_order(self) -> None:
        """Late nodes move after the region, so random operations and calls with effects must keep their order."""
        waiting = False
        for node in self.nodes[self.order[self.head] : self.order[self.last] + 1]:
            ordered = is_effect(node) and not is_collective(node)
            if ordered and node not in self.late and waiting:
                raise _CannotChunk(f"{node.name} must run after nodes that read the loss")
            waiting |= ordered and node in self.late


def _head_plan(head: Node, space: Space) -> RowPlan:
    added = [*head.args[:-2]]
    hidden, weight = head.args[-2:]
    assert isinstance(hidden, Node)
    whole_bias = all(isinstance(bias, Node) and bias.meta["val"].dim() == 1 for bias in added)
    if not whole_bias:
        raise _CannotChunk("the addend of its GEMM is not a bias")

    def emit(chunk: Any) -> Node:
        return chunk.call(head.target, *added, chunk.part(hidden, 1, space), weight, **head.kwargs)

    return RowPlan(Form.ROWS, space, 1, emit)


class _Chunk:
    """Emits the nodes of rows ``start`` to ``end``."""

    def __init__(self, rewriter: _ChunkRewriter, start: int, end: int) -> None:
        self.rewriter = rewriter
        self.start, self.end = start, end
        self.rows = end - start
        self.values: dict[Node, Node] = {}
        self.parts: dict[tuple[Node, int], Node] = {}
        self.call = rewriter.call

    def get(self, node: Node) -> Node:
        """This chunk's part of a node of the region, emitted at its first use: after what it reads."""
        if node not in self.values:
            region = self.rewriter.region
            plan = region.plans.get(node) or region.exits[node]
            assert plan.emit is not None
            with self.rewriter.like(node):
                self.values[node] = plan.emit(self)
        return self.values[node]

    def part(self, node: Node, prefix: int, space: Space, dim: int = 0) -> Node:
        """This chunk's rows of a tensor from outside the region, as a slice of its flattened form."""
        flat = self.rewriter.flat(node, prefix, space, dim)
        if (flat, dim) not in self.parts:
            self.parts[flat, dim] = self.call(aten.slice.Tensor, flat, dim, self.start, self.end)
        return self.parts[flat, dim]


class _ChunkRewriter:
    """Emits all chunks of a region and replaces its exits by the joined results."""

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.graph = region.step.graph
        self.mode = region.head.meta["val"].fake_mode
        self.source = region.head
        self.replaced: dict[Node, Node] = {}
        self.flattened: dict[tuple[Node, int, Space, int], Node] = {}
        self.totals: dict[tuple[Node, torch.dtype], Node] = {}

    def run(self, bounds: list[tuple[int, int]]) -> None:
        """Rewrite the region in chunks of rows ``bounds``: (start, end) each."""
        region = self.region
        behind = region.last.next
        with torch_adapter.only_mode(self.mode), torch_adapter.below_autograd():
            self._replace_constants()
            self._replace_totals()
            with self.graph.inserting_before(behind):
                results = self._compute(bounds)
        # Late nodes stood among the nodes of the region. They read exits, which are complete after the last chunk.
        tail = behind.prev
        for late in reversed(region.late):
            tail.append(late)
        for exit_, result in results.items():
            replace_uses(self.graph, exit_, result)
        gone = {*region.plans, *region.exits, *region.totals, *region.constants}
        for node in sorted(gone, key=region.order.__getitem__, reverse=True):
            if not node.users:
                self.graph.erase_node(node)

    # ---- emitting

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node with its fake value and the metadata of the node that it stands for."""
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda used: self.replaced.get(used, used))
        node = self.graph.call_function(target, args, kwargs)
        fakes: Any = torch.fx.node.map_arg((args, kwargs), lambda used: used.meta["val"])
        # The chunks run where the region ended, in backward, the logits too: liveness and recomputation go by stage.
        stage = self.region.last.meta.get("stage", "")
        node.meta = meta_of(self.source, val=target(*fakes[0], **fakes[1]), stage=stage)
        return node

    @contextlib.contextmanager
    def like(self, node: Node) -> Iterator[None]:
        """New nodes inside the context stand for ``node``."""
        before, self.source = self.source, node
        try:
            yield
        finally:
            self.source = before

    def flat(self, node: Node, prefix: int, space: Space, dim: int) -> Node:
        """A tensor from outside the region, its selected rows as one leading dimension (or dimension 1 of a matrix)."""
        key = (node, prefix, space, dim)
        if key not in self.flattened:
            self.flattened[key] = self._flatten(*key)
        return self.flattened[key]

    def _flatten(self, node: Node, prefix: int, space: Space, dim: int) -> Node:
        selection = self.region.rows.selection
        takes = selection is not None and space is not Space.TAKEN
        if dim == 1 and takes:
            return self.call(aten.t.default, self._flatten(self.call(aten.t.default, node), 1, space, 0))
        rest = list(node.meta["val"].shape[prefix:])
        if takes:
            assert selection is not None
            node = self.call(aten.reshape.default, node, [*selection.sizes, *rest])
            node = self.call(aten.slice.Tensor, node, *selection.arguments)
            return self.call(aten.reshape.default, node, [math.prod(selection.taken), *rest])
        return node if prefix == 1 else self.call(aten.reshape.default, node, [self.region.rows.number(space), *rest])

    # ---- nodes outside the chunks

    def _replace_constants(self) -> None:
        for node in self.region.constants:
            val = node.meta["val"]
            with self.graph.inserting_before(node), self.like(node):
                full = self.call(
                    aten.full.default, list(val.shape), filled_with(node), dtype=val.dtype, device=val.device
                )
            node.replace_all_uses_with(full)
            self.replaced[node] = full

    def _replace_totals(self) -> None:
        """Compute the divisors of means from the labels alone."""
        for node in self.region.totals:
            loss = node.args[0]
            assert isinstance(loss, Node)
            with self.graph.inserting_before(loss), self.like(node):
                total = self._total(loss, node.meta["val"].dtype)
            node.replace_all_uses_with(total)
            self.replaced[node] = total

    def _total(self, loss: Node, dtype: torch.dtype) -> Node:
        if (loss, dtype) not in self.totals:
            self.totals[loss, dtype] = self._new_total(loss, dtype)
        return self.totals[loss, dtype]

    def _new_total(self, loss: Node, dtype: torch.dtype) -> Node:
        _, target, weight, reduction, ignored = loss.args
        if reduction == 0:  # torch returns a total weight of 0 for losses that are not reduced
            return self.call(aten.full.default, [], 0, dtype=dtype, device=loss.meta["val"][1].device)
        counts = self.call(aten.ne.Scalar, target, ignored)
        if weight is not None:
            # `ignore_index` is no valid index: ignored labels read index 0, and the mask drops that weight.
            known = self.call(aten.mul.Tensor, target, counts)
            weights = self.call(aten.index_select.default, weight, 0, known)
            counts = self.call(aten.mul.Tensor, weights, counts)
        total = self.call(aten.sum.default, counts)
        return self.call(aten._to_copy.default, total, dtype=dtype)

    # ---- the chunks

    def _compute(self, bounds: list[tuple[int, int]]) -> dict[Node, Node]:
        """The values of the exits, concatenated or summed over chunks."""
        exits = sorted(self.region.exits.items(), key=lambda exit_: self.region.order[exit_[0]])
        pieces: dict[Node, list[Node]] = {node: [] for node, _ in exits}
        # One chunk to its end before the next one begins: at most one chunk of logits is live.
        for start, end in bounds:
            chunk = _Chunk(self, start, end)
            for node, plan in exits:
                with self.like(node):
                    if plan.add is not None:
                        pieces[node] = [plan.add(chunk, pieces[node][0] if pieces[node] else None)]
                    else:
                        pieces[node].append(chunk.get(self._loss_of(node)))
        results = {}
        for node, plan in exits:
            with self.like(node):
                results[node] = self._joined(node, plan, pieces[node])
        return results

    def _loss_of(self, node: Node) -> Node:
        return node.args[0] if self.region.exits[node].form is Form.LOSS else node  # type: ignore[return-value]

    def _joined(self, node: Node, plan: RowPlan, pieces: list[Node]) -> Node:
        val = node.meta["val"]
        if plan.form is Form.SUM:
            return self._as(pieces[0], val)
        rows = self.call(aten.cat.default, pieces)
        if plan.form is Form.LOSS:
            return self._reduced(node, rows)
        selection = self.region.rows.selection
        if plan.space is Space.PADDED and selection is not None:
            rest = list(val.shape[plan.prefix :])
            rows = self.call(aten.reshape.default, rows, [*selection.taken, *rest])
            rows = self.call(aten.slice_backward.default, rows, [*selection.sizes, *rest], *selection.arguments)
        return self._as(rows, val)

    def _reduced(self, node: Node, rows: Node) -> Node:
        """The mean or sum of all rows' losses."""
        loss = node.args[0]
        assert isinstance(loss, Node)
        val = node.meta["val"]
        # In float32 or wider, as torch accumulates the loss of all rows.
        result = self.call(aten.sum.default, rows, dtype=torch.promote_types(val.dtype, torch.float32))
        if loss.args[3] == 1:
            result = self.call(aten.div.Tensor, result, self._total(loss, result.meta["val"].dtype))
        return self._as(result, val)

    def _as(self, node: Node, val: torch.Tensor) -> Node:
        if node.meta["val"].dtype != val.dtype:
            node = self.call(aten._to_copy.default, node, dtype=val.dtype)
        if node.meta["val"].shape != val.shape:
            node = self.call(aten.reshape.default, node, list(val.shape))
        return node
