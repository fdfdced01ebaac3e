"""Blocks of a long row that stay in registers from one walk along it to the next.

A row that one program cannot keep whole is walked along in a loop, and each walk behind the first reads it again. What
a program of a whole multiprocessor has of registers holds much of it, as it lies in memory: two numbers of 16 bits a
register. These blocks are loaded once, all at once, and leave the caches to the rest. Where blocks are held, the last
walk goes over the others backwards, as what was read last lies in a cache still, and meanwhile the second-level cache
is asked for what the next program of the multiprocessor will hold.

Measured on an H200 in cross-entropy and its backward, of 8192 rows of 128256 bfloat16: 1280 us with no block held, 1230
with seven of 8192 elements; with these 1205 where the last walk goes backwards, 1212 where the next program's part is
asked for, and 1190 with both and the label written by itself. In chunks of 1024 rows: 1282, 1262, 1247, 1274, 1243.
Where all of the next row is asked for, it takes the place of this one: 1355. These kernels are as much arithmetic as a
multiprocessor does while their bytes move: 1180 us became 1141 where what is not held is widened by one instruction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.plan import LOOP_TILE, Dim, Plan, depths
from weft.inductor.ir import Index, Load, Nest, Value
from weft.inductor.ops import REDUCTIONS

LOAD = 16  # bytes that a thread loads at once, at most
WORD = 4  # bytes of a register
_BLOCK = 2 * LOOP_TILE  # elements: a load of 16 bytes for each of 1024 threads, where numbers have 16 bits
_WARPS = 32  # the largest program: its threads have 64 registers
_HELD = 28  # registers of a thread for what is held; a block of one load is computed in the others
_SHARE = 4  # less than a quarter of a row is not worth smaller blocks


def neighbours(index: Index, axis: int, itemsize: int) -> int:
    """How many elements along an axis one load brings: they have to be side by side, and aligned in every row."""
    if index.stride(axis) != 1 or index.picks:
        return 1
    steps = [index.offset, *(stride for other, stride in index.strides if other != axis)]
    return math.gcd(LOAD // itemsize, *(step if isinstance(step, int) else 1 for step in steps))


def with_held(plan: Plan, nest: Nest, dtypes: Mapping[str, torch.dtype]) -> Plan:
    """The plan with as many blocks held as registers are left for, and blocks of the size for that.

    Args:
        nest: its reductions in the form for the plan.
        dtypes: of the buffers.
    """
    dim = plan.loop
    if plan.shape != "row" or plan.num_warps != _WARPS or dim is None or not isinstance(dim.size, int):
        return plan
    each = _BLOCK // (32 * _WARPS)
    again = read_again(plan, nest, dtypes)
    block = each * sum(dtypes[load.buffer].itemsize for load in again) // WORD
    # A softmax has one result a thread, other reductions one for each element of a block.
    kinds = [reduce.kind for reduce in nest.reduces if not frozenset(dim.axes).isdisjoint(reduce.over)]
    gathered = sum(REDUCTIONS[kind].results for kind in kinds if kind != "online_softmax")
    loads = sum(not load.axes.isdisjoint(dim.axes) and not is_position(load) for load in nest.reads)
    # What is stored changes threads where fewer of it, or more, lie side by side: there it is twice for a while.
    beside = {neighbours(load.index, dim.axes[0], dtypes[load.buffer].itemsize) for load in again}
    sizes = {store: dtypes[store.buffer].itemsize for store in nest.stores if not store.axes.isdisjoint(dim.axes)}
    moved = sum(size for s, size in sizes.items() if {neighbours(s.index, dim.axes[0], size)} != beside)
    room = _HELD - each * (gathered + loads - 1) - 2 * each * moved // WORD
    held = min(room // block, dim.size // _BLOCK) if block else 0
    if held <= 0 or held * _BLOCK * _SHARE < dim.size:
        return plan
    return replace(plan, dims=tuple(replace(one, block=_BLOCK) if one is dim else one for one in plan.dims), held=held)


def read_again(plan: Plan, nest: Nest, dtypes: Mapping[str, torch.dtype]) -> list[Load]:
    """The loads of rows that the first walk of the loop and a later one both need, of those that can be held."""
    dim = plan.loop
    if dim is None or len(dim.axes) > 1 or plan.tile != (dim,):
        return []
    first, later = _needed(nest, dim, walks=range(1)), _needed(nest, dim, walks=range(1, len(nest.reduces) + 1))
    again = [load for load in nest.reads if load in first and load in later and not is_position(load)]
    # What all rows share is in the caches anyway.
    rows = [load for load in again if load.mask is None and not (plan.grid and load.axes <= frozenset(dim.axes))]
    return [load for load in rows if _in_words(load, dim, dtypes[load.buffer].itemsize)]


def block_start(load: Load, dim: Dim, block: int) -> Index:
    """Where a block of what is loaded starts in its buffer."""
    outside = [pair for pair in load.index.strides if pair[0] not in dim.axes]
    return Index(outside, load.index.offset + block * dim.block)


def words(start: str, dim: Dim, itemsize: int) -> str:
    """The load of a block as words, given the address of its first element."""
    return f"held_words({start}, {dim.block_name} // {WORD // itemsize}, ALIGNED)"


def _in_words(load: Load, dim: Dim, itemsize: int) -> bool:
    """Whether what a load brings of a row are whole words of two numbers or one."""
    if itemsize not in (2, WORD) or load.index.picks or load.index.stride(dim.axes[0]) != 1:
        return False
    return neighbours(load.index, dim.axes[0], itemsize) * itemsize >= WORD


def _needed(nest: Nest, dim: Dim, walks: range) -> set[Value]:
    """What some walks of the loop compute in it. A walk makes the reductions that wait for as many others before them,
    and stores what does."""
    looped = frozenset(dim.axes)
    depth = depths(nest, looped)
    along = [reduce for reduce in nest.reduces if not looped.isdisjoint(reduce.over) and depth[reduce] - 1 in walks]
    stack: list[Value] = [arg for reduce in along for arg in reduce.args]
    for store in nest.stores:
        if not store.axes.isdisjoint(looped):
            stack += [value for value in store.values() if depth[store.value] in walks]
    needed: set[Value] = set()
    while stack:
        value = stack.pop()
        if value not in needed and not looped.isdisjoint(value.axes):
            needed.add(value)
            stack += value.operands()
    return needed
