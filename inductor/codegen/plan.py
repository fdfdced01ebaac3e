"""How a nest is laid over programs, threads and loops.

The axes of a nest are put into *dimensions* of the kernel. Each is walked in one of three ways: across the grid (a
program takes one block of it), in a loop inside the program, or whole (one block holds all of it). Four shapes come
of that:

=========  ===========================  =====================================================================
shape      dimensions                   for
=========  ===========================  =====================================================================
pointwise  x by grid                    no reduction; two grid dimensions where memory is contiguous along
                                        one axis for some tensors and along another for others (transposes)
row        x by grid, r whole or loop   reductions along the axis that is contiguous in memory
column     r whole or loop, x by grid   reductions along other axes; x is contiguous
mixed      p by grid, n loop, c whole   row reductions and column reductions in one pass (the backward of norms)
=========  ===========================  =====================================================================

Dimensions whose block is 1 are scalars in the kernel; the others, in order, are the dimensions of its tiles. Block
sizes come from how much a thread should hold (16 bytes a load, 32 to 64 bytes a tensor) and from how many
multiprocessors want work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from weft.errors import UnsupportedNest
from weft.inductor.axes import magnitude
from weft.inductor.codegen.canonical import is_position
from weft.inductor.ir import Index, Int, Load, Nest, Reduce, Value, ordered
from weft.inductor.ops import REDUCTIONS
from weft.inductor.runtime.kernel_source import registers_alone

MULTIPROCESSORS = 132
LONGEST_ROW = 16384  # elements of a row that one program keeps in registers
LOOP_TILE = 4096  # elements of a tile that is walked along in a loop
CACHE = 36 << 20  # bytes of the second-level cache that hold what is read again; an H100 has 50 MiB, an H200 60
_REGISTERS = 49152  # elements that a program can keep at once, over all its values
_AHEAD = 192 * 1024  # bytes of a multiprocessor's memory for loads in flight; the rest is its first-level cache
_CROWD = 32  # warps of a multiprocessor that sums of columns as they are computed leave registers for
_MOVED = 192  # bytes that a thread loads and stores, at most, where it has 16 elements
_STREAMED = 1024, 512  # columns of a program that computes, stores and sums them, whichever divides a row
_INT32 = 2**31
_THREADS = 32  # of a warp

Walk = Literal["grid", "loop", "whole"]


@dataclass(frozen=True)
class Dim:
    """Axes that are walked together, as one flat index.

    Attributes:
        name: of the index in the kernel.
        axes: of the nest, outermost first.
        size: product of their sizes.
        block: how many elements of it a tile has; 1 makes it a scalar.
        wide: whether offsets along it need 64 bits.
    """

    name: str
    axes: tuple[int, ...]
    size: Int
    walk: Walk
    block: int
    wide: bool = False

    @property
    def masked(self) -> bool:
        """Whether blocks may reach over the end."""
        return self.block > 1 and not (isinstance(self.size, int) and self.size % self.block == 0 and self.size)

    @property
    def block_name(self) -> str:
        return f"{self.name.upper()}BLOCK"


@dataclass(frozen=True)
class Plan:
    """The dimensions of a kernel, in the order of its tiles (contiguous memory last), and how it is launched.

    Attributes:
        stages: how many iterations of its loop have loads in flight; these wait in shared memory.
        ahead: bytes of shared memory for them.
        rereads: whether tiles that are the same in every iteration are loaded in each, from a cache, as registers
            cannot hold them as well.
        segmented: whether rows are loaded again behind each of their reductions (:mod:`.segments`), as registers hold
            little more than the sums of columns.
        held: how many blocks of a loop stay in registers from its first walk to its last (:mod:`.held`).
    """

    shape: str
    dims: tuple[Dim, ...]
    num_warps: int
    stages: int = 1
    ahead: int = 0
    rereads: bool = False
    segmented: bool = False
    held: int = 0

    @property
    def registers(self) -> int | None:
        """How many a thread may have, where a program has a multiprocessor for itself: it fills it, or there are no
        more programs than multiprocessors. By itself the assembler would spill to make room for others."""
        programs = product(-(-dim.size // dim.block) for dim in self.grid)
        alone = isinstance(programs, int) and programs <= MULTIPROCESSORS
        if not (self.segmented or (self.shape == "mixed" and alone)):
            return None
        return registers_alone(self.num_warps)

    @property
    def tile(self) -> tuple[Dim, ...]:
        return tuple(dim for dim in self.dims if dim.block > 1)

    @property
    def grid(self) -> tuple[Dim, ...]:
        """Dimensions across the grid, fastest first."""
        return tuple(dim for dim in reversed(self.dims) if dim.walk == "grid")

    @property
    def loop(self) -> Dim | None:
        return next((dim for dim in self.dims if dim.walk == "loop"), None)

    def dim_of(self, axis: int) -> Dim:
        return next(dim for dim in self.dims if axis in dim.axes)

    def dims_of(self, axes: frozenset[int]) -> frozenset[Dim]:
        return frozenset(dim for dim in self.dims if not axes.isdisjoint(dim.axes))


def product(sizes: Iterable[Int]) -> Int:
    """The product of sizes and strides."""
    return math.prod(sizes)  # type: ignore[no-matching-overload]


class _Access(NamedTuple):
    index: Index
    bytes: float
    itemsize: int
    loaded: bool


def plan(nest: Nest, dtypes: Mapping[str, torch.dtype]) -> Plan:
    """Decide the shape of a nest's kernel.

    Raises:
        UnsupportedNest: its reductions do not go together in one kernel.
    """
    accesses = _accesses(nest, dtypes)
    shape = _shape(nest, accesses)
    return _with_wide(shape, nest, accesses)


def _shape(nest: Nest, accesses: list[_Access]) -> Plan:
    overs = {frozenset(reduce.over) for reduce in nest.reduces}
    everything = frozenset(range(len(nest.sizes)))
    if not overs:
        return _pointwise(nest, accesses)
    if len(overs) == 1:
        over = next(iter(overs))
        order = _inside_last(nest, accesses, everything)
        if order and order[-1] in over:
            return _row(nest, accesses, over)
        return _column(nest, accesses, over)
    return _mixed(nest, accesses, overs)


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
    return math.prod(magnitude(nest.sizes[axis]) for axis in axes)


def _contiguous(nest: Nest, index: Index) -> int | None:
    """The axis along which neighbours are neighbours in memory."""
    axes = [axis for axis, stride in index.strides if stride == 1 and nest.sizes[axis] != 1]
    return max(axes, key=lambda axis: magnitude(nest.sizes[axis]), default=None)


def _inside_last(nest: Nest, accesses: list[_Access], axes: frozenset[int]) -> list[int]:
    """``axes`` in the order in which most bytes are walked through, innermost last."""

    def compare(a: int, b: int) -> int:
        for index, *_ in accesses:
            one, two = magnitude(index.stride(a)), magnitude(index.stride(b))
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


def _dim(nest: Nest, name: str, axes: Sequence[int], walk: Walk, block: int) -> Dim:
    return Dim(name, tuple(axes), product(nest.sizes[axis] for axis in axes), walk, block)


def _power(n: float) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, math.ceil(n) - 1).bit_length()


def _whole(length: int) -> int:
    """The block that holds all of a dimension, an empty one too."""
    return max(2, _power(length))


def _fitting(block: int, size: Int) -> int:
    """``block``, or less where the dimension is shorter."""
    return min(block, _power(size)) if isinstance(size, int) else block


# ---- the shapes


def _pointwise(nest: Nest, accesses: list[_Access]) -> Plan:
    order = _inside_last(nest, accesses, frozenset(range(len(nest.sizes))))
    rival = _transposed(nest, accesses, order[-1]) if order else None
    if rival is not None:
        return _two_dimensional(nest, accesses, order, rival)
    if not order:
        return Plan("pointwise", (), 1)
    total = _count(nest, order)
    block = min(1024, max(128, _power(total / (2 * MULTIPROCESSORS))))
    dim = _dim(nest, "x", order, "grid", block)
    return Plan("pointwise", (dim,), max(1, block // _elements_of_thread(accesses) // _THREADS))


def _elements_of_thread(accesses: list[_Access]) -> int:
    """16, or 8 where what is loaded and stored for 16 would take most registers of a thread. Measured on an H200, rope
    (256 bytes for 16) takes 86.8 us with 16 and 85.8 with 8; SwiGLU's backward (160 bytes) reaches a copy's rate."""
    moved = sum(access.itemsize for access in accesses if access.index.axes)
    return 16 if 16 * moved <= _MOVED else 8


def _transposed(nest: Nest, accesses: list[_Access], inner: int) -> int | None:
    """Another axis that much memory is contiguous along, while it is strided along ``inner``."""
    votes: dict[int, float] = {}
    for index, weight, *_ in accesses:
        axis = _contiguous(nest, index)
        if axis is not None and axis != inner and index.stride(inner) not in (0, 1):
            votes[axis] = votes.get(axis, 0.0) + weight
    rival = max(votes, key=lambda axis: (votes[axis], axis), default=None)
    if rival is None or votes[rival] * 16 < sum(access.bytes for access in accesses):
        return None
    small = min(magnitude(nest.sizes[rival]), magnitude(nest.sizes[inner]))
    return rival if small >= 8 else None


def _two_dimensional(nest: Nest, accesses: list[_Access], order: list[int], rival: int) -> Plan:
    inner = order[-1]
    rest = [axis for axis in order if axis not in (rival, inner)]
    widest = max(access.itemsize for access in accesses)
    x = _fitting(64, nest.sizes[inner])
    y = _fitting(max(2048 if widest > 2 else 4096, 64 * x) // x // (2 if widest > 2 else 1), nest.sizes[rival])
    dims = [_dim(nest, "y", [rival], "grid", y), _dim(nest, "x", [inner], "grid", x)]
    if rest:
        dims.insert(0, _dim(nest, "z", rest, "grid", 1))
    return Plan("pointwise", tuple(dims), 8 if x * y >= 4096 else 4)


def _row(nest: Nest, accesses: list[_Access], over: frozenset[int]) -> Plan:
    outer = _inside_last(nest, accesses, frozenset(range(len(nest.sizes))) - over)
    inner = _inside_last(nest, accesses, over)
    length = product(nest.sizes[axis] for axis in inner)
    rows = _count(nest, outer)
    if isinstance(length, int) and _fits(nest, over, length):
        r = _whole(length)
        x = min(_power(rows / (2 * MULTIPROCESSORS)), 1024 // r) if outer and r < 512 else 1
        dims = (_dim(nest, "x", outer, "grid", x), _dim(nest, "r", inner, "whole", r))
        return Plan("row", _present(dims), _warps(x * r))
    warps, tile = _walk_of_long_row(nest, accesses, over, rows)
    dims = (_dim(nest, "x", outer, "grid", 1), _dim(nest, "r", inner, "loop", _fitting(tile, length)))
    return Plan("row", _present(dims), warps)


def _walk_of_long_row(nest: Nest, accesses: list[_Access], over: frozenset[int], rows: float) -> tuple[int, int]:
    """How many warps walk along a row in a loop, and how many elements at once.

    Where the row is read a second time, larger programs: fewer are under way at once, and their rows still have to be
    in the second-level cache. Where four programs a multiprocessor read too much for that, or no multiprocessor has
    two, a program is as large as can be and has as much in flight (cross-entropy of 8192 rows of 128256 on an H200:
    1275 us with one program of 32 warps, 1417 with two, 1488 to 1560 with two to four of 16 warps). In between, the
    last round of such programs would leave too many multiprocessors idle.
    """
    depth = depths(nest, over)
    if not any(depth[store.value] and not store.axes.isdisjoint(over) for store in nest.stores):
        return 8, LOOP_TILE
    loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(over)]
    waiting = sum(access.bytes for access in loads if access.index.axes - over) / max(1.0, rows)
    crowd = 4 * MULTIPROCESSORS
    alone = rows <= MULTIPROCESSORS or (rows >= crowd and crowd * waiting > CACHE)
    # Words that a thread has for each element: 64 registers are all that 32 warps leave it. The results of a softmax
    # are one a thread.
    kinds = [reduce.kind for reduce in nest.reduces if not over.isdisjoint(reduce.over)]
    words = 0.0 if "max" in kinds else sum(REDUCTIONS[kind].results for kind in kinds)
    words += sum(access.itemsize for access in loads) / 4
    return (32, LOOP_TILE * (4 if words <= 2 else 2)) if alone and words <= 4 else (16, LOOP_TILE)


def _fits(nest: Nest, over: frozenset[int], length: int) -> bool:
    """Whether a row stays in registers from its first load to its last store."""
    return length <= LONGEST_ROW and _power(length) * max(2, _kept(nest, over)) <= _REGISTERS


def _kept(nest: Nest, over: frozenset[int], shared: frozenset[Value] = frozenset()) -> int:
    """How many values of every position of a row stay in registers across a reduction of the row, at the worst of
    them: those that were computed and are used again, or the loads that they are computed from, whichever is less.

    What is loaded for uses behind a reduction only is loaded there. ``shared`` are loads that are at hand anyway.
    """
    depth = depths(nest, over)
    uses: dict[Value, list[int]] = {}
    for user in nest.values():
        when = depth[user] - (isinstance(user, Reduce) and not over.isdisjoint(user.over))
        for operand in user.operands():
            uses.setdefault(operand, []).append(when)
    for store in nest.stores:
        for value in store.values():
            uses.setdefault(value, []).append(depth[store.value])
    wide = [v for v in uses if not v.axes.isdisjoint(over) and not is_position(v)]
    first = {v: min(uses[v]) if isinstance(v, Load) else depth[v] for v in wide}
    most = 0
    for barrier in range(1, max(depth.values()) + 1):
        crossing = [v for v in wide if first[v] < barrier <= max(uses[v])]
        loads = {v for v in ordered(crossing) if isinstance(v, Load) and v in first and first[v] < barrier} - shared
        most = max(most, min(len(crossing), len(loads)))
    return most


def depths(nest: Nest, over: frozenset[int]) -> dict[Value, int]:
    """How many reductions along ``over`` lie one behind the other up to each value, itself included."""
    depth: dict[Value, int] = {}
    for value in nest.values():
        below = max((depth[operand] for operand in value.operands()), default=0)
        depth[value] = below + (isinstance(value, Reduce) and not over.isdisjoint(value.over))
    return depth


def _warps(elements: int) -> int:
    if elements <= 512:
        return 1 if elements <= 256 else 2
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16


def _present(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    return tuple(dim for dim in dims if dim.axes)


def _column(nest: Nest, accesses: list[_Access], over: frozenset[int]) -> Plan:
    outer = _inside_last(nest, accesses, frozenset(range(len(nest.sizes))) - over)
    inner = _inside_last(nest, accesses, over)
    length = product(nest.sizes[axis] for axis in inner)
    columns = _count(nest, outer)
    x = min(64, max(16, _power(columns / (2 * MULTIPROCESSORS)))) if outer else 1
    x = _fitting(x, product(nest.sizes[axis] for axis in outer))
    if streamed := _streamed(nest, over, outer):
        dims = (_dim(nest, "r", inner, "loop", 2), _dim(nest, "x", outer, "grid", streamed))
        loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(over)]
        ahead, warps = sum(2 * streamed * load.itemsize for load in loads), streamed // 256
        # What is one number a row would be copied once for each column.
        wide = all(outer[-1] in load.index.axes for load in loads)
        stages = 2 if wide and _CROWD // warps * ahead <= _AHEAD else 1
        return Plan("column", _present(dims), warps, stages, (stages - 1) * ahead)
    kept = max(1, _kept(nest, over))
    if isinstance(length, int) and _power(length) * x * kept <= 2 * LOOP_TILE:
        r = _whole(length)
        dims = (_dim(nest, "r", inner, "whole", r), _dim(nest, "x", outer, "grid", x))
        return Plan("column", _present(dims), _warps_of_columns(nest, over, r, x))
    # Welford's combination is long: the fewer elements a thread has, the more warps hide it.
    welford = any(reduce.kind == "welford" for reduce in nest.reduces)
    r = _fitting(max(1, LOOP_TILE // (4 if welford else 1) // x), length)
    dims = (_dim(nest, "r", inner, "loop", r), _dim(nest, "x", outer, "grid", x))
    return Plan("column", _present(dims), 16 if welford else _warps(r * x))


def _streamed(nest: Nest, over: frozenset[int], outer: Sequence[int]) -> int:
    """How many columns a program has where they are summed as they go by, computed and stored, and their rows are long;
    else 0. It does two rows at a time, long pieces of them, and a sum goes from thread to thread once. Measured on an
    H200 in the backward of a bias and GELU, 256 parts of 32 rows of 8192: 110 us with 1024, 119 with 512, and 123 with
    tiles of 32 x 64; with rows of 2048 to 16384 and less to compute it is as fast as any. In a later run 118 us, and
    103 with the loads of the next two rows in flight, as with those of the next four."""
    depth = depths(nest, over)
    stored = [depth[store.value] for store in nest.stores if not store.axes.isdisjoint(over)]
    width = nest.sizes[outer[-1]] if outer else 1
    if not stored or any(stored) or not isinstance(width, int):
        return 0
    return next((columns for columns in _STREAMED if width % columns == 0), 0)


def _warps_of_columns(nest: Nest, over: frozenset[int], rows: int, columns: int) -> int:
    """Warps for a tile that is only summed are few, so that a sum stays in its thread; those of a tile that is computed
    and stored have a vector or two in each thread, and more threads than columns: where a thread could sum a column by
    itself, Triton 3.6 computes everything again in that layout."""
    stored = any(not store.axes.isdisjoint(over) for store in nest.stores)
    loads = sum(not load.axes.isdisjoint(over) and not is_position(load) for load in nest.reads)
    tile = rows * columns
    warps = max(1, tile // (512 if stored else 2048 // max(1, loads)))
    if stored:
        warps = max(warps, min(2 * columns // _THREADS, tile // 256))
    return min(16, 1 << (warps.bit_length() - 1))


def _mixed(nest: Nest, accesses: list[_Access], overs: set[frozenset[int]]) -> Plan:
    along, across = _row_and_column(nest, accesses, overs)
    rest = frozenset(range(len(nest.sizes))) - along - across
    length = product(nest.sizes[axis] for axis in along)
    if not isinstance(length, int):
        raise UnsupportedNest("rows of a length that is not known when the step is compiled, reduced along both ways")
    c = _whole(length)
    sums, kept, shared = _resident(nest, along, across)
    resident = max(2, kept + sums)
    segmented = c * resident > _REGISTERS
    if length > LONGEST_ROW or (segmented and c * (sums + 1) > _REGISTERS):
        raise UnsupportedNest(f"rows of {length} elements, reduced along both ways, do not fit into registers")
    rows = product(nest.sizes[axis] for axis in across)
    n = _fitting(max(1, LOOP_TILE // c), rows)
    dims = (
        _dim(nest, "p", _inside_last(nest, accesses, rest), "grid", 1),
        _dim(nest, "n", _inside_last(nest, accesses, across), "loop", n),
        _dim(nest, "c", _inside_last(nest, accesses, along), "whole", c),
    )
    # Its sums of columns fill the registers of a thread sooner than a row alone does: 256 are all there are.
    held = n * c * (resident + shared + 2) // _THREADS
    warps = 16 if n * c > LOOP_TILE else next((few for few in (4, 8) if held <= 240 * few), 16)
    rereads = c * (resident + shared) > _REGISTERS
    loads = [access for access in accesses if access.loaded and not access.index.axes.isdisjoint(along)]
    tile = sum(c * load.itemsize * (rereads if load.index.axes.isdisjoint(across) else n) for load in loads)
    fitting = _REGISTERS // (n * c * (resident + shared))
    beside = max(1, min(fitting, math.ceil(_count(nest, rest) / MULTIPROCESSORS)))
    # Loads in flight go past the first-level cache, where the row is to be found again.
    stages = 1 if segmented else _stages(tile, _AHEAD // beside)
    return Plan("mixed", _present(dims), warps, stages, (stages - 1) * tile, rereads, segmented)


def _resident(nest: Nest, along: frozenset[int], across: frozenset[int]) -> tuple[int, int, int]:
    """How many elements of every position of a row a program holds while it walks over rows: the sums of columns, what
    a row needs twice, and what all rows share."""
    shared = frozenset(v for v in nest.reads if v.axes >= along and v.axes.isdisjoint(across) and not is_position(v))
    sums = {v for v in nest.reduces if not across.isdisjoint(v.over) and not v.axes.isdisjoint(along)}
    return len(sums), _kept(nest, along, shared), len(shared)


def _stages(tile: int, room: int) -> int:
    """How far the loop over rows may load ahead: a row goes through few instructions between its load and its sums,
    so that without loads in flight a program would mostly wait.

    With three stages a tile is in flight while another is computed. With two, Triton waits for each at once, and gains
    only that its loads are in flight together. Measured on an H200, rows of 8192 bfloat16, one program on each
    multiprocessor: RMSNorm's backward takes 137 us with three stages, 171 with two; LayerNorm's 145 and 194.

    Args:
        tile: bytes that an iteration loads.
        room: bytes of shared memory for them; a stage is computed in registers, the others are there.
    """
    return 3 if 2 * tile <= room else 2 if tile <= room else 1


def _row_and_column(
    nest: Nest, accesses: list[_Access], overs: set[frozenset[int]]
) -> tuple[frozenset[int], frozenset[int]]:
    """The axes of the rows, and those that the loop over rows walks along."""
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
        counted = [access._replace(bytes=access.bytes / access.itemsize) for access in accesses]
        order = _inside_last(nest, sorted(counted, key=lambda access: -access.bytes), one | two)
        along, across = (one, two) if order[-1] in one else (two, one)
    depth = depths(nest, across)
    if any(depth[value] and not value.axes.isdisjoint(across) for value in nest.values()):
        raise UnsupportedNest("a value of every row that needs a column's sum first")
    return along, across


def _feeds(nest: Nest, first: frozenset[int], second: frozenset[int]) -> bool:
    """Whether a reduction over ``second`` needs one over ``first``."""
    depth = depths(nest, first)
    return any(frozenset(reduce.over) == second and depth[reduce] for reduce in nest.reduces)


# ---- 64 bits where 32 are too few


def _with_wide(plan: Plan, nest: Nest, accesses: list[_Access]) -> Plan:
    wide = {dim for dim in plan.dims if not isinstance(dim.size, int) or dim.size >= _INT32 - dim.block}
    for index, *_ in accesses:
        reach = {dim: _reach(nest, index, dim) for dim in plan.dims}
        narrow = sorted((dim for dim in plan.dims if dim not in wide), key=lambda dim: -reach[dim])
        while narrow and sum(reach[dim] for dim in narrow) + magnitude(index.offset) >= _INT32:
            wide.add(narrow.pop(0))
    dims = tuple(
        Dim(dim.name, dim.axes, dim.size, dim.walk, dim.block, wide=True) if dim in wide else dim for dim in plan.dims
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
