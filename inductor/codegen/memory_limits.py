"""What memory asks of a tile: sectors that rows share, pages that rows lie in, vectors that rows are copied by.

Goes in: a nest and its accesses (:mod:`weft.inductor.codegen.axis_order`). Comes out: how many rows a tile should have,
and whether its loads can be in flight in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.inductor.codegen.axis_order import Access, contiguous_axis
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Nest

_SECTOR = 32  # bytes of a DRAM and L2 sector, the smallest transfer
_FEWEST_ROWS = 8  # of a program, where rows share the sectors of a transposed tensor
# Bytes from the first row of a tile of columns to its last, which are loaded together. Rows that lie further apart take
# more pages than, presumably, the TLB of a multiprocessor holds.
_ROWS_APART = 4 << 20
_VECTOR = 16  # bytes


def rows_sharing_sectors(nest: Nest, accesses: list[Access], outer: Sequence[int], inner: Sequence[int]) -> int:
    """Rows that a program of a row reduction should take because a tensor's contiguous axis runs across rows; else 1.

    A program with one row uses one element of each 32-byte sector that it loads. Several rows use the whole sector, be
    it from memory or, for a small tensor that all rows read, from the L2 cache. Measured on an H200: layer norm of a
    transposed bfloat16 tensor, 12,544 rows of 768, 55.7 us with one row a program, 24.9 us with 16; softmax of 49,152
    rows of 512 with gathers by a transposed table of int64, 330 us with one row, 150 with 4, 125 with 8, 153 with 16.
    """
    if not outer:
        return 1
    along, across = inner[-1], outer[-1]
    if min(size_hint(nest.sizes[along]), size_hint(nest.sizes[across])) < _FEWEST_ROWS:
        return 1
    # Bytes a point: of each access its element, and of a strided one the rest of the sector, which moves for nothing.
    moved = [access for access in accesses if access.index.stride(along) != 0]
    strided = [
        access.itemsize
        for access in moved
        if access.index.stride(along) != 1 and contiguous_axis(nest, access.index) == across
    ]
    if not strided or sum(_SECTOR - itemsize for itemsize in strided) * 8 < sum(access.itemsize for access in moved):
        return 1
    return max(_FEWEST_ROWS, _SECTOR // min(strided))


def rows_in_flight(nest: Nest, accesses: list[Access], over: frozenset[int], inner: Sequence[int]) -> int:
    """How many rows a tile of columns may have. Rows far apart are in pages of their own.

    Measured on an H200, the sum of 64 rows that lie 983 KB apart (the gradient of a bias of attention): 153 us with all
    rows in a tile, 71 with 16, 38 with 8, 33 with 4.
    """
    loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(over)]
    # The last axis is the one of the smallest stride: consecutive rows of a tile are along it.
    strides = [size_hint(load.index.stride(inner[-1])) * load.itemsize for load in loads]
    far = int(max(map(abs, strides), default=0))
    return max(4, _ROWS_APART // max(1, far))


def copied_in_vectors(loads: Iterable[Access]) -> bool:
    """Whether rows start at multiples of 16 bytes, so that loads in flight arrive in shared memory by vectors.

    Measured on an H200, backward of softmax over rows of 49, with a sum by column: 131 us with three stages, 36 with
    one.
    """
    return not any(
        stride not in (0, 1) and (not isinstance(stride, int) or stride * load.itemsize % _VECTOR)
        for load in loads
        for _, stride in load.index.strides
    )
