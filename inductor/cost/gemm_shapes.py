"""GEMMs: which ones a library call computes, and a model of their time.

A GEMM is computed in tiles, one at a time per multiprocessor. So it takes whole *waves* of tiles, and every wave ends
with the time in which its tiles are written (NVIDIA, "Matrix Multiplication Background User's Guide", on tile and wave
quantization). If there are few tiles, several programs share the contracted dimension of each (split-K), and a second
kernel sums what they found.

Nothing is fitted but the rate of unaligned rows. 374 GEMMs of bfloat16 on an H200, of 64 to 131,072 rows and columns,
each repeated with operands that no cache holds, take 7% longer on average, with a standard deviation of 11%. In the
steps of 15 transformers, where caches hold activations, the sum of GEMMs is 0.94 to 1.03 of the model's (26 November
2026, torch 2.11).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weft import torch_adapter
from weft.inductor.graph.operations import arguments

Node = torch.fx.Node
ShapeOf = Callable[[torch.Tensor], tuple[int, ...]]

aten = torch.ops.aten

# Rows and columns of tiles: the shapes that cuBLAS was seen to choose on an H200. All reach the same rate once they
# are large enough to hide their loads, so a smaller one loses by the number of its waves alone.
_TILES = ((128, 256), (256, 128), (192, 192), (128, 192), (192, 128), (128, 160), (160, 128), (128, 128))
_TILES += ((96, 128), (128, 96), (64, 128), (128, 64))
# Numbers of programs that can share the contracted dimension of a tile (split-K).
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
# A GEMM of 16 bits that keeps all tensor cores busy is bound by the power of the GPU, which lowers the clock. One that
# loses time in waves and ends runs at a higher clock. 8192^3 reaches 7.9e14 operations per second on an H200 that was
# idle, and GEMMs 7.2e14 in a Llama 8B step of 8,192 tokens.
_CLOCK = 1.1
# Elements of 2 bytes that a vector load of tensor cores' operands reads. Matrices whose rows start at other multiples
# are read by smaller loads, in older kernels. By the elements that a load reads, the part of the usual rate that they
# reach: measured on an H200 (torch 2.11) at 137, 231 to 246 and 151 of 720 TFLOP/s.
_VECTOR = 8
_UNALIGNED = {1: 0.19, 2: 0.32, 4: 0.21}
# The side of the tiles of these kernels, and the seconds that each takes of a multiprocessor beside its operations:
# 12,288 GEMMs of [49, 49] and [49, 32] take 117 us, of [49, 32] and [32, 49] 88.
_UNALIGNED_TILE, _UNALIGNED_SECONDS = 64, 0.75e-6


@dataclass(frozen=True)
class Gemm:
    """``count`` GEMMs of an [m, k] and a [k, n] matrix, whose rows start at multiples of ``aligned`` elements."""

    count: int
    m: int
    n: int
    k: int
    aligned: int = _VECTOR

    @property
    def operations(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.count * self.m * self.n * self.k


@dataclass(frozen=True)
class GemmRates:
    """What the time of a GEMM depends on beside its shape.

    Attributes:
        operations: per second, of :data:`LARGE`.
        bandwidth: bytes per second, of a large copy.
        itemsize: bytes of an element of the result.
        launch: seconds of a further kernel.
        multiprocessors: number of multiprocessors.
    """

    operations: float
    bandwidth: float
    itemsize: int
    launch: float
    multiprocessors: int


# The GEMM that rates of GPUs refer to.
LARGE = Gemm(1, 8192, 8192, 8192)


@functools.cache
def seconds(gemm: Gemm, rates: GemmRates) -> float:
    """Seconds of a GEMM with the best tile shape and split, without its launch."""
    if not gemm.operations:
        return 0.0
    # The measured rate is that of `LARGE` with its own waves and ends; this is the rate of its tiles alone.
    written = min(_ends(LARGE, *tile, 1, rates) for tile in _TILES)
    fastest = min(_work(LARGE, *tile, 1, rates) for tile in _TILES) / (LARGE.operations / rates.operations - written)
    of_16_bits = rates.itemsize < torch.float32.itemsize
    fastest *= _CLOCK if of_16_bits else 1.0
    found = min(_split(gemm, *tile, split, rates, fastest) for tile in _TILES for split in _SPLITS)
    found = max(found, gemm.operations / rates.operations)
    if gemm.aligned < _VECTOR and of_16_bits:
        found = max(found, _unaligned(gemm, rates))
    return found


def _unaligned(gemm: Gemm, rates: GemmRates) -> float:
    """Seconds of a GEMM of 16 bits whose rows are read by smaller loads than vectors."""
    side = _UNALIGNED_TILE
    tiles = gemm.count * -(-gemm.m // side) * -(-gemm.n // side)
    operations = 2 * tiles * side * side * gemm.k
    return (
        operations / (_UNALIGNED[gemm.aligned] * rates.operations) + tiles * _UNALIGNED_SECONDS / rates.multiprocessors
    )


def filled(programs: int, multiprocessors: int) -> float:
    """The average fraction of busy multiprocessors over all waves of ``programs`` equally long programs."""
    return programs / (-(-programs // multiprocessors) * multiprocessors)


def _split(gemm: Gemm, rows: int, columns: int, split: int, rates: GemmRates, fastest: float) -> float:
    """Seconds with one shape of tiles and one split."""
    found = _work(gemm, rows, columns, split, rates) / fastest + _ends(gemm, rows, columns, split, rates)
    if split > 1:
        # A second kernel: every program has written a float32 partial sum of each element, which is read again.
        partial_sums = split * gemm.count * gemm.m * gemm.n * torch.float32.itemsize
        found += rates.launch + 2 * partial_sums / rates.bandwidth
    return found


def _waves(gemm: Gemm, rows: int, columns: int, split: int, rates: GemmRates) -> int:
    tiles = gemm.count * -(-gemm.m // rows) * -(-gemm.n // columns) * split
    return -(-tiles // rates.multiprocessors)


def _work(gemm: Gemm, rows: int, columns: int, split: int, rates: GemmRates) -> int:
    """Operations that all multiprocessors could do in the time of a GEMM's waves."""
    each = 2 * rows * columns * math.ceil(gemm.k / split)
    return _waves(gemm, rows, columns, split, rates) * rates.multiprocessors * each


def _ends(gemm: Gemm, rows: int, columns: int, split: int, rates: GemmRates) -> float:
    """Seconds in which the tiles of all waves are written. The multiprocessors write together, and compute nothing."""
    each = rows * columns * rates.itemsize
    return _waves(gemm, rows, columns, split, rates) * rates.multiprocessors * each / rates.bandwidth


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
    aligned = math.gcd(_VECTOR, *(_leading(arguments[name]) for name in (one, other)), n)
    yield Gemm(math.prod(batch), m, n, k, aligned)


def _leading(matrix: torch.Tensor) -> int:
    """Elements from one row of a matrix in memory to the next: the larger stride, as a library is told it."""
    strides = [torch_adapter.hint(stride) or 0 for stride in matrix.stride()[-2:]]
    return max(strides)


def _grouped(arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Gemm]:
    """A GEMM for each group of rows, of columns, or of the contracted dimension. The data decides the sizes of groups;
    here they are equal."""
    (*batch, m, k), (*other_batch, _, n) = shape_of(arguments["self"]), shape_of(arguments["mat2"])
    offsets = arguments["offs"]
    groups = math.prod(batch or other_batch) if offsets is None else shape_of(offsets)[0]
    parted = max(groups, 1)
    if not batch and not other_batch:
        k = -(-k // parted)
    elif not batch:
        m = -(-m // parted)
    elif not other_batch:
        n = -(-n // parted)
    yield Gemm(groups, m, n, k)


def _convolution(arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Gemm]:
    """An implicit GEMM of windows and filters, whose rows are the channels of a pixel. A transposed convolution
    scatters windows."""
    input_shape, (first, second, *window) = shape_of(arguments["input"]), shape_of(arguments["weight"])
    groups, size = arguments["groups"], math.prod(window)
    if arguments["transposed"]:
        places = input_shape[0] * math.prod(input_shape[2:])
        yield Gemm(groups, places, second * size, first // groups, math.gcd(_VECTOR, first, second))
        return
    numbers = ("stride", "padding", "dilation")
    stride, padding, dilation = (each_dimension(arguments[name], len(window)) for name in numbers)
    places = input_shape[0]
    for at, length in enumerate(input_shape[2:]):
        places *= (length + 2 * padding[at] - dilation[at] * (window[at] - 1) - 1) // stride[at] + 1
    yield Gemm(groups, places, first // groups, second * size, math.gcd(_VECTOR, first, second))


def _convolution_backward(arguments: dict[str, Any], shape_of: ShapeOf) -> Iterator[Gemm]:
    """One GEMM each for the gradients of input and weight, with as many operations as forward."""
    gradient, input_shape = shape_of(arguments["grad_output"]), shape_of(arguments["input"])
    first, second, *window = shape_of(arguments["weight"])
    groups, size = arguments["groups"], math.prod(window)
    read = input_shape if arguments["transposed"] else gradient
    places = read[0] * math.prod(read[2:])
    of_input, of_weight, _ = arguments["output_mask"]
    aligned = math.gcd(_VECTOR, first, second)
    if of_input:
        yield Gemm(groups, places, second * size, first // groups, aligned)
    if of_weight:
        yield Gemm(groups, first // groups, second * size, places, aligned)


def each_dimension(numbers: Any, dimensions: int) -> list[int]:
    """One number per dimension; a single number counts for all dimensions."""
    return [*numbers] * (dimensions if len(numbers) == 1 else 1)


_READERS: dict[Any, Callable[[dict[str, Any], ShapeOf], Iterator[Gemm]]] = {
    aten.mm: functools.partial(_matmul, "self", "mat2"),
    aten.addmm: functools.partial(_matmul, "mat1", "mat2"),
    aten.bmm: functools.partial(_matmul, "self", "mat2"),
    aten.baddbmm: functools.partial(_matmul, "batch1", "batch2"),
    aten._grouped_mm: _grouped,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}
