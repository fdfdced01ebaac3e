"""Tiles of kernels over images with channels innermost, in Triton's interpreter, against what their nests mean."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from nest_check import check, planned_with, tensors
from nests import load, op, store

from weft.inductor.codegen.kernel_plan import plan_kernel
from weft.inductor.graph.gpu import HOPPER_MULTIPROCESSORS
from weft.inductor.loop_ir.ir import Const, Nest, Reduce, ReductionResult

f32 = torch.float32


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with planned_with(LOOP_TILE=256, TILE_OF_COLUMNS=128):
        yield


def centred(parts: int, rows: int, width: int) -> Nest:
    """Mean and squared deviations of columns, as a batch norm has them: parts of rows, and columns."""
    x = load("x", rows * width, width, 1)
    mean = op("mul", Reduce("sum", (x,), [1], f32), Const(1 / rows, f32))
    apart = op("sub", x, mean)
    squares = Reduce("sum", (op("mul", apart, apart),), [1], f32)
    return Nest((parts, rows, width), (store("mean", mean, width, 0, 1), store("squares", squares, width, 0, 1)))


@pytest.mark.parametrize("rows", [1, 3, 64, 150, 333])
@pytest.mark.parametrize("width", [16, 17, 72])
def test_deviations_of_columns_with_whole_tiles_and_a_tail(rows: int, width: int) -> None:
    parts = 3
    buffers = tensors(x=parts * rows * width, mean=parts * width, squares=parts * width)
    buffers["x"] += 100  # a sum of squares would cancel
    check(centred(parts, rows, width), buffers, tolerance=2e-4)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_deviations_of_columns_that_are_not_finite(value: float) -> None:
    rows, width = 150, 17
    buffers = tensors(x=rows * width, mean=width, squares=width)
    buffers["x"][-3] = value
    check(centred(1, rows, width), buffers, tolerance=2e-4)


@pytest.mark.parametrize("given", [False, True])
def test_welford_of_columns(given: bool) -> None:
    """The nest may be given in one pass; the count is one number a row of the tile."""
    rows, width = 150 if given else 96, 40
    reduce = Reduce("welford", (load("x", width, 1),), [0], f32)
    nest = Nest((rows, width), tuple(store(f"y{at}", ReductionResult(reduce, at, f32), 0, 1) for at in range(3)))
    made = check(nest, tensors(x=rows * width, y0=width, y1=width, y2=width), tolerance=2e-4)
    assert "acc0_count = tl.full([RBLOCK, 1]" in made.source.text


@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("width", [17, 64])
def test_sums_of_what_is_computed_from_several_tensors(rows: int, width: int) -> None:
    x, y, mean = load("x", width, 1), load("y", width, 1), load("mean", 0, 1)
    one, two = (Reduce("sum", (value,), [0], f32) for value in (y, op("mul", y, op("sub", x, mean))))
    nest = Nest((rows, width), (store("a", one, 0, 1), store("b", two, 0, 1)))
    check(nest, tensors(x=rows * width, y=rows * width, mean=width, a=width, b=width), tolerance=2e-4)


@pytest.mark.parametrize(("rows", "width", "tiled"), [(700, 72, True), (700, 184, True), (3, 72, False)])
def test_vectors_of_columns_are_loaded_once_for_several_rows(rows: int, width: int, tiled: bool) -> None:
    x, vectors = load("x", width, 1), [load(name, 0, 1) for name in ("mean", "scale", "weight", "bias")]
    value = op("add", op("mul", op("mul", op("sub", x, vectors[0]), vectors[1]), vectors[2]), vectors[3])
    nest = Nest((rows, width), (store("y", value, width, 1),))
    named = dict.fromkeys(("mean", "scale", "weight", "bias"), width)
    made = check(nest, tensors(x=rows * width, y=rows * width, **named))
    assert ("YBLOCK" in made.source.text) is tiled


@pytest.mark.parametrize(("parts", "streamed"), [(1, False), (128, True)])
def test_rows_are_streamed_where_their_parts_fill_the_gpu(parts: int, streamed: bool) -> None:
    """3,136 rows of 1024 were summed by one program."""
    rows, width = 3136, 1024
    product = op("mul", load("x", rows * width, width, 1), load("y", rows * width, width, 1))
    total = Reduce("sum", (product,), [1], f32)
    stores = store("z", product, rows * width, width, 1), store("sums", total, width, 0, 1)
    plan = plan_kernel(Nest((parts, rows, width), stores), dict.fromkeys(("x", "y", "z", "sums"), torch.bfloat16))
    programs = math.prod(-(-int(dim.size) // dim.block) for dim in plan.grid)
    assert programs >= HOPPER_MULTIPROCESSORS / 4
    assert any(dim.block == width for dim in plan.dims) is streamed


@pytest.mark.parametrize(("parts", "rows", "stages"), [(256, 8, 3), (4096, 2, 2)])
def test_few_programs_have_more_rows_in_flight(parts: int, rows: int, stages: int) -> None:
    length, width = 64, 512
    product = op("mul", load("x", length * width, width, 1), load("y", length * width, width, 1))
    total = Reduce("sum", (product,), [1], f32)
    stores = store("z", product, length * width, width, 1), store("sums", total, width, 0, 1)
    nest = Nest((parts, length, width), stores)
    plan = plan_kernel(nest, dict.fromkeys(("x", "y", "z", "sums"), torch.bfloat16))
    assert plan.loop is not None
    assert (plan.loop.block, plan.stages) == (rows, stages)
