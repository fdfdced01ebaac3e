"""How the elements of a tile lie in threads: Triton gives a thread what one load brings of a row at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.held import neighbours
from weft.inductor.codegen.plan import Plan
from weft.inductor.ir import Load, Value


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
    found = [neighbours(load.index, dim.axes[-1], dtypes[load.buffer].itemsize) for load in loads]
    beside = max(found, default=1)
    threads = 32 * plan.num_warps
    times, rest = divmod(dim.block, threads * beside)
    return Spread(times, threads, beside) if rest == 0 else None
