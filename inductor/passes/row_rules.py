"""Rules by which operations are computed for a chunk of rows at a time.

The rows are those of the logits matrix: its leading dimensions (batch and position, say), flattened. A *region* is a
set of nodes that each compute something row by row from the logits, or a sum over rows. For each node a rule says which
dimensions of its result are rows, and how to compute a chunk of it. In a chunk the rows are always one leading
dimension: a value of shape [batch, position, rest...] is [rows, rest...] there.

Labels that are shifted by a slice of the logits (``logits[:, :-1]``) drop rows. In backward ``slice_backward`` puts
zeros in their place. Dropped rows are never computed: the operands are sliced instead.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Node = torch.fx.Node
aten = torch.ops.aten


class Space(enum.Enum):
    """Which rows a value has. ALL: all rows of the logits. TAKEN: those that the loss selects. PADDED: all rows, zero
    where the loss does not select them."""

    ALL = "all"
    TAKEN = "taken"
    PADDED = "padded"


class Form(enum.Enum):
    """How rows lie in a value. ROWS: in its leading dimensions. TURNED: in the second dimension of a matrix. SUM:
    summed over rows, so chunks add up. LOSS: results of ``nll_loss_forward``."""

    ROWS = "rows"
    TURNED = "turned"
    SUM = "sum"
    LOSS = "loss"


class Chunk(Protocol):
    """Emits the nodes of one chunk of rows."""

    rows: int

    def get(self, node: Node) -> Node:
        """This chunk's part of a node of the region."""
        ...

    def part(self, node: Node, prefix: int, space: Space, dim: int = 0) -> Node:
        """This chunk's rows of a tensor from outside the region, whose rows are its first ``prefix`` dimensions
        (dimension ``dim`` of a matrix)."""
        ...

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of ``target``."""
        ...


Emit = Callable[[Chunk], Node]


@dataclass(frozen=True)
class RowPlan:
    """How a node of the region is computed.

    Attributes:
        form, space: how the rows lie in the node's value, and which they are.
        prefix: how many leading dimensions are rows (form ROWS).
        emit: computes one chunk; None for a sum.
        add: for a sum, adds one chunk to the sum of earlier chunks (None for the first).
    """

    form: Form
    space: Space
    prefix: int
    emit: Emit | None = None
    add: Callable[[Chunk, Node | None], Node] | None = None


@dataclass(frozen=True)
class Selection:
    """The rows that a loss selects: ``slice(x, *arguments)`` of logits with leading dimensions ``sizes``, which leaves
    leading dimensions ``taken``."""

    sizes: tuple[int, ...]
    arguments: tuple[Any, ...]
    taken: tuple[int, ...]


class RowRegion:
    """The rows of one region, and the plans of its nodes so far."""

    def __init__(self, count: int, selection: Selection | None) -> None:
        self.count = count
        self.selection = selection
        self.plans: dict[Node, RowPlan] = {}

    def number(self, space: Space) -> int:
        """The number of rows of a value of ``space``."""
        return math.prod(self.selection.taken) if self.selection and space is Space.TAKEN else self.count

    def prefix_of(self, shape: Sequence[int], space: Space) -> int | None:
        """The number of leading dimensions of ``shape`` that are rows; None if no prefix has that many elements."""
        # The shortest such prefix. Dimensions of size 1 behind it count as contents of a row: the same data.
        total = 1
        for at, size in enumerate(shape):
            total *= size
            if total == self.number(space):
                return at + 1
        return None

    def plan(self, node: Node) -> RowPlan | None:
        """The plan of ``node``; None where no rule applies."""
        rule = _RULES.get(node.target)
        if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            rule = _pointwise
        return rule(self, node) if rule is not None else None

    def rows(self, node: Any) -> RowPlan | None:
        """The plan of a node of the region whose form is ROWS, else None."""
        plan = self.plans.get(node) if isinstance(node, Node) else None
        return plan if plan is not None and plan.form is Form.ROWS else None

    def operand(self, value: Any, like: Node, prefix: int, space: Space) -> Callable[[Chunk], Any] | None:
        """A function that returns a chunk's part of an operand that broadcasts with ``like``, whose first ``prefix``
        dimensions are rows. None where that is not possible."""
        if not isinstance(value, Node):
            return lambda chunk: value
        val, whole = value.meta["val"], like.meta["val"]
        # A scalar of the region would be a sum over rows, which is complete only after the last chunk.
        if not isinstance(val, torch.Tensor) or val.dim() == 0:
            return (lambda chunk: value) if value not in self.plans else None
        # Broadcasting aligns trailing dimensions: `leading` of the operand's dimensions fall on rows.
        leading, rest = prefix - (whole.dim() - val.dim()), whole.dim() - prefix
        covered = leading == prefix and val.shape[:prefix] == whole.shape[:prefix]
        if value in self.plans:
            plan = self.rows(value)
            fits = plan is not None and plan.space is space and plan.prefix == prefix and covered
            return (lambda chunk: chunk.get(value)) if fits else None
        if covered:  # one value per row, like labels: slice it
            return lambda chunk: chunk.part(value, prefix, space)
        if leading <= 0:  # the same for all rows, like a bias
            return lambda chunk: value
        if all(size == 1 for size in val.shape[:leading]):
            return lambda chunk: chunk.call(aten.reshape.default, value, list(val.shape[val.dim() - rest :]))
        return None


Rule = Callable[[RowRegion, Node], RowPlan | None]


def _pointwise(rows: RowRegion, node: Node) -> RowPlan | None:
    """Elementwise operations."""
    space, widest = _space(rows, node)
    prefix = rows.prefix_of(node.meta["val"].shape, space) if widest is None else widest.prefix
    # Dropped rows are never computed: an operation on padded rows must map zeros to zeros.
    if prefix is None or (space is Space.PADDED and node.target not in _KEEP_ZEROS):
        return None
    args = [rows.operand(arg, node, prefix, space) for arg in node.args]
    kwargs = {name: rows.operand(arg, node, prefix, space) for name, arg in node.kwargs.items()}
    if None in args or None in kwargs.values():
        return None

    def emit(chunk: Chunk) -> Node:
        named = {name: get(chunk) for name, get in kwargs.items()}  # type: ignore[misc]
        return chunk.call(node.target, *(get(chunk) for get in args), **named)  # type: ignore[misc]

    return RowPlan(Form.ROWS, space, prefix, emit)


def _space(rows: RowRegion, node: Node) -> tuple[Space, RowPlan | None]:
    """The space and the plan of the widest operand in the region; (TAKEN, None) without such operands."""
    plans = [(used.meta["val"].dim(), rows.plans[used]) for used in node.all_input_nodes if used in rows.plans]
    widest = max(plans, key=lambda plan: plan[0], default=(0, None))[1]
    return (widest.space if widest is not None else Space.TAKEN), widest


def _view(rows: RowRegion, node: Node) -> RowPlan | None:
    """Reshapes: sizes change, the order of elements does not."""
    source: Any = node.args[0]
    plan = rows.rows(source)
    if plan is None:
        return None
    shape = node.meta["val"].shape
    prefix = rows.prefix_of(shape, plan.space)
    if prefix is None:
        return None
    same = shape[prefix:] == source.meta["val"].shape[plan.prefix :]

    def emit(chunk: Chunk) -> Node:
        part = chunk.get(source)
        return part if same else chunk.call(aten.reshape.default, part, [chunk.rows, *shape[prefix:]])

    return RowPlan(Form.ROWS, plan.space, prefix, emit)


def _transpose(rows: RowRegion, node: Node) -> RowPlan | None:
    """Transposes of a matrix."""
    source: Any = node.args[0]
    plan = rows.plans.get(source)
    val = source.meta["val"]
    turns = node.target is aten.t.default or sorted(d % 2 for d in _flat(node.args[1:])) == [0, 1]
    if node.target is aten.permute.default and [d % 2 for d in _flat(node.args[1:])] != [1, 0]:
        turns = False
    if plan is None or val.dim() != 2 or not turns or (plan.form is Form.ROWS and plan.prefix != 1):
        return None
    # The transpose of the logits' gradient is an operand of the weight gradient: it stays a view within each chunk.
    form = {Form.ROWS: Form.TURNED, Form.TURNED: Form.ROWS}.get(plan.form)
    if form is None:
        return None
    return RowPlan(form, plan.space, 1, lambda chunk: chunk.call(aten.t.default, chunk.get(source)))


def _flat(args: Any) -> list[int]:
    return [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]


def _reduction(rows: RowRegion, node: Node) -> RowPlan | None:
    """``op(x, dim or dims, ...)`` over dimensions that are not rows; or a sum over all dimensions that are."""
    source: Any = node.args[0]
    plan = rows.rows(source)
    if plan is None:
        return None
    rank = source.meta["val"].dim()
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [d % rank for d in _flat([dim])] if dim is not None and _flat([dim]) else list(range(rank))
    if set(range(plan.prefix)) <= set(dims):
        return _sum_over_rows(node, plan, dims) if node.target in _SUMS else None
    # A reduction over some of the row dimensions mixes rows of several chunks. On padded rows, a log-softmax would not
    # keep zeros.
    if any(d < plan.prefix for d in dims) or dim is None or plan.space is Space.PADDED:
        return None
    # In a chunk all rows are dimension 0, so the contents of a row begin at dimension 1.
    moved = [d - plan.prefix + 1 for d in dims]
    inner: Any = moved if isinstance(dim, (list, tuple)) else moved[0]
    return RowPlan(
        Form.ROWS,
        plan.space,
        plan.prefix,
        lambda chunk: chunk.call(node.target, chunk.get(source), inner, *node.args[2:], **_without_dim(node)),
    )


def _without_dim(node: Node) -> dict[str, Any]:
    return {name: value for name, value in node.kwargs.items() if name != "dim"}


def _sum_over_rows(node: Node, plan: RowPlan, dims: list[int]) -> RowPlan:
    """Sums of chunks add up in float32 or wider."""
    source: Any = node.args[0]
    # A narrow sum of many chunks would lose bits at each addition; integers are exact in their own dtype.
    inner = [0, *(d - plan.prefix + 1 for d in dims if d >= plan.prefix)]
    wide = torch.promote_types(node.meta["val"].dtype, torch.float32)
    wide = wide if node.meta["val"].dtype.is_floating_point else node.meta["val"].dtype

    def add(chunk: Chunk, before: Node | None) -> Node:
        part = chunk.call(aten.sum.dim_IntList, chunk.get(source), inner, False, dtype=wide)
        return part if before is None else chunk.call(aten.add.Tensor, before, part)

    return RowPlan(Form.SUM, plan.space, 0, add=add)


def _softmax_backward(rows: RowRegion, node: Node) -> RowPlan | None:
    """``(grad, output, dim, input dtype)``."""
    out = rows.rows(node.args[1])
    if out is None or out.space is not Space.TAKEN:
        return None
    dim: Any = node.args[2]
    dim = dim % node.meta["val"].dim()
    grad = rows.operand(node.args[0], node, out.prefix, out.space)
    if grad is None or dim < out.prefix:
        return None
    source: Any = node.args[1]
    return RowPlan(
        Form.ROWS,
        out.space,
        out.prefix,
        lambda chunk: chunk.call(
            node.target, grad(chunk), chunk.get(source), dim - out.prefix + 1, *node.args[3:], **node.kwargs
        ),
    )


def _nll_forward(rows: RowRegion, node: Node) -> RowPlan | None:
    """``(x, target, weight, reduction, ignore_index)``: in chunks the loss of each row, never reduced."""
    x: Any = node.args[0]
    target: Any = node.args[1]
    plan = rows.rows(x)
    if plan is None or plan.space is not Space.TAKEN or x.meta["val"].dim() != 2 or target in rows.plans:
        return None

    def emit(chunk: Chunk) -> Node:
        part = chunk.part(target, 1, plan.space)
        both = chunk.call(node.target, chunk.get(x), part, node.args[2], 0, node.args[4])
        return chunk.call(operator.getitem, both, 0)

    return RowPlan(Form.LOSS, plan.space, 1, emit)


def _nll_backward(rows: RowRegion, node: Node) -> RowPlan | None:
    """``(grad, x, target, weight, reduction, ignore_index, total weight)``."""
    grad, x, target, weight, reduction, ignored, total = node.args
    plan = rows.rows(x)
    if plan is None or plan.space is not Space.TAKEN or target in rows.plans:
        return None
    assert isinstance(grad, Node)
    assert isinstance(x, Node)
    assert isinstance(target, Node)
    # With reduction "none" the incoming gradient has one number per row; otherwise it is a scalar for all rows.
    if reduction == 0 and grad in rows.plans and rows.rows(grad) is None:
        return None

    def emit(chunk: Chunk) -> Node:
        by_row = chunk.get(grad) if grad in rows.plans else chunk.part(grad, 1, plan.space) if reduction == 0 else grad
        labels = chunk.part(target, 1, plan.space)
        return chunk.call(node.target, by_row, chunk.get(x), labels, weight, reduction, ignored, total)

    return RowPlan(Form.ROWS, plan.space, 1, emit)


def _indexed(rows: RowRegion, node: Node) -> RowPlan | None:
    """``gather(x, dim, index)``, ``scatter(x, dim, index, source)`` along a dimension that is not rows."""
    x, dim, index, *source = node.args
    assert isinstance(x, Node)
    assert isinstance(index, Node)
    plan = rows.rows(x)
    if plan is None or plan.space is not Space.TAKEN:
        return None
    inner = dim % x.meta["val"].dim() - plan.prefix + 1  # type: ignore[operator]
    where = rows.operand(index, x, plan.prefix, plan.space)
    sources = [rows.operand(item, index, plan.prefix, plan.space) for item in source]
    full = index.meta["val"].dim() == x.meta["val"].dim()
    # `full`: the index has the row dimensions of `x`, so a chunk of it belongs to the same rows.
    if inner < 1 or where is None or None in sources or not full or node.kwargs:
        return None

    def emit(chunk: Chunk) -> Node:
        source_parts = [get(chunk) for get in sources]  # type: ignore[misc]
        return chunk.call(node.target, chunk.get(x), inner, where(chunk), *source_parts)

    return RowPlan(Form.ROWS, plan.space, plan.prefix, emit)


def _filled(rows: RowRegion, node: Node) -> RowPlan | None:
    """Tensors filled with one number."""
    val = node.meta["val"]
    prefix = rows.prefix_of(val.shape, Space.TAKEN)
    number = filled_with(node)
    if prefix is None or number is None:
        return None
    rest = val.shape[prefix:]
    return RowPlan(
        Form.ROWS,
        Space.TAKEN,
        prefix,
        lambda chunk: chunk.call(aten.full.default, [chunk.rows, *rest], number, dtype=val.dtype, device=val.device),
    )


def filled_with(node: Node) -> Any:
    """The number that ``node`` fills a tensor with; None for nodes that do not."""
    if node.target in (aten.full_like.default, aten.new_full.default, aten.full.default):
        return node.args[-1] if not isinstance(node.args[-1], Node) else None
    target: Any = node.target
    return _FILLED.get(target)


def _matmul(rows: RowRegion, node: Node) -> RowPlan | None:
    """A GEMM with rows as an outer dimension is computed by rows; one that contracts over rows is a sum over them."""
    left, right = node.args
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    on_left, on_right = rows.plans.get(left), rows.plans.get(right)
    # By rows: the other operand is the same for all chunks.
    if on_left is not None and on_right is None and on_left.form is Form.ROWS and on_left.prefix == 1:
        emit = lambda chunk: chunk.call(node.target, chunk.get(left), right)
        return RowPlan(Form.ROWS, on_left.space, 1, emit)
    # Contracted over rows: a sum of one product per chunk.
    if on_left is not None and on_right is None and on_left.form is Form.TURNED:
        pair = lambda chunk: (chunk.get(left), chunk.part(right, 1, on_left.space))
        return RowPlan(
            Form.SUM, on_left.space, 0, add=lambda chunk, before: _product(chunk, before, node, *pair(chunk))
        )
    if on_right is not None and on_left is None and on_right.form is Form.ROWS and on_right.prefix == 1:
        both = lambda chunk: (chunk.part(left, 1, on_right.space, 1), chunk.get(right))
        return RowPlan(
            Form.SUM, on_right.space, 0, add=lambda chunk, before: _product(chunk, before, node, *both(chunk))
        )
    return None


def _product(chunk: Chunk, before: Node | None, node: Node, left: Node, right: Node) -> Node:
    """Accumulate a chunk's product into the sum of earlier chunks, in place where the executor can."""
    if before is None:
        return chunk.call(node.target, left, right)
    total = chunk.call(aten.addmm.default, before, left, right)
    # The sum of earlier chunks has no other reader, so the weight gradient needs memory only once.
    total.meta.update(inplace=aten.addmm_.default, val=before.meta["val"])
    return total


def _slice(rows: RowRegion, node: Node) -> RowPlan | None:
    """A slice inside a row, or the slice that selects the rows of the loss: its chunk is the value itself."""
    source: Any = node.args[0]
    plan = rows.rows(source)
    if plan is None:
        return None
    dim, *where = slice_arguments(node)
    if dim >= plan.prefix:
        inner = dim - plan.prefix + 1
        emit = lambda chunk: chunk.call(node.target, chunk.get(source), inner, *where)
        return RowPlan(Form.ROWS, plan.space, plan.prefix, emit) if plan.space is not Space.PADDED else None
    chosen = rows.selection
    sizes = tuple(source.meta["val"].shape[: plan.prefix])
    if plan.space is not Space.ALL or chosen is None or (sizes, (dim, *where)) != (chosen.sizes, chosen.arguments):
        return None
    return RowPlan(Form.ROWS, Space.TAKEN, plan.prefix, lambda chunk: chunk.get(source))


def slice_arguments(node: Node) -> tuple[Any, ...]:
    """Dimension (not negative), start, end and step of a slice."""
    padded = [*node.args[1:], *[None] * 4]
    start, end, step = padded[1], padded[2], padded[3]
    rank = node.meta["val"].dim()
    return ((padded[0] or 0) % rank, start or 0, (1 << 63) - 1 if end is None else end, 1 if step is None else step)


def _slice_backward(rows: RowRegion, node: Node) -> RowPlan | None:
    """``(grad, input sizes, dim, start, end, step)``."""
    source, sizes, along, *where = node.args
    plan = rows.rows(source)
    if plan is None or plan.space is not Space.TAKEN:
        return None
    assert isinstance(source, Node)
    assert isinstance(sizes, (list, tuple))
    assert isinstance(along, int)
    dim = along % len(sizes)
    if dim >= plan.prefix:
        inner = dim - plan.prefix + 1
        rest = list(sizes[plan.prefix :])
        emit = lambda chunk: chunk.call(node.target, chunk.get(source), [chunk.rows, *rest], inner, *where)
        return RowPlan(Form.ROWS, plan.space, plan.prefix, emit)
    chosen = rows.selection
    if chosen is None or (tuple(sizes[: plan.prefix]), (dim, *where)) != (chosen.sizes, chosen.arguments):
        return None
    return RowPlan(Form.ROWS, Space.PADDED, plan.prefix, lambda chunk: chunk.get(source))


def _dimension_change(rows: RowRegion, node: Node) -> RowPlan | None:
    """``unsqueeze``, ``squeeze`` and ``expand`` of dimensions that are not rows."""
    source: Any = node.args[0]
    plan = rows.rows(source)
    val = node.meta["val"]
    if (
        plan is None
        or plan.space is Space.PADDED
        or val.shape[: plan.prefix] != source.meta["val"].shape[: plan.prefix]
    ):
        return None
    rest = list(val.shape[plan.prefix :])
    target = aten.expand.default if node.target is aten.expand.default else aten.reshape.default
    if target is aten.expand.default and val.dim() != source.meta["val"].dim():
        return None
    emit = lambda chunk: chunk.call(target, chunk.get(source), [chunk.rows, *rest])
    return RowPlan(Form.ROWS, plan.space, plan.prefix, emit)


_KEEP_ZEROS = frozenset({aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default})
_SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default})
_FILLED = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.zeros.default: 0,
    aten.ones.default: 1,
}
_RULES: dict[Any, Rule] = {
    aten._to_copy.default: _pointwise,
    aten.alias.default: _pointwise,
    aten.detach.default: _pointwise,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _transpose,
    aten.unsqueeze.default: _dimension_change,
    aten.squeeze.dim: _dimension_change,
    aten.expand.default: _dimension_change,
    aten._log_softmax.default: _reduction,
    aten._softmax.default: _reduction,
    aten.logsumexp.default: _reduction,
    aten.amax.default: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.sum.default: _reduction,
    aten.mean.dim: _reduction,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.nll_loss_forward.default: _nll_forward,
    aten.nll_loss_backward.default: _nll_backward,
    aten.gather.default: _indexed,
    aten.scatter_add.default: _indexed,
    aten.scatter.value: _indexed,
    aten.scatter.src: _indexed,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.mm.default: _matmul,
    **dict.fromkeys(_FILLED, _filled),
    aten.full_like.default: _filled,
    aten.new_full.default: _filled,
    aten.full.default: _filled,
}
