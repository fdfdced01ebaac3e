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

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from weft.errors import UnsupportedNest
from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.kernel_source import registers_per_thread
from weft.inductor.graph.gpu import HOPPER_MULTIPROCESSORS
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Index, Int, Load, Nest, Reduce, Value, ordered
from weft.inductor.loop_ir.ops import REDUCTIONS

MAX_REGISTER_ROW = 16384  # elements of a row that one program keeps in registers
LOOP_TILE = 4096  # elements of a loop's tile
L2_REUSE_BYTES = 36 << 20  # of the L2 cache, for rows that are read again; an H100 has 50 MiB, an H200 60 MiB
# Elements of all values that a program can keep: three quarters of a multiprocessor's 65,536 registers.
_REGISTERS = 49152
# Of the 256 KiB of L1 cache and shared memory of an H100 or H200, for loads in flight; the rest stays a cache.
_PIPELINE_BYTES = 192 * 1024
_OCCUPANCY_WARPS = 32  # resident warps of a multiprocessor, with the registers that streamed column sums need
_MAX_BYTES_PER_THREAD = 192  # that a thread loads and stores for 16 elements; with more it has 8
_STREAMED_COLUMNS = 1024, 512  # columns of a program that computes, stores and sums them; the first that divides a row
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


class _Access(NamedTuple):
    index: Index
    bytes: float
    itemsize: int
    loaded: bool


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
    accesses = _accesses(nest, dtypes)
    shape = _shape(nest, accesses, multiprocessors)
    return _with_wide(shape, nest, accesses)


def _shape(nest: Nest, accesses: list[_Access], multiprocessors: int) -> KernelPlan:
    overs = {frozenset(reduce.over) for reduce in nest.reduces}
    everything = frozenset(range(len(nest.sizes)))
    if not overs:
        return _pointwise(nest, accesses, multiprocessors)
    if len(overs) == 1:
        over = next(iter(overs))
        order = _memory_order(nest, accesses, everything)
        if order and order[-1] in over:
            return _row(nest, accesses, over, multiprocessors)
        return _column(nest, accesses, over, multiprocessors)
    return _mixed(nest, accesses, overs, multiprocessors)


# ---- what the memory looks like


def _accesses(nest: Nest, dtypes: Mapping[str, torch.dtype]) -> list[_Access]:
    """Each access once, the one that moves most bytes first; of equals a store first."""
    loads = [(load.buffer, load.index) for load in nest.reads if not is_position(load)]
    accesses = []
    for buffer, index in dict.fromkeys([*((store.buffer, store.index) for store in nest.stores), *loads]):
        itemsize = dtypes[buffer].itemsize
        accesses.append(_Access(index, itemsize * _count(nest, index.axes), itemsize, (buffer, index) in loads))
    return sorted(accesses, key=lambda access: -access.bytes)


def _count(nest: Nest, axes: frozenset[int] | Sequence[int]) -> float:
    return math.prod(size_hint(nest.sizes[axis]) for axis in axes)


def _contiguous(nest: Nest, index: Index) -> int | None:
    """The axis along which neighbours are adjacent in memory."""
    axes = [axis for axis, stride in index.strides if stride == 1 and nest.sizes[axis] != 1]
    # Overlapping windows (i + j) have stride 1 along two axes.
    return max(axes, key=lambda axis: size_hint(nest.sizes[axis]), default=None)


def _memory_order(nest: Nest, accesses: list[_Access], axes: frozenset[int]) -> list[int]:
    """``axes`` ordered by stride, largest first; the accesses that move most bytes decide.

    The innermost axis is the one along which most bytes are contiguous: there a vector load brings useful elements
    only.
    """

    def compare(a: int, b: int) -> int:
        # The largest access that tells the two axes apart decides; a stride of 0 says nothing about memory.
        for index, *_ in accesses:
            one, two = size_hint(index.stride(a)), size_hint(index.stride(b))
            if one and two and one != two:
                return 1 if one < two else -1
        return a - b

    order = sorted(axes, key=functools.cmp_to_key(compare))
    votes: dict[int, float] = {}
    for index, weight, *_ in accesses:
        inner = _contiguous(nest, index)
        if inner in axes:
            votes[inner] = votes.get(inner, 0.0) + weight
    if votes:
        inner = max(votes, key=lambda axis: (votes[axis], axis))
        order.remove(inner)
        order.append(inner)
    return order


def _dim(nest: Nest, name: str, axes: Sequence[int], tiling: Tiling, block: int) -> Dim:
    return Dim(name, tuple(axes), product(nest.sizes[axis] for axis in axes), tiling, block)


def _next_power_of_two(n: float) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, math.ceil(n) - 1).bit_length()


def _covering_block(length: int) -> int:
    """The block that covers a whole dimension; at least 2, so that an empty one has a masked tile too."""
    return max(2, _next_power_of_two(length))


def _clamped(block: int, size: Int) -> int:
    """``block``, or the next power of two of a shorter dimension."""
    return min(block, _next_power_of_two(size)) if isinstance(size, int) else block


# ---- the shapes


def _pointwise(nest: Nest, accesses: list[_Access], multiprocessors: int) -> KernelPlan:
    order = _memory_order(nest, accesses, frozenset(range(len(nest.sizes))))
    rival = _transposed(nest, accesses, order[-1]) if order else None
    if rival is not None:
        return _two_dimensional(nest, accesses, order, rival, multiprocessors)
    if not order:
        return KernelPlan("pointwise", (), 1, multiprocessors)
    total = _count(nest, order)
    # Small tensors get smaller blocks, down to 128, so that each multiprocessor has one to two programs.
    block = min(1024, max(128, _next_power_of_two(total / (2 * multiprocessors))))
    dim = _dim(nest, "x", order, "grid", block)
    warps = max(1, block // _elements_of_thread(accesses) // _THREADS)
    return KernelPlan("pointwise", (dim,), warps, multiprocessors)


def _elements_of_thread(accesses: list[_Access]) -> int:
    """16, or 8 where what is loaded and stored for 16 would take most registers of a thread. Measured on an H200, rope
    (256 bytes for 16) takes 86.8 us with 16 and 85.8 with 8; SwiGLU's backward (160 bytes) reaches a copy's rate."""
    moved = sum(access.itemsize for access in accesses if access.index.axes)
    return 16 if 16 * moved <= _MAX_BYTES_PER_THREAD else 8


def _transposed(nest: Nest, accesses: list[_Access], inner: int) -> int | None:
    """Another axis that much memory is contiguous along, while it is strided along ``inner``."""
    votes: dict[int, float] = {}
    for index, weight, *_ in accesses:
        axis = _contiguous(nest, index)
        if axis is not None and axis != inner and index.stride(inner) not in (0, 1):
            votes[axis] = votes.get(axis, 0.0) + weight
    rival = max(votes, key=lambda axis: (votes[axis], axis), default=None)
    # For less of the traffic than that, strided access costs less than a transpose through shared memory.
    if rival is None or votes[rival] * 16 < sum(access.bytes for access in accesses):
        return None
    # 8 float32 elements are one 32-byte sector: along shorter axes a tile gains little.
    small = min(size_hint(nest.sizes[rival]), size_hint(nest.sizes[inner]))
    return rival if small >= 8 else None


def _two_dimensional(
    nest: Nest, accesses: list[_Access], order: list[int], rival: int, multiprocessors: int
) -> KernelPlan:
    inner = order[-1]
    rest = [axis for axis in order if axis not in (rival, inner)]
    widest = max(access.itemsize for access in accesses)
    # 64 x 64 elements of 2 bytes, 32 x 64 of 4: 8 KiB, and at least 128 contiguous bytes along both axes.
    x = _clamped(64, nest.sizes[inner])
    y = _clamped(max(2048 if widest > 2 else 4096, 64 * x) // x // (2 if widest > 2 else 1), nest.sizes[rival])
    dims = [_dim(nest, "y", [rival], "grid", y), _dim(nest, "x", [inner], "grid", x)]
    if rest:
        dims.insert(0, _dim(nest, "z", rest, "grid", 1))
    return KernelPlan("pointwise", tuple(dims), 8 if x * y >= 4096 else 4, multiprocessors)


def _row(nest: Nest, accesses: list[_Access], over: frozenset[int], multiprocessors: int) -> KernelPlan:
    outer = _memory_order(nest, accesses, frozenset(range(len(nest.sizes))) - over)
    inner = _memory_order(nest, accesses, over)
    length = product(nest.sizes[axis] for axis in inner)
    rows = _count(nest, outer)
    if isinstance(length, int) and _fits(nest, over, length):
        r = _covering_block(length)
        x = min(_next_power_of_two(rows / (2 * multiprocessors)), 1024 // r) if outer and r < 512 else 1
        dims = (_dim(nest, "x", outer, "grid", x), _dim(nest, "r", inner, "whole", r))
        return KernelPlan("row", _nonempty(dims), _warps(x * r), multiprocessors)
    warps, tile = _loop_over_long_row(nest, accesses, over, rows, multiprocessors)
    dims = (_dim(nest, "x", outer, "grid", 1), _dim(nest, "r", inner, "loop", _clamped(tile, length)))
    return KernelPlan("row", _nonempty(dims), warps, multiprocessors)


def _loop_over_long_row(
    nest: Nest, accesses: list[_Access], over: frozenset[int], rows: float, multiprocessors: int
) -> tuple[int, int]:
    """The warps of a program that loops over a row, and the elements of its tile.

    A row that is read a second time wants larger programs: fewer run at once, so their rows are still in the L2 cache.
    A program has 32 warps where four programs on each multiprocessor would read more than the cache keeps, or where no
    multiprocessor has two (cross-entropy of 8192 rows of 128256 on an H200: 1275 us with one program of 32 warps, 1417
    with two, 1488 to 1560 with two to four of 16 warps). In between, the last wave of such programs would leave too
    many multiprocessors idle.
    """
    depth = depths(nest, over)
    if not any(depth[store.value] and not store.axes.isdisjoint(over) for store in nest.stores):
        return 8, LOOP_TILE
    loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(over)]
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
    live = max(2, _live_across_reductions(nest, over))
    return length <= MAX_REGISTER_ROW and _next_power_of_two(length) * live <= _REGISTERS


def _live_across_reductions(nest: Nest, over: frozenset[int], shared: frozenset[Value] = frozenset()) -> int:
    """How many values of every position of a row are live across a reduction of the row, at the worst reduction.

    These are values that are computed before and used after it, or the loads that they come from, whichever are fewer:
    a value can be recomputed from loads that are live. What is used after a reduction only is loaded there. Loads in
    ``shared`` are live anyway and do not count.
    """
    depth = depths(nest, over)
    uses: dict[Value, list[int]] = {}
    for user in nest.values():
        # A reduction of the row reads its operand before its result exists: one barrier earlier.
        when = depth[user] - (isinstance(user, Reduce) and not over.isdisjoint(user.over))
        for operand in user.operands():
            uses.setdefault(operand, []).append(when)
    for store in nest.stores:
        for value in store.values():
            uses.setdefault(value, []).append(depth[store.value])
    wide = [v for v in uses if not v.axes.isdisjoint(over) and not is_position(v)]
    first = {v: min(uses[v]) if isinstance(v, Load) else depth[v] for v in wide}
    most = 0
    # A reduction of the row is a barrier: no position goes on before all have been read.
    for barrier in range(1, max(depth.values()) + 1):
        crossing = [v for v in wide if first[v] < barrier <= max(uses[v])]
        loads = {v for v in ordered(crossing) if isinstance(v, Load) and v in first and first[v] < barrier} - shared
        most = max(most, min(len(crossing), len(loads)))
    return most


def depths(nest: Nest, over: frozenset[int]) -> dict[Value, int]:
    """For each value, the longest chain of reductions along ``over`` that it depends on, itself included."""
    depth: dict[Value, int] = {}
    for value in nest.values():
        below = max((depth[operand] for operand in value.operands()), default=0)
        depth[value] = below + (isinstance(value, Reduce) and not over.isdisjoint(value.over))
    return depth


def _warps(elements: int) -> int:
    if elements <= 512:
        return 1 if elements <= 256 else 2
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16


def _nonempty(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    return tuple(dim for dim in dims if dim.axes)


def _column(nest: Nest, accesses: list[_Access], over: frozenset[int], multiprocessors: int) -> KernelPlan:
    outer = _memory_order(nest, accesses, frozenset(range(len(nest.sizes))) - over)
    inner = _memory_order(nest, accesses, over)
    length = product(nest.sizes[axis] for axis in inner)
    columns = _count(nest, outer)
    # 16 columns of 2 bytes are one 32-byte sector; fewer would waste a part of each load.
    x = min(64, max(16, _next_power_of_two(columns / (2 * multiprocessors)))) if outer else 1
    x = _clamped(x, product(nest.sizes[axis] for axis in outer))
    if streamed := _streamed(nest, over, outer):
        dims = (_dim(nest, "r", inner, "loop", 2), _dim(nest, "x", outer, "grid", streamed))
        loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(over)]
        ahead, warps = sum(2 * streamed * load.itemsize for load in loads), streamed // 256
        # What is one number a row would be copied once for each column.
        wide = all(outer[-1] in load.index.axes for load in loads)
        stages = 2 if wide and _OCCUPANCY_WARPS // warps * ahead <= _PIPELINE_BYTES else 1
        return KernelPlan("column", _nonempty(dims), warps, multiprocessors, stages, (stages - 1) * ahead)
    kept = max(1, _live_across_reductions(nest, over))
    if isinstance(length, int) and _next_power_of_two(length) * x * kept <= 2 * LOOP_TILE:
        r = _covering_block(length)
        dims = (_dim(nest, "r", inner, "whole", r), _dim(nest, "x", outer, "grid", x))
        return KernelPlan("column", _nonempty(dims), _warps_of_columns(nest, over, r, x), multiprocessors)
    # Welford's combination is long: the fewer elements a thread has, the more warps hide it.
    welford = any(reduce.kind == "welford" for reduce in nest.reduces)
    r = _clamped(max(1, LOOP_TILE // (4 if welford else 1) // x), length)
    dims = (_dim(nest, "r", inner, "loop", r), _dim(nest, "x", outer, "grid", x))
    return KernelPlan("column", _nonempty(dims), 16 if welford else _warps(r * x), multiprocessors)


def _streamed(nest: Nest, over: frozenset[int], outer: Sequence[int]) -> int:
    """How many columns a program has where values are computed, stored and summed by column, and rows are long; else 0.

    The program takes two rows at a time, so partial sums stay in their threads until the end. Measured on an H200 in
    the backward of a bias and GELU, 256 parts of 32 rows of 8192: 110 us with 1024 columns, 119 with 512, 123 with
    tiles of 32 x 64; with rows of 2048 to 16384 and less arithmetic it is as fast as any. A later run took 118 us, and
    103 with the loads of the next two rows in flight; those of the next four gave the same.
    """
    depth = depths(nest, over)
    stored = [depth[store.value] for store in nest.stores if not store.axes.isdisjoint(over)]
    width = nest.sizes[outer[-1]] if outer else 1
    if not stored or any(stored) or not isinstance(width, int):
        return 0
    return next((columns for columns in _STREAMED_COLUMNS if width % columns == 0), 0)


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
    return min(16, 1 << (warps.bit_length() - 1))


def _mixed(nest: Nest, accesses: list[_Access], overs: set[frozenset[int]], multiprocessors: int) -> KernelPlan:
    along, across = _row_and_column(nest, accesses, overs)
    rest = frozenset(range(len(nest.sizes))) - along - across
    length = product(nest.sizes[axis] for axis in along)
    if not isinstance(length, int):
        raise UnsupportedNest("rows of a length that is not known when the step is compiled, reduced along both ways")
    c = _covering_block(length)
    sums, kept, shared = _resident(nest, along, across)
    resident = max(2, kept + sums)
    multi_pass = c * resident > _REGISTERS
    # With several passes over a row, only the column sums and one value of each position must fit.
    if length > MAX_REGISTER_ROW or (multi_pass and c * (sums + 1) > _REGISTERS):
        raise UnsupportedNest(f"rows of {length} elements, reduced along both ways, do not fit into registers")
    rows = product(nest.sizes[axis] for axis in across)
    n = _clamped(max(1, LOOP_TILE // c), rows)
    dims = (
        _dim(nest, "p", _memory_order(nest, accesses, rest), "grid", 1),
        _dim(nest, "n", _memory_order(nest, accesses, across), "loop", n),
        _dim(nest, "c", _memory_order(nest, accesses, along), "whole", c),
    )
    # Column sums fill the registers of a thread sooner than a row alone does, and a thread has 255 at most.
    registers = n * c * (resident + shared + 2) // _THREADS
    warps = 16 if n * c > LOOP_TILE else next((few for few in (4, 8) if registers <= 240 * few), 16)
    reloads_shared = c * (resident + shared) > _REGISTERS
    loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(along)]
    tile = sum(c * load.itemsize * (reloads_shared if load.index.axes.isdisjoint(across) else n) for load in loads)
    fitting = _REGISTERS // (n * c * (resident + shared))
    # Programs that run on one multiprocessor share its shared memory.
    beside = max(1, min(fitting, math.ceil(_count(nest, rest) / multiprocessors)))
    # Pipelined loads bypass the L1 cache, where a multi-pass kernel has to find the row again.
    stages = 1 if multi_pass else _stages(tile, _PIPELINE_BYTES // beside)
    return KernelPlan(
        "mixed", _nonempty(dims), warps, multiprocessors, stages, (stages - 1) * tile, reloads_shared, multi_pass
    )


def _resident(nest: Nest, along: frozenset[int], across: frozenset[int]) -> tuple[int, int, int]:
    """Registers for every position of a row while a program loops over rows: column sums, values that are live across
    a reduction of the row, and values that all rows share (a weight)."""
    shared = frozenset(v for v in nest.reads if v.axes >= along and v.axes.isdisjoint(across) and not is_position(v))
    sums = {v for v in nest.reduces if not across.isdisjoint(v.over) and not v.axes.isdisjoint(along)}
    return len(sums), _live_across_reductions(nest, along, shared), len(shared)


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
    nest: Nest, accesses: list[_Access], overs: set[frozenset[int]]
) -> tuple[frozenset[int], frozenset[int]]:
    """The axes of the rows, and those of the loop over rows."""
    if len(overs) > 2:
        raise UnsupportedNest(f"reductions over {len(overs)} different sets of axes")
    one, two = sorted(overs, key=sorted)
    if one & two:
        raise UnsupportedNest("reductions over sets of axes that overlap")
    deep = [(a, b) for a, b in ((one, two), (two, one)) if _feeds(nest, a, b)]
    if len(deep) == 2:
        raise UnsupportedNest("row reductions of column reductions of row reductions")
    if deep:
        along, across = deep[0]
    else:
        # By elements, not bytes: `supports` plans with other dtypes, and its answer must hold here.
        counted = [access._replace(bytes=access.bytes / access.itemsize) for access in accesses]
        order = _memory_order(nest, sorted(counted, key=lambda access: -access.bytes), one | two)
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


def _with_wide(plan: KernelPlan, nest: Nest, accesses: list[_Access]) -> KernelPlan:
    # One block of margin: positions in a masked tail lie behind the end and must not wrap around.
    wide = {dim for dim in plan.dims if not isinstance(dim.size, int) or dim.size >= _INT32 - dim.block}
    for index, *_ in accesses:
        reach = {dim: _reach(nest, index, dim) for dim in plan.dims}
        narrow = sorted((dim for dim in plan.dims if dim not in wide), key=lambda dim: -reach[dim])
        # An offset is a sum over dimensions: the longest become 64 bits until the others fit into 32.
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
        reach += abs(stride) * (size - 1)
    return reach
