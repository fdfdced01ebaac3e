"""Matrix products: which ones a call of a library computes, and how long they take in the tiles of a GPU.

A product is computed in tiles, one on a multiprocessor at a time, so it takes whole *waves* of tiles, and a tile spends
time on its beginning and its end however short it is (NVIDIA, "Matrix Multiplication Background User's Guide", on tile
and wave quantization). Where tiles are few, several programs share the summed dimension of each. What a shape loses
against a large product in this way is modelled, not measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Node = torch.fx.Node
ShapeOf = Callable[[torch.Tensor], tuple[int, ...]]

aten = torch.ops.aten

# Rows and columns of a tile, and the part of the fastest tile's rate that it reaches: estimates.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.7))
# A tile's beginning and end take as long as this much of the summed dimension: an estimate.
_ENDS = 128
# How many programs may share the summed dimension of a tile.
_SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Product:
    """``count`` products of an [m, k] and a [k, n] matrix."""

    count: int
    m: int
    n: int
    k: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.count * self.m * self.n * self.k


# What a rate in operations a second is the rate of.
LARGE = Product(1, 8192, 8192, 8192)


@functools.cache
def seconds(product: Product, rate: float, multiprocessors: int, added: float) -> float:
    """How long a product takes in the tiles that suit it best.

    Args:
        rate: operations a second of :data:`LARGE`.
        added: seconds for each element of the result to write a partial sum and read it again.
    """
    if not product.operations:
        return 0.0
    fastest = rate * _least_work(LARGE, multiprocessors) / LARGE.operations
    elements = product.count * product.m * product.n
    return min(
        _work(product, *tile, split, multiprocessors) / fastest + (split * elements * added if split > 1 else 0.0)
        for tile in _TILES
        for split in _SPLITS
    )


def filled(programs: int, multiprocessors: int) -> float:
    """The part of the multiprocessors that work, over all waves of so many programs of one length."""
    return programs / (-(-programs // multiprocessors) * multiprocessors)


@functools.cache
def _least_work(product: Product, multiprocessors: int) -> float:
    return min(_work(product, *tile, 1, multiprocessors) for tile in _TILES)


def _work(product: Product, rows: int, columns: int, part: float, split: int, multiprocessors: int) -> float:
    """Operations that all multiprocessors could do at the rate of the fastest tile while they do this."""
    tiles = product.count * -(-product.m // rows) * -(-product.n // columns) * split
    each = 2 * rows * columns * (math.ceil(product.k / split) + _ENDS) / part
    return tiles / filled(tiles, multiprocessors) * each


# ---- calls of libraries


def is_product(node: Node) -> bool:
    """Whether a node is a matrix product or a convolution, or the backward of one, computed by a library."""
    return getattr(node.target, "overloadpacket", None) in _READERS


def products_of(node: Node, shape_of: ShapeOf) -> list[Product] | None:
    """The products that a call computes; None where it calls no library for them.

    Args:
        shape_of: the shape of a fake tensor in numbers.
    """
    read = _READERS.get(getattr(node.target, "overloadpacket", None))
    return None if read is None else list(read(arguments_of(node), shape_of))


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of an operation of torch's by name, with fakes in the place of nodes; defaults among them."""
    described = node.target._schema.arguments  # type: ignore[union-attr]
    found = {argument.name: argument.default_value for argument in described if argument.has_default_value()}
    found |= {argument.name: value for argument, value in zip(described, node.args, strict=False)} | node.kwargs
    return torch.fx.node.map_arg(found, lambda used: used.meta["val"])  # type: ignore[return-value]


def _matmul(one: str, other: str, arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Product]:
    (*batch, m, k), n = shape_of(arguments[one]), shape_of(arguments[other])[-1]
    yield Product(math.prod(batch), m, n, k)


def _convolution(arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Product]:
    """As the implicit product of windows and filters; a transposed one scatters windows."""
    given, (first, second, *window) = shape_of(arguments["input"]), shape_of(arguments["weight"])
    groups, size = arguments["groups"], math.prod(window)
    if arguments["transposed"]:
        yield Product(groups, given[0] * math.prod(given[2:]), second * size, first // groups)
        return
    numbers = ("stride", "padding", "dilation")
    stride, padding, dilation = (_each(arguments[name], len(window)) for name in numbers)
    places = given[0]
    for at, length in enumerate(given[2:]):
        places *= (length + 2 * padding[at] - dilation[at] * (window[at] - 1) - 1) // stride[at] + 1
    yield Product(groups, places, first // groups, second * size)


def _convolution_backward(arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Product]:
    """For the gradients of input and weight each as many operations as forward."""
    gradient, given = shape_of(arguments["grad_output"]), shape_of(arguments["input"])
    first, second, *window = shape_of(arguments["weight"])
    groups, size = arguments["groups"], math.prod(window)
    read = given if arguments["transposed"] else gradient
    places = read[0] * math.prod(read[2:])
    of_input, of_weight, _ = arguments["output_mask"]
    if of_input:
        yield Product(groups, places, second * size, first // groups)
    if of_weight:
        yield Product(groups, first // groups, second * size, places)


def _each(numbers: Any, dimensions: int) -> list[int]:
    """One number a dimension; one alone is meant for all."""
    return [*numbers] * (dimensions if len(numbers) == 1 else 1)


_READERS: dict[Any, Callable[[dict[str, Any], ShapeOf], Iterator[Product]]] = {
    aten.mm: functools.partial(_matmul, "self", "mat2"),
    aten.addmm: functools.partial(_matmul, "mat1", "mat2"),
    aten.bmm: functools.partial(_matmul, "self", "mat2"),
    aten.baddbmm: functools.partial(_matmul, "batch1", "batch2"),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}
