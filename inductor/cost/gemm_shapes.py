"""GEMMs: which ones a library call computes, and a model of their time.

A GEMM is computed in tiles, one at a time per multiprocessor. So it takes whole *waves* of tiles, and each tile has a
fixed cost for its prologue and epilogue (NVIDIA, "Matrix Multiplication Background User's Guide", on tile and wave
quantization). If there are few tiles, several programs share the contracted dimension of each (split-K). The loss of a
shape against a large GEMM is modelled, not measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.graph.operations import arguments

Node = torch.fx.Node
ShapeOf = Callable[[torch.Tensor], tuple[int, ...]]

aten = torch.ops.aten

# Rows and columns of a tile, and its rate as a fraction of the fastest tile's. Estimates.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.7))
# Prologue and epilogue of a tile take as long as this many elements of the contracted dimension. An estimate.
_ENDS = 128
# Numbers of programs that can share the contracted dimension of a tile (split-K).
_SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Gemm:
    """``count`` GEMMs of an [m, k] and a [k, n] matrix."""

    count: int
    m: int
    n: int
    k: int

    @property
    def operations(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.count * self.m * self.n * self.k


# The GEMM that rates of GPUs refer to.
LARGE = Gemm(1, 8192, 8192, 8192)


@functools.cache
def seconds(gemm: Gemm, rate: float, multiprocessors: int, added: float) -> float:
    """Seconds of a GEMM with the best tile shape and split.

    Args:
        rate: operations per second of :data:`LARGE`.
        added: seconds per element of the result to write a partial sum and read it again.
    """
    if not gemm.operations:
        return 0.0
    # The measured rate is that of `LARGE` with its own waves and ends; this is the rate of its tiles alone.
    fastest = rate * _least_work(LARGE, multiprocessors) / LARGE.operations
    elements = gemm.count * gemm.m * gemm.n
    return min(
        _work(gemm, *tile, split, multiprocessors) / fastest + (split * elements * added if split > 1 else 0.0)
        for tile in _TILES
        for split in _SPLITS
    )


def filled(programs: int, multiprocessors: int) -> float:
    """The average fraction of busy multiprocessors over all waves of ``programs`` equally long programs."""
    return programs / (-(-programs // multiprocessors) * multiprocessors)


@functools.cache
def _least_work(gemm: Gemm, multiprocessors: int) -> float:
    return min(_work(gemm, *tile, 1, multiprocessors) for tile in _TILES)


def _work(gemm: Gemm, rows: int, columns: int, part: float, split: int, multiprocessors: int) -> float:
    """Time of a GEMM in units of operations: those that all multiprocessors do in it with the fastest tile."""
    tiles = gemm.count * -(-gemm.m // rows) * -(-gemm.n // columns) * split
    each = 2 * rows * columns * (math.ceil(gemm.k / split) + _ENDS) / part
    return tiles / filled(tiles, multiprocessors) * each


# ---- library calls


def is_gemm(node: Node) -> bool:
    """Whether a node is a library call that computes GEMMs: a product of matrices, a convolution or its backward."""
    return getattr(node.target, "overloadpacket", None) in _READERS


def gemms_of(node: Node, shape_of: ShapeOf) -> list[Gemm] | None:
    """The GEMMs that a node computes; None if it is no such library call.

    Args:
        shape_of: returns the shape of a fake tensor as ints.
    """
    read = _READERS.get(getattr(node.target, "overloadpacket", None))
    return None if read is None else list(read(arguments_of(node), shape_of))


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of an ATen call by name, including defaults, with fake tensors in place of nodes."""
    return torch.fx.node.map_arg(arguments(node), lambda used: used.meta["val"])  # type: ignore[return-value]


def _matmul(one: str, other: str, arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Gemm]:
    (*batch, m, k), n = shape_of(arguments[one]), shape_of(arguments[other])[-1]
    yield Gemm(math.prod(batch), m, n, k)


def _convolution(arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Gemm]:
    """An implicit GEMM of windows and filters. A transposed convolution scatters windows."""
    input_shape, (first, second, *window) = shape_of(arguments["input"]), shape_of(arguments["weight"])
    groups, size = arguments["groups"], math.prod(window)
    if arguments["transposed"]:
        yield Gemm(groups, input_shape[0] * math.prod(input_shape[2:]), second * size, first // groups)
        return
    numbers = ("stride", "padding", "dilation")
    stride, padding, dilation = (_each(arguments[name], len(window)) for name in numbers)
    places = input_shape[0]
    for at, length in enumerate(input_shape[2:]):
        places *= (length + 2 * padding[at] - dilation[at] * (window[at] - 1) - 1) // stride[at] + 1
    yield Gemm(groups, places, first // groups, second * size)


def _convolution_backward(arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Gemm]:
    """One GEMM each for the gradients of input and weight, with as many operations as forward."""
    gradient, input_shape = shape_of(arguments["grad_output"]), shape_of(arguments["input"])
    first, second, *window = shape_of(arguments["weight"])
    groups, size = arguments["groups"], math.prod(window)
    read = input_shape if arguments["transposed"] else gradient
    places = read[0] * math.prod(read[2:])
    of_input, of_weight, _ = arguments["output_mask"]
    if of_input:
        yield Gemm(groups, places, second * size, first // groups)
    if of_weight:
        yield Gemm(groups, first // groups, second * size, places)


def _each(numbers: Any, dimensions: int) -> list[int]:
    """One number per dimension; a single number counts for all dimensions."""
    return [*numbers] * (dimensions if len(numbers) == 1 else 1)


_READERS: dict[Any, Callable[[dict[str, Any], ShapeOf], Iterator[Gemm]]] = {
    aten.mm: functools.partial(_matmul, "self", "mat2"),
    aten.addmm: functools.partial(_matmul, "mat1", "mat2"),
    aten.bmm: functools.partial(_matmul, "self", "mat2"),
    aten.baddbmm: functools.partial(_matmul, "batch1", "batch2"),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}
