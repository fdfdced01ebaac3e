"""Tiles that wrap around the ends of rows, in Triton's interpreter, against what their nests mean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from nest_check import check, planned_with, tensors
from nests import load, op, store

from weft.inductor.codegen.kernel import GeneratedKernel
from weft.inductor.loop_ir.ir import Const, Nest, Position, Value

f32 = torch.float32
VECTORS = ("mean", "scale", "weight", "bias")


@pytest.fixture(autouse=True)
def few_elements_fill_the_gpu() -> Iterator[None]:
    with planned_with(TILE_OF_COLUMNS=128):
        yield


def normalised(x: Value, *outside: int) -> Value:
    """What a batch norm computes of an element. ``outside``: strides of its vectors along outer axes."""
    mean, scale, weight, bias = (load(name, *outside, 0, 1) for name in VECTORS)
    return op("add", op("mul", op("mul", op("sub", x, mean), scale), weight), bias)


def run(nest: Nest, width: int, **sizes: int) -> GeneratedKernel:
    return check(nest, tensors(**sizes, **dict.fromkeys(VECTORS, width)))


def wrapped(made: GeneratedKernel) -> bool:
    """Whether tiles are 256 consecutive elements of 8 pieces."""
    return [block for _, block in made.blocks] == [256, 8]


@pytest.mark.parametrize(
    ("rows", "width"), [(256, 144), (320, 240), (480, 72), (400, 96), (480, 80), (320, 336), (720, 48)]
)
def test_rows_that_tiles_do_not_divide_are_read_several_at_a_time(rows: int, width: int) -> None:
    nest = Nest((rows, width), (store("y", op("add", normalised(load("x", width, 1)), load("z", width, 1)), width, 1),))
    size = rows * width
    assert wrapped(run(nest, width, x=size, y=size, z=size))


def test_an_image_may_have_a_vector_of_its_own() -> None:
    images, pixels, width = 8, 32, 144
    of_image = load("gate", width, 0, 1)
    value = op("mul", normalised(load("x", pixels * width, width, 1), 0), of_image)
    nest = Nest((images, pixels, width), (store("y", value, pixels * width, width, 1),))
    size = images * pixels * width
    assert wrapped(run(nest, width, x=size, y=size, gate=images * width))


def test_elements_know_their_rows_and_columns() -> None:
    """Positions along an axis that is split, and a number for each row."""
    rows, width = 256, 144
    place = op("add", op("mul", op("to", Position(0)), Const(1000.0, f32)), op("to", Position(1)))
    value = op("mul", op("add", normalised(load("x", width, 1)), place), load("of_row", 1, 0))
    nest = Nest((rows, width), (store("y", value, width, 1),))
    assert wrapped(run(nest, width, x=rows * width, y=rows * width, of_row=rows))


def test_a_tensor_is_updated_in_place() -> None:
    rows, width = 256, 144
    nest = Nest((rows, width), (store("x", normalised(load("x", width, 1)), width, 1),))
    assert wrapped(run(nest, width, x=rows * width))


@pytest.mark.parametrize(
    ("rows", "width", "stride"),
    [
        (255, 144, 144),  # 16 rows are 9 tiles
        (16, 2192, 2192),  # no rows are left
        (256, 144, 160),  # rows with gaps
        (288, 128, 128),  # whole rows are tiles
        (544, 64, 64),
        (192, 192, 192),  # parts of 64 columns
        (2304, 16, 16),
        (2304, 17, 17),
    ],
)
def test_other_rows_are_left_alone(rows: int, width: int, stride: int) -> None:
    nest = Nest((rows, width), (store("y", normalised(load("x", stride, 1)), width, 1),))
    made = run(nest, width, x=rows * stride, y=rows * width)
    assert len(made.blocks) == 2
    assert not wrapped(made)


def test_transposed_rows_are_left_alone() -> None:
    rows, width = 256, 144
    nest = Nest((rows, width), (store("y", normalised(load("x", 1, rows)), width, 1),))
    assert not wrapped(run(nest, width, x=rows * width, y=rows * width))


def test_few_vectors_are_read_with_the_elements() -> None:
    rows, width = 256, 144
    value = op("mul", load("x", width, 1), load("scale", 0, 1))
    nest = Nest((rows, width), (store("y", value, width, 1),))
    assert len(run(nest, width, x=rows * width, y=rows * width).blocks) == 1
