"""How the elements of a tile lie in threads: Triton gives a thread what one load brings of a row at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.plan import Dim, Plan
from weft.inductor.ir import Load, Value

_LOAD = 16  # bytes that a thread loads at once, at most


class Spread(NamedTuple):
    """The shape in which a tile of one dimension has all elements of a thread along the first and the last axis."""

    times: int
    threads: int
    neighbours: int


def spread(plan: Plan, values: Iterable[Value], dtypes: Mapping[str, torch.dtype]) -> Spread | None:
    """How a loop's tile lies in threads, where ``values`` are computed of it; None where it has other dimensions too,
    or no element for some thread.

    Args:
        dtypes: of the buffers.
    """
    dim = plan.loop
    if dim is None or plan.tile != (dim,):
        return None
    loads = [value for value in values if isinstance(value, Load) and not is_position(value)]
    neighbours = max((_neighbours(load, dim, dtypes[load.buffer].itemsize) for load in loads), default=1)
    threads = 32 * plan.num_warps
    times, rest = divmod(dim.block, threads * neighbours)
    return Spread(times, threads, neighbours) if rest == 0 else None


def _neighbours(load: Load, dim: Dim, itemsize: int) -> int:
    """How many elements along a dimension one load brings: they have to be side by side, and aligned in every row."""
    index = load.index
    if index.stride(dim.axes[-1]) != 1 or index.picks:
        return 1
    steps = [index.offset, *(stride for _, stride in index.strides if stride != 1)]
    return math.gcd(_LOAD // itemsize, *(step if isinstance(step, int) else 1 for step in steps))
