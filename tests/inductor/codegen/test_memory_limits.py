"""Tiles that follow from how rows lie in memory: in Triton's interpreter, against what their nests mean."""

from __future__ import annotations

import pytest
import torch
from nest_check import check, tensors
from nests import load, op, store

from weft.inductor.codegen.kernel import generate
from weft.inductor.codegen.kernel_plan import KernelPlan, plan_kernel
from weft.inductor.loop_ir.ir import Const, Nest, Reduce

f32, bf16 = torch.float32, torch.bfloat16


def block(plan: KernelPlan, name: str) -> int:
    """The elements of a dimension in a tile."""
    return next(dim.block for dim in plan.dims if dim.name == name)


@pytest.mark.parametrize(("table", "taken"), [("across rows", 8), ("along rows", 1)])
def test_rows_that_read_a_small_transposed_table_share_a_program(table: str, taken: int) -> None:
    """The table is a thousandth of the scores, but each point of them loads a sector of it."""
    heads, rows, width = 20, 64, 512
    bias = load("bias", 0, 1, rows) if table == "across rows" else load("bias", 0, width, 1)
    scores = op("add", load("scores", rows * width, width, 1), bias)
    largest = Reduce("max", (scores,), [2], f32)
    nest = Nest((heads, rows, width), (store("y", op("sub", scores, largest), rows * width, width, 1),))
    sizes = {"scores": heads * rows * width, "bias": rows * width, "y": heads * rows * width}
    # One row a program is what other tests compare.
    made = check(nest, tensors(**sizes)) if taken > 1 else generate(nest, dict.fromkeys(sizes, f32))
    assert made.source.name.startswith("row")
    assert made.blocks[0][1] == taken


@pytest.mark.parametrize(("apart", "rows", "taken"), [(1 << 18, 9, 4), (1 << 17, 40, 8), (1 << 6, 64, 64)])
def test_few_rows_that_lie_far_apart_are_in_flight_together(apart: int, rows: int, taken: int) -> None:
    """The sum over a batch: rows of float32 that lie 1 MB, 512 KB and 256 bytes apart."""
    width = 40
    nest = Nest((rows, width), (store("y", Reduce("sum", (load("x", apart, 1),), [0], f32), 0, 1),))
    plan = plan_kernel(nest, {"x": f32, "y": f32})
    assert plan.shape == "column"
    assert block(plan, "r") == taken
    check(nest, tensors(x=(rows - 1) * apart + width, y=width), tolerance=2e-4)


@pytest.mark.parametrize(("rows", "columns", "taken"), [(2, 1 << 22, 512), (2, 3000, 16), (32, 1 << 22, 64)])
def test_tiles_of_few_whole_rows_are_wide(rows: int, columns: int, taken: int) -> None:
    nest = Nest((rows, columns), (store("y", Reduce("sum", (load("x", columns, 1),), [0], f32), 0, 1),))
    assert block(plan_kernel(nest, {"x": bf16, "y": bf16}), "x") == taken
    if columns < 1 << 20:
        check(nest, tensors(x=rows * columns, y=columns))


@pytest.mark.parametrize(("width", "stages"), [(49, 1), (56, 3), (64, 3)])
def test_only_rows_of_whole_vectors_are_in_flight_in_shared_memory(width: int, stages: int) -> None:
    """The backward of softmax with sums of columns: rows of 98, 112 and 128 bytes."""
    parts, rows = 3, 100
    strides = rows * width, width, 1
    both = op("mul", load("p", *strides), load("g", *strides))
    total = Reduce("sum", (both,), [2], f32)
    grad = op("sub", both, op("mul", load("p", *strides), total))
    columns = Reduce("sum", (grad,), [1], f32)
    nest = Nest((parts, rows, width), (store("dx", grad, *strides), store("db", columns, width, 0, 1)))
    plan = plan_kernel(nest, {"p": bf16, "g": bf16, "dx": bf16, "db": f32})
    assert plan.shape == "mixed"
    assert plan.stages == stages
    whole = parts * rows * width
    check(nest, tensors(p=whole, g=whole, dx=whole, db=parts * width), tolerance=2e-4)


@pytest.mark.parametrize("width", [30, 96, 128, 192, 384, 768, 1000])
def test_backwards_of_norms_over_rows_of_any_length(width: int) -> None:
    parts, rows = 2, 21
    strides = rows * width, width, 1
    x, dy, weight = load("x", *strides), load("dy", *strides), load("w", 0, 0, 1)
    scaled = op("mul", dy, weight)
    mean = op("mul", Reduce("sum", (op("mul", scaled, x),), [2], f32), Const(1 / width, f32))
    dx, dw = op("sub", scaled, op("mul", x, mean)), Reduce("sum", (op("mul", dy, x),), [1], f32)
    nest = Nest((parts, rows, width), (store("dx", dx, *strides), store("dw", dw, width, 0, 1)))
    whole = parts * rows * width
    made = check(nest, tensors(x=whole, dy=whole, w=width, dx=whole, dw=parts * width), tolerance=2e-4)
    assert made.source.name.startswith("mixed")
