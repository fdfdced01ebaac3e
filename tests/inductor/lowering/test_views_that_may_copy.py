"""Operations that return a view where strides allow and a copy elsewhere: kernels read what they hold, not what their
operand holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from step_builder import StepBuilder
from weft.inductor.compiler import make_kernels
from weft.inductor.runtime.aten import compile_aten

aten = torch.ops.aten
X = torch.arange(2.0 * 102).view(2, 102)

# Of a tensor [2, 102]: operations, each of the result of the one before.
VIEWS: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "columns as rows": [(aten.slice.Tensor, (1, 48, 96)), (aten.reshape.default, ([12, 8],))],
    "a row as a table": [(aten.slice.Tensor, (0, 1, 2)), (aten.reshape.default, ([17, 6],))],
    "transposed, as a row": [(aten.t.default, ()), (aten.reshape.default, ([-1],))],
    "transposed, flattened": [(aten.t.default, ()), (aten.flatten.using_ints, ())],
    "transposed, contiguous": [(aten.t.default, ()), (aten.contiguous.default, ())],
    "a copy, and a view of it": [
        (aten.slice.Tensor, (1, 6, 102)),
        (aten.reshape.default, ([16, 12],)),
        (aten.slice.Tensor, (0, 3, 9)),
        (aten.reshape.default, ([12, 6],)),
    ],
}


@pytest.mark.parametrize("name", VIEWS)
def test_kernels_read_what_eager_reads(name: str) -> None:
    b = StepBuilder()
    node, wanted = b.input(X), X
    for op, given in VIEWS[name]:
        node, wanted = b.call(op, node, *given), op(wanted, *given)
    b.returns(b.call(aten.mul.Tensor, node, 2.0))
    step = make_kernels(b.build())
    (result,) = compile_aten(step)(X)
    assert result.equal(wanted * 2.0)


def test_kernels_read_parameters_that_were_gathered_side_by_side() -> None:
    """Of one rank: the flat buffer has a row for each, so a parameter is a block of its columns."""
    b = StepBuilder()
    table = torch.arange(96.0).view(12, 8)
    ids = torch.tensor([[3, 11], [0, 7]])
    gathered = torch.cat([table.view(2, 48), torch.zeros(2, 6)], 1)
    flat = b.input(gathered)
    block = b.call(aten.reshape.default, b.call(aten.slice.Tensor, flat, 1, 0, 48), [12, 8])
    b.returns(b.call(aten.embedding.default, block, b.input(ids)))
    (rows,) = compile_aten(make_kernels(b.build()))(gathered, ids)
    assert rows.equal(table[ids])
