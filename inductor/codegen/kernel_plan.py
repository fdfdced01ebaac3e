"""The plan of a kernel: which axes of a nest are the grid, which are loops, block sizes and warps.

The axes of a nest are grouped into *dimensions* of the kernel. A dimension is tiled in one of three ways: across the
grid (a program takes one block), in a loop inside the program, or whole (one block covers it). This gives four shapes:

=========  ===========================  =====================================================================
shape      dimensions                   for
=========  ===========================  =====================================================================
pointwise  x by grid                    no reduction; two grid dimensions where memory is contiguous along
                                        one axis for some tensors and along another for others (transposes)
row        x by grid, r whole or loop   reductions along the axis that is contiguous in memory
column     r whole or loop, x by grid   reductions along other axes; x is contiguous
mixed      p by grid, n loop, c whole   row reductions and column reductions in one pass (the backward of norms)
=========  ===========================  =====================================================================

Dimensions with a block of 1 are scalars in the kernel. The others, in order, are the dimensions of its tiles. Block
sizes follow from the elements of a thread (16 bytes a load, 32 to 64 bytes a tensor) and from the number of
multiprocessors that need work. The constants below were fitted on an H200 (132 multiprocessors, 60 MiB of L2 cache),
unless they say something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from weft.errors import UnsupportedNest
from weft.inductor.codegen.axis_order import Access, accesses_by_bytes, axis_order, point_count, transposed_axis
from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.kernel_source import registers_per_thread
from weft.inductor.codegen.live_values import depths, live_across_reductions
from weft.inductor.codegen.memory_limits import copied_in_vectors, rows_in_flight, rows_sharing_sectors
from weft.inductor.codegen.row_tiles import (
    LOOP_TILE,
    next_power_of_two,
    previous_power_of_two,
    rows_of_program,
    streamed_tile,
    tile_of_rows,
)
from weft.inductor.codegen.shared_columns import TILE_OF_COLUMNS, WRAPPED_ROWS, WRAPPED_TILE, shared_columns, wraps
from weft.inductor.graph.gpu import HOPPER_MULTIPROCESSORS
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Index, Int, Nest
from weft.inductor.loop_ir.ops import REDUCTIONS

MAX_REGISTER_ROW = 16384  # elements of a row that one program keeps in registers
L2_REUSE_BYTES = 36 << 20  # of the L2 cache, for rows that are read again; an H100 has 50 MiB, an H200 60 MiB
# Elements of all values that a program can keep: three quarters of a multiprocessor's 65,536 registers.
_REGISTERS = 49152
# Of the 256 KiB of L1 cache and shared memory of an H100 or H200, for loads in flight; the rest stays a cache.
_PIPELINE_BYTES = 192 * 1024
_OCCUPANCY_WARPS = 32  # resident warps of a multiprocessor, with the registers that streamed column sums need
_MAX_BYTES_PER_THREAD = 192  # that a thread loads and stores for 16 elements; with more it has 8
_STREAMED_COLUMNS = 1024, 512  # columns of a program that computes, stores and sums them; the first that divides a row
_WARPS_OF_COLUMNS = 8  # of a program that computes a tile of rows with vectors of columns
_COLUMN_TILE = 1024  # elements of a tile of whole columns, at least: one of 128 is mostly launch and addresses
_INT32 = 2**31
_THREADS = 32  # of a warp

Tiling = Literal["grid", "loop", "whole"]


@dataclass(frozen=True)
class Dim:
    """Axes that the kernel iterates over as one flat index.

    Attributes:
        name: of the index in the kernel.
        axes: of the nest, outermost first.
        size: product of their sizes, in elements.
        tiling: "grid", "loop" or "whole"; see the module.
        block: how many elements of it a tile has; 1 makes it a scalar.
        wide: whether offsets along it need 64 bits.
    """

    name: str
    axes: tuple[int, ...]
    size: Int
    tiling: Tiling
    block: int
    wide: bool = False

    @property
    def masked(self) -> bool:
        """Whether blocks may reach over the end."""
        # A symbolic size may be anything, and 0 needs the mask too: no element exists, but the tile does.
        return self.block > 1 and not (isinstance(self.size, int) and self.size % self.block == 0 and self.size)

    @property
    def block_name(self) -> str:
        """The constant of the kernel that holds ``block``."""
        return f"{self.name.upper()}BLOCK"


@dataclass(frozen=True)
class KernelPlan:
    """The dimensions of a kernel, in the order of its tiles (contiguous memory last), and how it is launched.

    Attributes:
        multiprocessors: of the GPU that the kernel is for.
        shape: "pointwise", "row", "column" or "mixed"; see the module.
        stages: pipeline stages of the loop: iterations with loads in flight, which arrive in shared memory.
        pipeline_bytes: bytes of shared memory for these loads.
        reloads_shared: whether tiles that are the same in every iteration are loaded in each one, from a cache,
            because registers cannot hold them as well.
        multi_pass: whether rows are loaded again behind each of their reductions (:mod:`.row_passes`), as registers
            hold little more than the sums of columns.
        resident_blocks: how many blocks of a loop stay in registers from its first pass to its last
            (:mod:`.register_tiling`).
    """

    shape: str
    dims: tuple[Dim, ...]
    num_warps: int
    multiprocessors: int
    stages: int = 1
    pipeline_bytes: int = 0
    reloads_shared: bool = False
    multi_pass: bool = False
    resident_blocks: int = 0

    @property
    def registers(self) -> int | None:
        """The register limit of a thread, None for the assembler's own.

        A limit is set where a program has a multiprocessor for itself, because it fills it or because there are no
        more programs than multiprocessors. The assembler does not know that, and would spill to raise the occupancy.
        """
        programs = product(-(-dim.size // dim.block) for dim in self.grid)
        alone = isinstance(programs, int) and programs <= self.multiprocessors
        if not (self.multi_pass or (self.shape == "mixed" and alone)):
            return None
        return registers_per_thread(self.num_warps)

    @property
    def tile(self) -> tuple[Dim, ...]:
        """The dimensions of tiles, contiguous memory last."""
        return tuple(dim for dim in self.dims if dim.block > 1)

    @property
    def grid(self) -> tuple[Dim, ...]:
        """Dimensions across the grid, fastest first."""
        return tuple(dim for dim in reversed(self.dims) if dim.tiling == "grid")

    @property
    def loop(self) -> Dim | None:
        """The dimension that programs loop over; a kernel has one at most."""
        return next((dim for dim in self.dims if dim.tiling == "loop"), None)

    def dims_of(self, axes: frozenset[int]) -> frozenset[Dim]:
        """The dimensions that any of ``axes`` is part of."""
        return frozenset(dim for dim in self.dims if not axes.isdisjoint(dim.axes))


def product(sizes: Iterable[Int]) -> Int:
    """The product of sizes and strides."""
    return math.prod(sizes)  # type: ignore[no-matching-overload]


def plan_kernel(
    nest: Nest, dtypes: Mapping[str, torch.dtype], multiprocessors: int = HOPPER_MULTIPROCESSORS
) -> KernelPlan:
    """Decide the shape of a nest's kernel.

    Args:
        dtypes: of the buffers in memory.
        multiprocessors: of the GPU that the kernel is for; whether a nest has a plan does not depend on it.

    Raises:
        UnsupportedNest: its reductions do not go together in one kernel.
    """
    accesses = accesses_by_bytes(nest, dtypes)
    shape = _shape(nest, accesses, multiprocessors)
    # Offsets depend on the dimensions, and 64 bits on the offsets, so width is decided last, for every shape alike.
    return _with_wide(shape, nest, accesses)


def _shape(nest: Nest, accesses: list[Access], multiprocessors: int) -> KernelPlan:
    # Sets of axes, not reductions, decide the shape: all reductions over one set share their loop and their tile.
    overs = {frozenset(reduce.over) for reduce in nest.reduces}
    everything = frozenset(range(len(nest.sizes)))
    if not overs:
        return _pointwise(nest, accesses, multiprocessors)
    if len(overs) == 1:
        over = next(iter(overs))
        order = axis_order(nest, accesses, everything)
        # Reduced along memory: threads of one program read a row together. Else each thread sums columns of its own.
        if order and order[-1] in over:
            return _row(nest, accesses, over, multiprocessors)
        return _column(nest, accesses, over, multiprocessors)
    return _mixed(nest, accesses, overs, multiprocessors)


def _dim(nest: Nest, name: str, axes: Sequence[int], tiling: Tiling, block: int) -> Dim:
    return Dim(name, tuple(axes), product(nest.sizes[axis] for axis in axes), tiling, block)


def _covering_block(length: int) -> int:
    """The block that covers a whole dimension; at least 2, so that an empty one has a masked tile too."""
    return max(2, next_power_of_two(length))


def _clamped(block: int, size: Int) -> int:
    """``block``, or the next power of two of a shorter dimension."""
    return min(block, next_power_of_two(size)) if isinstance(size, int) else block


# ---- the shapes


def _pointwise(nest: Nest, accesses: list[Access], multiprocessors: int) -> KernelPlan:
    order = axis_order(nest, accesses, frozenset(range(len(nest.sizes))))
    rival = transposed_axis(nest, accesses, order[-1]) if order else None
    if rival is not None:
        return _two_dimensional(nest, accesses, order, rival, multiprocessors)
    # A single point: scalars only, one thread at work in one warp.
    if not order:
        return KernelPlan("pointwise", (), 1, multiprocessors)
    if columns := shared_columns(nest, accesses, order, multiprocessors):
        return _rows_of_columns(nest, order, columns, multiprocessors)
    total = point_count(nest, order)
    # Small tensors get smaller blocks, down to 128, so that each multiprocessor has one to two programs.
    # 1024 elements are two 16-byte loads of a half in each of 64 threads, enough in flight to cover memory's latency.
    block = min(1024, max(128, next_power_of_two(total / (2 * multiprocessors))))
    dim = _dim(nest, "x", order, "grid", block)
    warps = max(1, block // _elements_of_thread(accesses) // _THREADS)
    return KernelPlan("pointwise", (dim,), warps, multiprocessors)


def _rows_of_columns(nest: Nest, order: list[int], columns: int, multiprocessors: int) -> KernelPlan:
    if wraps(nest, order, columns):
        rows = WRAPPED_ROWS
        dims = (_dim(nest, "y", order[:-2], "grid", rows), _dim(nest, "x", order[-2:], "grid", WRAPPED_TILE))
        return KernelPlan("pointwise", dims, _warps(rows * WRAPPED_TILE), multiprocessors)
    rows = TILE_OF_COLUMNS // columns
    dims = (_dim(nest, "y", order[:-1], "grid", rows), _dim(nest, "x", order[-1:], "grid", columns))
    return KernelPlan("pointwise", dims, _WARPS_OF_COLUMNS, multiprocessors)


def _elements_of_thread(accesses: list[Access]) -> int:
    """16, or 8 where what is loaded and stored for 16 would take most registers of a thread. Measured on an H200, rope
    (256 bytes for 16) takes 86.8 us with 16 and 85.8 with 8; SwiGLU's backward (160 bytes) reaches a copy's rate."""
    # Registers hold what was loaded until it is stored. What is one number for all points is held once.
    moved = sum(access.itemsize for access in accesses if access.index.axes)
    return 16 if 16 * moved <= _MAX_BYTES_PER_THREAD else 8


def _two_dimensional(
    nest: Nest, accesses: list[Access], order: list[int], rival: int, multiprocessors: int
) -> KernelPlan:
    inner = order[-1]
    # Other axes are scalars of a program: tiles have two dimensions at most.
    rest = [axis for axis in order if axis not in (rival, inner)]
    widest = max(access.itemsize for access in accesses)
    # 64 x 64 elements of 2 bytes, 32 x 64 of 4: 8 KiB, and at least 128 contiguous bytes along both axes.
    x = _clamped(64, nest.sizes[inner])
    y = _clamped(max(2048 if widest > 2 else 4096, 64 * x) // x // (2 if widest > 2 else 1), nest.sizes[rival])
    dims = [_dim(nest, "y", [rival], "grid", y), _dim(nest, "x", [inner], "grid", x)]
    if rest:
        dims.insert(0, _dim(nest, "z", rest, "grid", 1))
    return KernelPlan("pointwise", tuple(dims), 8 if x * y >= 4096 else 4, multiprocessors)


def _row(nest: Nest, accesses: list[Access], over: frozenset[int], multiprocessors: int) -> KernelPlan:
    outer = axis_order(nest, accesses, frozenset(range(len(nest.sizes))) - over)
    inner = axis_order(nest, accesses, over)
    length = product(nest.sizes[axis] for axis in inner)
    rows = point_count(nest, outer)
    # Whole rows: loaded once, whatever the number of reductions. Otherwise each reduction that another needs costs a
    # pass.
    if isinstance(length, int) and _fits(nest, over, length):
        r = _covering_block(length)
        # Short rows share a program, several to a tile, as long as each multiprocessor still gets one or two programs.
        most = next_power_of_two(rows / (2 * multiprocessors)) if outer else 1
        # As many rows that share sectors as registers hold: part of a sector is still several times what one row uses.
        held = _REGISTERS // (r * max(2, live_across_reductions(nest, over)))
        sharing = min(rows_sharing_sectors(nest, accesses, outer, inner), held)
        x = min(most, max(rows_of_program(r), previous_power_of_two(sharing)))
        dims = (_dim(nest, "x", outer, "grid", x), _dim(nest, "r", inner, "whole", r))
        return KernelPlan("row", _nonempty(dims), _warps(x * r), multiprocessors)
    # One row at a time here: the tile along it fills the threads.
    warps, tile = _loop_over_long_row(nest, accesses, over, rows, multiprocessors)
    dims = (_dim(nest, "x", outer, "grid", 1), _dim(nest, "r", inner, "loop", _clamped(tile, length)))
    return KernelPlan("row", _nonempty(dims), warps, multiprocessors)


def _loop_over_long_row(
    nest: Nest, accesses: list[Access], over: frozenset[int], rows: float, multiprocessors: int
) -> tuple[int, int]:
    """The warps of a program that loops over a row, and the elements of its tile.

    A row that is read a second time wants larger programs: fewer run at once, so their rows are still in the L2 cache.
    A program has 32 warps where four programs on each multiprocessor would read more than the cache keeps, or where no
    multiprocessor has two (cross-entropy of 8192 rows of 128256 on an H200: 1275 us with one program of 32 warps, 1417
    with two, 1488 to 1560 with two to four of 16 warps). In between, the last wave of such programs would leave too
    many multiprocessors idle.
    """
    depth = depths(nest, over)
    # Nothing along the row is stored after a reduction of it: a single pass, which no cache helps.
    if not any(depth[store.value] and not store.axes.isdisjoint(over) for store in nest.stores):
        return 8, LOOP_TILE
    loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(over)]
    # Bytes of one row that a later pass reads again. What all rows share stays in the cache by itself.
    waiting = sum(access.bytes for access in loads if access.index.axes - over) / max(1.0, rows)
    crowd = 4 * multiprocessors
    alone = rows <= multiprocessors or (rows >= crowd and crowd * waiting > L2_REUSE_BYTES)
    # Registers that a thread needs for each element: 32 warps leave it 64 in all. An online softmax keeps one result a
    # thread, so it adds none.
    kinds = [reduce.kind for reduce in nest.reduces if not over.isdisjoint(reduce.over)]
    words = 0.0 if "max" in kinds else sum(REDUCTIONS[kind].results for kind in kinds)
    words += sum(access.itemsize for access in loads) / 4
    return (32, LOOP_TILE * (4 if words <= 2 else 2)) if alone and words <= 4 else (16, LOOP_TILE)


def _fits(nest: Nest, over: frozenset[int], length: int) -> bool:
    """Whether a row stays in registers from its first load to its last store."""
    live = max(2, live_across_reductions(nest, over))
    # By the padded length: masked elements occupy registers as well.
    return length <= MAX_REGISTER_ROW and next_power_of_two(length) * live <= _REGISTERS


def _warps(elements: int) -> int:
    # 16 to 32 elements a thread: the longer the row, the more of its loads a thread has in flight.
    if elements <= 1024:
        return 1 if elements <= 512 else 2
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16


def _nonempty(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    # A reduction to one number has no grid dimension: one program.
    return tuple(dim for dim in dims if dim.axes)


def _column(nest: Nest, accesses: list[Access], over: frozenset[int], multiprocessors: int) -> KernelPlan:
    outer = axis_order(nest, accesses, frozenset(range(len(nest.sizes))) - over)
    inner = axis_order(nest, accesses, over)
    length = product(nest.sizes[axis] for axis in inner)
    columns = point_count(nest, outer)
    # 16 columns of 2 bytes are one 32-byte sector; fewer would waste a part of each load.
    # 64 at most: beyond that a tile has fewer rows, and a column's sum fewer elements in flight.
    x = min(64, max(16, next_power_of_two(columns / (2 * multiprocessors)))) if outer else 1
    x = _clamped(x, product(nest.sizes[axis] for axis in outer))
    if streamed := _streamed(nest, over, outer, multiprocessors):
        loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(over)]
        # What is one number a row would be copied once for each column.
        wide = all(outer[-1] in load.index.axes for load in loads)
        rows, warps, ahead = streamed_tile(streamed, point_count(nest, outer) / streamed, wide, multiprocessors)
        size = sum(rows * streamed * load.itemsize for load in loads)
        ahead = ahead if wide and (ahead > 1 or _OCCUPANCY_WARPS // warps * size <= _PIPELINE_BYTES) else 0
        dims = (_dim(nest, "r", inner, "loop", rows), _dim(nest, "x", outer, "grid", streamed))
        return KernelPlan("column", _nonempty(dims), warps, multiprocessors, 1 + ahead, ahead * size)
    kept = max(1, live_across_reductions(nest, over))
    near = previous_power_of_two(rows_in_flight(nest, accesses, over, inner))
    # The whole column in one tile: no loop, no accumulators.
    if isinstance(length, int) and next_power_of_two(length) * x * kept <= 2 * LOOP_TILE and length <= near:
        r = _covering_block(length)
        x = _wide_enough(x, r, nest, outer, columns, multiprocessors)
        dims = (_dim(nest, "r", inner, "whole", r), _dim(nest, "x", outer, "grid", x))
        return KernelPlan("column", _nonempty(dims), _warps_of_columns(nest, over, r, x), multiprocessors)
    depth = depths(nest, over)
    loads = sum(access.loaded and not access.index.axes.isdisjoint(over) for access in accesses)
    # A sum that needs another one: squared deviations, which a loop sums together with their mean (Welford).
    welford = any(depth[reduce] for reduce in nest.reduces)
    reloads = any(depth[store.value] and not store.axes.isdisjoint(over) for store in nest.stores)
    tile, warps = LOOP_TILE, _warps(_clamped(max(1, LOOP_TILE // x), length) * x)
    # What computes between load and sum wants few elements a thread, and several programs on each multiprocessor.
    # Measured on an H200, the sums of backwards of batch norms, 32 columns and 4 elements a thread against up to 64
    # columns and 16: with ReLU, parts of 6272 rows of 64, 87 and 123 us, of 1568 rows of 256 104 and 110; with SiLU, of
    # 6272 rows of 96, 212 and 321. Of a forward, parts of 392 rows of 512: 29 us with 8 elements a thread and 4 warps,
    # 43 with 2 and 16. Where rows are loaded again behind the sums, there is nothing to gain.
    if welford and not reloads:
        x, tile, warps = min(x, max(32, next_power_of_two(columns / (5 * multiprocessors)))), LOOP_TILE // 4, 4
    elif loads > 1 and not reloads:
        x, tile, warps = min(x, 32), LOOP_TILE // 2, 16
    r = _clamped(max(1, tile // x), length)
    if r > near:
        r, warps = near, max(1, near * x // (4 * _THREADS))
    dims = (_dim(nest, "r", inner, "loop", r), _dim(nest, "x", outer, "grid", x))
    return KernelPlan("column", _nonempty(dims), min(warps, max(1, r * x // _THREADS)), multiprocessors)


def _wide_enough(x: int, rows: int, nest: Nest, outer: Sequence[int], columns: float, multiprocessors: int) -> int:
    """The columns of a tile of ``rows`` whole rows: at least ``x``, and enough for the threads of a program as long as
    there are programs for the GPU. Measured on an H200, sums of 2 rows of 4,194,304: 44 us with 64 columns, 14 with
    512."""
    if not outer:
        return x
    most = next_power_of_two(columns / (8 * multiprocessors))
    return _clamped(max(x, min(_COLUMN_TILE // rows, most)), product(nest.sizes[axis] for axis in outer))


def _streamed(nest: Nest, over: frozenset[int], outer: Sequence[int], multiprocessors: int) -> int:
    """How many columns a program has where values are computed, stored and summed by column, rows are long, and there
    are programs for the GPU; else 0.

    The program takes two rows at a time, so partial sums stay in their threads until the end. Measured on an H200 in
    the backward of a bias and GELU, 256 parts of 32 rows of 8192: 110 us with 1024 columns, 119 with 512, 123 with
    tiles of 32 x 64; with rows of 2048 to 16384 and less arithmetic it is as fast as any. A later run took 118 us, and
    103 with the loads of the next two rows in flight; those of the next four gave the same.
    """
    depth = depths(nest, over)
    # A store that depends on a column's sum needs a second pass over the rows, which streaming has not.
    stored = [depth[store.value] for store in nest.stores if not store.axes.isdisjoint(over)]
    width = nest.sizes[outer[-1]] if outer else 1
    if not stored or any(stored) or not isinstance(width, int):
        return 0
    # Whole blocks only: a masked tail would cost a comparison for every element of every row.
    streamed = next((columns for columns in _STREAMED_COLUMNS if width % columns == 0), 0)
    # Rows that are not in parts are read by few programs: 3,136 rows of 1024 took 1,167 us on an H200, by one program.
    return streamed if streamed and point_count(nest, outer) / streamed >= multiprocessors / 2 else 0


def _warps_of_columns(nest: Nest, over: frozenset[int], rows: int, columns: int) -> int:
    """The warps of a program that sums columns of a tile.

    A tile that is only summed has few warps, so that a sum stays in its thread. A tile that is also stored has one or
    two vectors a thread, and more threads than columns: where one thread could sum a column by itself, Triton 3.6
    computes the whole tile a second time in that layout.
    """
    stored = any(not store.axes.isdisjoint(over) for store in nest.stores)
    loads = sum(not load.axes.isdisjoint(over) and not is_position(load) for load in nest.reads)
    tile = rows * columns
    warps = max(1, tile // (512 if stored else 2048 // max(1, loads)))
    if stored:
        warps = max(warps, min(2 * columns // _THREADS, tile // 256))
    # Rounded down to a power of two, which Triton asks of the number of warps.
    return min(16, previous_power_of_two(warps))


def _mixed(nest: Nest, accesses: list[Access], overs: set[frozenset[int]], multiprocessors: int) -> KernelPlan:
    # Axes that no reduction runs over are mostly the parts of a split reduction: one program for each.
    along, across = _row_and_column(nest, accesses, overs)
    rest = frozenset(range(len(nest.sizes))) - along - across
    length = product(nest.sizes[axis] for axis in along)
    if not isinstance(length, int):
        raise UnsupportedNest("rows of a length that is not known when the step is compiled, reduced along both ways")
    c = _covering_block(length)
    sums, kept, shared = _resident(nest, along, across)
    resident = max(2, kept + sums)
    # If a row and its column sums do not fit together, rows are read again behind each reduction instead.
    multi_pass = c * resident > _REGISTERS
    # With several passes over a row, only the column sums and one value of each position must fit.
    if length > MAX_REGISTER_ROW or (multi_pass and c * (sums + 1) > _REGISTERS):
        raise UnsupportedNest(f"rows of {length} elements, reduced along both ways, do not fit into registers")
    rows = product(nest.sizes[axis] for axis in across)
    # Short rows are processed several at a time; a column then has partial sums within the tile too.
    alone = point_count(nest, rest) <= multiprocessors
    tile, fewest, pipelined = (LOOP_TILE, 4, True) if c > 512 and alone else tile_of_rows(c)
    n = _clamped(max(1, tile // c), rows)
    dims = (
        _dim(nest, "p", axis_order(nest, accesses, rest), "grid", 1),
        _dim(nest, "n", axis_order(nest, accesses, across), "loop", n),
        _dim(nest, "c", axis_order(nest, accesses, along), "whole", c),
    )
    # Column sums fill the registers of a thread sooner than a row alone does, and a thread has 255 at most.
    registers = n * c * (resident + shared + 2) // _THREADS
    # With several programs on a multiprocessor the assembler keeps a thread to fewer.
    most = 240 if n * c >= LOOP_TILE else 130
    enough = (few for few in (2, 4, 8) if few >= fewest and registers <= most * few)
    warps = 16 if n * c > LOOP_TILE else next(enough, 16)
    # A weight is the same for every row: kept in registers if they suffice, else read from the L1 cache for each row.
    reloads_shared = c * (resident + shared) > _REGISTERS
    loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(along)]
    ahead = sum(c * load.itemsize * (reloads_shared if load.index.axes.isdisjoint(across) else n) for load in loads)
    fitting = _REGISTERS // (n * c * (resident + shared))
    # Programs that run on one multiprocessor share its shared memory.
    beside = max(1, min(fitting, math.ceil(point_count(nest, rest) / multiprocessors)))
    # Pipelined loads bypass the L1 cache, where a multi-pass kernel has to find the row again.
    pipelined = pipelined and not multi_pass and copied_in_vectors(loads)
    stages = _stages(ahead, _PIPELINE_BYTES // beside) if pipelined else 1
    return KernelPlan(
        "mixed", _nonempty(dims), warps, multiprocessors, stages, (stages - 1) * ahead, reloads_shared, multi_pass
    )


def _resident(nest: Nest, along: frozenset[int], across: frozenset[int]) -> tuple[int, int, int]:
    """Registers for every position of a row while a program loops over rows: column sums, values that are live across
    a reduction of the row, and values that all rows share (a weight)."""
    shared = frozenset(v for v in nest.reads if v.axes >= along and v.axes.isdisjoint(across) and not is_position(v))
    # One accumulator for each column, which lives through the whole loop.
    sums = {v for v in nest.reduces if not across.isdisjoint(v.over) and not v.axes.isdisjoint(along)}
    return len(sums), live_across_reductions(nest, along, shared), len(shared)


def _stages(tile: int, room: int) -> int:
    """The pipeline stages of the loop over rows: there are few instructions between the load of a row and its sums, so
    without loads in flight a program would mostly wait.

    With three stages a tile is in flight while another is computed. With two, Triton waits for each tile at once, and
    gains only that the loads of one tile are in flight together. Measured on an H200, rows of 8192 bfloat16, one
    program on each multiprocessor: RMSNorm's backward takes 137 us with three stages, 171 with two; LayerNorm's 145 and
    194.

    Args:
        tile: bytes that an iteration loads.
        room: bytes of shared memory for them; the stage that is computed is in registers, the others are there.
    """
    return 3 if 2 * tile <= room else 2 if tile <= room else 1


def _row_and_column(
    nest: Nest, accesses: list[Access], overs: set[frozenset[int]]
) -> tuple[frozenset[int], frozenset[int]]:
    """The axes of the rows, and those of the loop over rows."""
    if len(overs) > 2:
        raise UnsupportedNest(f"reductions over {len(overs)} different sets of axes")
    # Sorted, as sets have no order of their own: the plan must be the same on every rank.
    one, two = sorted(overs, key=sorted)
    if one & two:
        raise UnsupportedNest("reductions over sets of axes that overlap")
    # The reduction that feeds the other must finish within an iteration of the loop: it is the one along rows.
    deep = [(a, b) for a, b in ((one, two), (two, one)) if _feeds(nest, a, b)]
    if len(deep) == 2:
        raise UnsupportedNest("row reductions of column reductions of row reductions")
    if deep:
        along, across = deep[0]
    else:
        # By elements, not bytes: `supports` plans with other dtypes, and its answer must hold here.
        counted = [access._replace(bytes=access.bytes / access.itemsize) for access in accesses]
        order = axis_order(nest, sorted(counted, key=lambda access: -access.bytes), one | two)
        along, across = (one, two) if order[-1] in one else (two, one)
    depth = depths(nest, across)
    # A column's sum is complete only after the loop over the rows.
    if any(depth[value] and not value.axes.isdisjoint(across) for value in nest.values()):
        raise UnsupportedNest("a value of every row that needs a column's sum first")
    return along, across


def _feeds(nest: Nest, first: frozenset[int], second: frozenset[int]) -> bool:
    """Whether a reduction over ``second`` needs one over ``first``."""
    depth = depths(nest, first)
    return any(frozenset(reduce.over) == second and depth[reduce] for reduce in nest.reduces)


# ---- 64 bits where 32 are too few


def _with_wide(plan: KernelPlan, nest: Nest, accesses: list[Access]) -> KernelPlan:
    # One block of margin: positions in a masked tail lie behind the end and must not wrap around.
    wide = {dim for dim in plan.dims if not isinstance(dim.size, int) or dim.size >= _INT32 - dim.block}
    for index, *_ in accesses:
        reach = {dim: _reach(nest, index, dim) for dim in plan.dims}
        narrow = sorted((dim for dim in plan.dims if dim not in wide), key=lambda dim: -reach[dim])
        # An offset is a sum over dimensions: the longest become 64 bits until the others fit into 32.
        # 64-bit arithmetic takes several instructions on a GPU, so it is spent only along dimensions that need it.
        while narrow and sum(reach[dim] for dim in narrow) + size_hint(index.offset) >= _INT32:
            wide.add(narrow.pop(0))
    dims = tuple(
        Dim(dim.name, dim.axes, dim.size, dim.tiling, dim.block, wide=True) if dim in wide else dim for dim in plan.dims
    )
    return replace(plan, dims=dims)


def _reach(nest: Nest, index: Index, dim: Dim) -> float:
    """How far from its start an index goes along a dimension; infinite where it is not known."""
    reach = 0.0
    for axis in dim.axes:
        stride, size = index.stride(axis), nest.sizes[axis]
        if not isinstance(stride, int) or not isinstance(size, int):
            return math.inf if stride != 0 else 0.0
        # Both directions count: a negative stride reaches as far below as a positive one above.
        reach += abs(stride) * (size - 1)
    return reach
