"""Register tiling of long rows: some blocks of a row stay in registers from one pass over it to the next.

A row that one program cannot keep whole is processed in a loop, and each pass after the first reads it again. The
registers of a program that fills a multiprocessor can hold a large part of the row, packed as in memory: two elements
of 16 bits in a register. These blocks are loaded once, before the first pass, and leave the caches to the rest of the
row. The last pass goes over the rest backwards, because what was read last is still in a cache. Meanwhile the blocks
that the next program on the multiprocessor will hold are prefetched into the L2 cache.

Measured on an H200 in cross-entropy and its backward, 8192 rows of 128256 bfloat16: 1280 us without register tiling,
1230 with seven blocks of 8192 elements; with these 1205 where the last pass goes backwards, 1212 with the prefetch for
the next program, and 1190 with both and the element of the label written separately. In chunks of 1024 rows: 1282,
1262, 1247, 1274, 1243. Prefetching all of the next row evicts the current one: 1355. These kernels are bound by
arithmetic as much as by memory: one instruction instead of two for each bfloat16 element that is not in registers took
1180 to 1141.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.kernel_plan import Dim, KernelPlan
from weft.inductor.codegen.live_values import depths
from weft.inductor.codegen.row_tiles import LOOP_TILE
from weft.inductor.loop_ir.ir import Index, Load, Nest, Value
from weft.inductor.loop_ir.ops import REDUCTIONS

LOAD_BYTES = 16  # of the widest load of a thread
REGISTER_BYTES = 4  # of a register of a thread
_BLOCK = 2 * LOOP_TILE  # elements: a load of 16 bytes for each of 1024 threads, where elements have 16 bits
_WARPS = 32  # the largest program: its threads have 64 registers
_TILE_REGISTERS = 28  # of a thread's 64, for resident blocks; a block of one load is computed in the others
_MIN_FRACTION = 4  # less than 1/4 of a row in registers is not worth the smaller blocks


def vector_width(index: Index, axis: int, itemsize: int) -> int:
    """The elements of one vector load along an axis: contiguous, and aligned to its size in every row.

    It divides ``16 / itemsize`` and every other stride and offset; a symbolic stride gives 1.
    """
    if index.stride(axis) != 1 or index.indirect:
        return 1
    # The base pointer is aligned, so alignment in a row is what all offsets have in common; 0 divides everything.
    steps = [index.offset, *(stride for other, stride in index.strides if other != axis)]
    return math.gcd(LOAD_BYTES // itemsize, *(step if isinstance(step, int) else 1 for step in steps))


def plan_register_tiles(plan: KernelPlan, nest: Nest, dtypes: Mapping[str, torch.dtype]) -> KernelPlan:
    """The plan with as many resident blocks as there are registers for; unchanged where they are too few.

    Args:
        nest: its reductions in the form for the plan.
        dtypes: of the buffers.
    """
    dim = plan.loop
    # The plan gives a program 32 warps only where it has a multiprocessor, with all its registers, for itself.
    if plan.shape != "row" or plan.num_warps != _WARPS or dim is None or not isinstance(dim.size, int):
        return plan
    each = _BLOCK // (32 * _WARPS)
    reread = reread_loads(plan, nest, dtypes)
    block = each * sum(dtypes[load.buffer].itemsize for load in reread) // REGISTER_BYTES
    # A softmax has one result a thread, other reductions one for each element of a block.
    kinds = [reduce.kind for reduce in nest.reduces if not frozenset(dim.axes).isdisjoint(reduce.over)]
    gathered = sum(REDUCTIONS[kind].results for kind in kinds if kind != "online_softmax")
    loads = sum(not load.axes.isdisjoint(dim.axes) and not is_position(load) for load in nest.reads)
    # A store of another vector width than the loads moves elements between threads: for a while there are two copies.
    beside = {vector_width(load.index, dim.axes[0], dtypes[load.buffer].itemsize) for load in reread}
    sizes = {store: dtypes[store.buffer].itemsize for store in nest.stores if not store.axes.isdisjoint(dim.axes)}
    moved = sum(size for s, size in sizes.items() if {vector_width(s.index, dim.axes[0], size)} != beside)
    # In registers of a thread: accumulators, further loads of a block, and the second copy of what moves between
    # threads.
    room = _TILE_REGISTERS - each * (gathered + loads - 1) - 2 * each * moved // REGISTER_BYTES
    # Full blocks only: the tail is masked, and a packed word has no mask for half of it.
    resident = min(room // block, dim.size // _BLOCK) if block else 0
    if resident <= 0 or resident * _BLOCK * _MIN_FRACTION < dim.size:
        return plan
    return replace(
        plan,
        dims=tuple(replace(one, block=_BLOCK) if one is dim else one for one in plan.dims),
        resident_blocks=resident,
    )


def reread_loads(plan: KernelPlan, nest: Nest, dtypes: Mapping[str, torch.dtype]) -> list[Load]:
    """The loads of rows that the first pass of the loop and a later one need, and that can stay in registers."""
    dim = plan.loop
    if dim is None or len(dim.axes) > 1 or plan.tile != (dim,):
        return []
    # A chain of reductions is no longer than their number, so the second range covers every later pass.
    first, later = _needed(nest, dim, passes=range(1)), _needed(nest, dim, passes=range(1, len(nest.reduces) + 1))
    reread = [load for load in nest.reads if load in first and load in later and not is_position(load)]
    # What all rows share stays in the caches by itself. A masked element may not be read before its mask is known.
    rows = [load for load in reread if load.mask is None and not (plan.grid and load.axes <= frozenset(dim.axes))]
    return [load for load in rows if _packs_into_registers(load, dim, dtypes[load.buffer].itemsize)]


def block_start(load: Load, dim: Dim, block: int) -> Index:
    """The index of the first element of a block in the buffer of ``load``."""
    outside = [pair for pair in load.index.strides if pair[0] not in dim.axes]
    return Index(outside, load.index.offset + block * dim.block)


def packed_load(start: str, dim: Dim, itemsize: int) -> str:
    """The text of the load of a block as packed 32-bit words, given the address of its first element."""
    return f"load_packed({start}, {dim.block_name} // {REGISTER_BYTES // itemsize}, ALIGNED)"


def _packs_into_registers(load: Load, dim: Dim, itemsize: int) -> bool:
    """Whether the vectors of a load are whole 32-bit words, of two elements or one."""
    if itemsize not in (2, REGISTER_BYTES) or load.index.indirect or load.index.stride(dim.axes[0]) != 1:
        return False
    # A word that begins in the middle of an aligned one would need two loads.
    return vector_width(load.index, dim.axes[0], itemsize) * itemsize >= REGISTER_BYTES


def _needed(nest: Nest, dim: Dim, passes: range) -> set[Value]:
    """The values that some passes of the loop compute inside it.

    Pass ``k`` accumulates the reductions, and does the stores, that depend on a chain of ``k`` reductions.
    """
    looped = frozenset(dim.axes)
    depth = depths(nest, looped)
    # A reduction counts itself in its depth, a store does not.
    along = [reduce for reduce in nest.reduces if not looped.isdisjoint(reduce.over) and depth[reduce] - 1 in passes]
    stack: list[Value] = [arg for reduce in along for arg in reduce.args]
    for store in nest.stores:
        if not store.axes.isdisjoint(looped):
            stack += [value for value in store.values() if depth[store.value] in passes]
    needed: set[Value] = set()
    while stack:
        value = stack.pop()
        if value not in needed and not looped.isdisjoint(value.axes):
            needed.add(value)
            stack += value.operands()
    return needed
