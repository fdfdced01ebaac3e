"""What a nest reads and writes, by bytes, and the order of its axes in memory.

Goes in: a nest and the dtypes of its buffers. Comes out: its accesses (:func:`accesses_by_bytes`), and its axes from
the one with the largest stride to the contiguous one (:func:`axis_order`). Where accesses disagree, those that move
most bytes decide, because a kernel can be contiguous along one axis only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from weft.inductor.codegen.canonical import is_position
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Index, Nest


class Access(NamedTuple):
    """What a nest loads or stores at one index of a buffer.

    Attributes:
        bytes: that move, each element once.
        itemsize: bytes of an element in memory.
        loaded: whether it is loaded; else it is stored only.
    """

    index: Index
    bytes: float
    itemsize: int
    loaded: bool


def accesses_by_bytes(nest: Nest, dtypes: Mapping[str, torch.dtype]) -> list[Access]:
    """Each access once, the one that moves most bytes first; of equals a store first."""
    # Positions occupy no memory.
    loads = [(load.buffer, load.index) for load in nest.reads if not is_position(load)]
    found = []
    # Several loads of one element are one access: the second finds it in a register or the cache. `sorted` is stable,
    # which keeps stores first among equals.
    for buffer, index in dict.fromkeys([*((store.buffer, store.index) for store in nest.stores), *loads]):
        itemsize = dtypes[buffer].itemsize
        found.append(Access(index, itemsize * point_count(nest, index.axes), itemsize, (buffer, index) in loads))
    return sorted(found, key=lambda access: -access.bytes)


def point_count(nest: Nest, axes: frozenset[int] | Sequence[int]) -> float:
    """About how many points a nest has along ``axes``."""
    # Hints: for symbolic sizes a plan cannot wait for numbers.
    return math.prod(size_hint(nest.sizes[axis]) for axis in axes)


def contiguous_axis(nest: Nest, index: Index) -> int | None:
    """The axis along which neighbours are adjacent in memory."""
    axes = [axis for axis, stride in index.strides if stride == 1 and nest.sizes[axis] != 1]
    # Overlapping windows (i + j) have stride 1 along two axes.
    return max(axes, key=lambda axis: size_hint(nest.sizes[axis]), default=None)


def axis_order(nest: Nest, accesses: list[Access], axes: frozenset[int]) -> list[int]:
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

    # Accesses may disagree in a cycle of three axes; any order is then correct, and this one is the same on every
    # rank.
    order = sorted(axes, key=functools.cmp_to_key(compare))
    # By bytes, not by accesses: one large transposed operand outweighs several small ones.
    votes: dict[int, float] = {}
    for index, weight, *_ in accesses:
        inner = contiguous_axis(nest, index)
        if inner in axes:
            votes[inner] = votes.get(inner, 0.0) + weight
    if votes:
        inner = max(votes, key=lambda axis: (votes[axis], axis))
        order.remove(inner)
        order.append(inner)
    return order


def transposed_axis(nest: Nest, accesses: list[Access], inner: int) -> int | None:
    """Another axis that much memory is contiguous along, while it is strided along ``inner``."""
    votes: dict[int, float] = {}
    for index, weight, *_ in accesses:
        axis = contiguous_axis(nest, index)
        # A stride of 0 along `inner` is a broadcast: no traffic along it, so nothing to gain from a tile.
        if axis is not None and axis != inner and index.stride(inner) not in (0, 1):
            votes[axis] = votes.get(axis, 0.0) + weight
    rival = max(votes, key=lambda axis: (votes[axis], axis), default=None)
    # For less of the traffic than that, strided access costs less than a transpose through shared memory.
    if rival is None or votes[rival] * 16 < sum(access.bytes for access in accesses):
        return None
    # 8 float32 elements are one 32-byte sector: along shorter axes a tile gains little.
    small = min(size_hint(nest.sizes[rival]), size_hint(nest.sizes[inner]))
    return rival if small >= 8 else None
