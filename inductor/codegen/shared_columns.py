"""Pointwise kernels whose rows all read the same vectors of columns, as a batch norm with channels innermost does.

In a block of consecutive elements each thread would load all vectors again for each element: they come from the L1
cache, but take more instructions than the tensor itself. So a program has a tile of rows and columns, and loads its
part of the vectors once.

A tile is a power of two wide. Of rows of 144 elements it has 16, a warp reads 16 rows in pieces of 32 bytes, and the
kernel reaches 0.68 of a copy's rate. But consecutive rows are one piece of memory: 16 rows of 144 elements are nine
tiles of 256. So tiles *wrap* around the ends of rows: the axis of rows is split (:func:`split_rows`), and tiles go
along its inner part and the columns together. Measured on an H200 (two bfloat16 tensors read, one written, seven
vectors): 144 columns 124 to 92 us, 240 columns 56 to 46, 96 columns 248 to 226, 672 columns 116 to 107; a copy takes
85, 40, 216 and 98.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from weft.inductor.codegen.axis_order import Access, accesses_by_bytes, axis_order, point_count, transposed_axis
from weft.inductor.loop_ir.axes import split_axes, substitute_stores
from weft.inductor.loop_ir.ir import Nest

TILE_OF_COLUMNS = 4096
"""Elements of a tile of rows and columns that does not wrap."""
WRAPPED_TILE, WRAPPED_ROWS = 256, 8
"""Consecutive elements of a tile that wraps, and how many such pieces it has."""

_FEWEST_VECTORS = 3  # of columns, for which a tile of rows is worth its arithmetic
_WIDE = 64  # columns of a tile that is read at the rate of a copy


def shared_columns(nest: Nest, accesses: list[Access], order: Sequence[int], multiprocessors: int) -> int:
    """How many columns a tile has where all rows read several vectors of columns; else 0."""
    inner = order[-1]
    width = nest.sizes[inner]
    vectors = [access for access in accesses if access.loaded and access.index.axes == {inner}]
    if len(vectors) < _FEWEST_VECTORS or len(order) < 2 or not isinstance(width, int) or width < 16:
        return 0
    # Tiles of all rows must fill the GPU.
    if point_count(nest, order) < 2 * multiprocessors * TILE_OF_COLUMNS:
        return 0
    # Of the widths that leave fewest columns empty the widest.
    return min((128, 64, 32, 16), key=lambda columns: (-(-width // columns) * columns, -columns))


def split_rows(nest: Nest, dtypes: Mapping[str, torch.dtype], multiprocessors: int) -> Nest:
    """A nest whose tiles wrap, with the innermost axis of its rows split; the same nest where tiles do not wrap."""
    if nest.reduces or len(nest.sizes) < 2:
        return nest
    accesses = accesses_by_bytes(nest, dtypes)
    order = axis_order(nest, accesses, frozenset(range(len(nest.sizes))))
    if transposed_axis(nest, accesses, order[-1]) is not None:
        return nest
    columns = shared_columns(nest, accesses, order, multiprocessors)
    rows, inner = order[-2:]
    size, width = nest.sizes[rows], nest.sizes[inner]
    if not columns or not isinstance(size, int) or not _is_narrow(width, columns):
        return nest
    count = _wrapped_rows(width)
    # Rows with gaps, and rows that overlap, are no contiguous memory.
    follows = all(
        access.index.stride(rows) == width and access.index.stride(inner) == 1
        for access in accesses
        if access.index.axes >= {rows, inner}
    )
    if size % count or size == count or not follows:
        return nest
    split = len(nest.sizes)
    whole = ((axis, axis, length) for axis, length in enumerate(nest.sizes) if axis != rows)
    places = split_axes([*whole, (rows, split, count), (rows, rows, size // count)], nest.sizes)
    sizes = [size // count if axis == rows else length for axis, length in enumerate(nest.sizes)]
    return Nest((*sizes, count), tuple(substitute_stores(nest.stores, places)))


def wraps(nest: Nest, order: Sequence[int], columns: int) -> bool:
    """Whether tiles go along the last two axes of ``order`` together: whether :func:`split_rows` has made them."""
    width = nest.sizes[order[-1]]
    return len(order) > 2 and _is_narrow(width, columns) and nest.sizes[order[-2]] == _wrapped_rows(width)


def _is_narrow(width: int, columns: int) -> bool:
    """Whether tiles of so many columns are narrow parts of rows."""
    return columns < min(width, _WIDE)


def _wrapped_rows(width: int) -> int:
    """The fewest rows that are whole tiles together."""
    return WRAPPED_TILE // math.gcd(width, WRAPPED_TILE)
