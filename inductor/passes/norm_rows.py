"""Rules by which layer norms are computed for a part of the rows, as :mod:`weft.inductor.passes.row_rules` has them for
other operations. RMS norms are decomposed before; a layer norm is one node with several results.

The gradients of weight and bias are sums over rows. A part's sum is rounded to the dtype of the weight, as the sum over
all rows is, before parts are added in float32 or wider.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from weft.inductor.graph.operations import arguments
from weft.inductor.passes.row_rules import Chunk, Form, RowPlan, RowRegion, Space

Node = torch.fx.Node

aten = torch.ops.aten

# The operands with rows; all results of the first operation have rows, of the second the first one.
NORMS = {
    aten.native_layer_norm.default: ("input",),
    aten.native_layer_norm_backward.default: ("grad_out", "input", "mean", "rstd"),
}


def plan_layer_norm(region: RowRegion, node: Node) -> RowPlan | None:
    """The plan of a layer norm, forward or backward, or of one of its results; None for other nodes, and where no rule
    applies."""
    if node.target is operator.getitem:
        return _result(region, node)
    names = NORMS.get(node.target)  # type: ignore[arg-type]
    if names is None:
        return None
    given = arguments(node)
    plans = [region.rows(given[name]) for name in names]
    first = plans[0]
    inner = given["input"].meta["val"].dim() - len(given["normalized_shape"])
    if first is None or any(plan is None or plan.prefix != first.prefix for plan in plans) or inner < first.prefix:
        return None
    # The dimensions between rows and normalized ones keep their places behind the one dimension of rows.
    get = lambda chunk, name: chunk.get(given[name]) if name in names else given[name]
    emit = lambda chunk: chunk.call(node.target, *[get(chunk, name) for name in given])
    return RowPlan(Form.ROWS, Space.TAKEN, first.prefix, emit)


def _result(region: RowRegion, node: Node) -> RowPlan | None:
    norm: Any = node.args[0]
    plan = region.rows(norm)
    if plan is None or norm.target not in NORMS:
        return None
    pick = lambda chunk: chunk.call(operator.getitem, chunk.get(norm), node.args[1])
    if norm.target is aten.native_layer_norm.default or node.args[1] == 0:
        return RowPlan(Form.ROWS, Space.TAKEN, plan.prefix, pick)
    dtype = node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)

    def add(chunk: Chunk, before: Node | None) -> Node:
        part = pick(chunk)
        part = part if wide == dtype else chunk.call(aten._to_copy.default, part, dtype=wide)
        return part if before is None else chunk.call(aten.add.Tensor, before, part)

    return RowPlan(Form.SUM, Space.TAKEN, 0, add=add)
