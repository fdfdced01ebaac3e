"""The thread layout of a tile: which elements each thread holds.

Triton's blocked layout gives a thread as many neighbouring elements as its widest load, then the next thread, and
repeats that over the tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.kernel_plan import KernelPlan
from weft.inductor.codegen.register_tiling import vector_width
from weft.inductor.loop_ir.ir import Load, Value


class ThreadLayout(NamedTuple):
    """The shape of a one-dimensional tile with the elements of a thread along the first and the last axis.

    Attributes:
        repeats: vectors of a thread.
        threads: threads of a program.
        vector: elements of a vector.
    """

    repeats: int
    threads: int
    vector: int


def thread_layout(plan: KernelPlan, values: Iterable[Value], dtypes: Mapping[str, torch.dtype]) -> ThreadLayout | None:
    """The layout of a loop's tile in which ``values`` are computed.

    None where the tile has other dimensions too, or has no vector for every thread.

    Args:
        dtypes: of the buffers.
    """
    dim = plan.loop
    # With two dimensions Triton's layout orders threads along both, and elements of a thread are no simple reshape.
    if dim is None or plan.tile != (dim,):
        return None
    loads = [value for value in values if isinstance(value, Load) and not is_position(value)]
    found = [vector_width(load.index, dim.axes[-1], dtypes[load.buffer].itemsize) for load in loads]
    # Values of one tile have one layout, so the widest vector decides for all.
    # A wrong guess would cost moves between threads, not correctness: a reshape keeps the elements of a tile.
    beside = max(found, default=1)
    threads = 32 * plan.num_warps
    repeats, rest = divmod(dim.block, threads * beside)
    return ThreadLayout(repeats, threads, beside) if rest == 0 else None
