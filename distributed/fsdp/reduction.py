"""How gradients are summed over ranks: operation, dtype and divisions, as torch's FSDP2 chooses them.

The order is: cast to the reduce dtype, divide before, reduce-scatter over the shard axis, all-reduce over the
replicate axis, the user's hook, divide after, cast to the parameter's dtype. Equal operations in an equal
order give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.distributed.fsdp.mesh import Axis, DataParallelMesh


@dataclass
class ReduceOptions:
    """What the setters of a wrapped module say about its gradients.

    Args:
        reduce: False adds gradients up locally instead.
        all_reduce: False leaves sums over the shard axis waiting for a later all-reduce (HSDP).
        divide_factor: divide by this instead of the number of ranks.
        force_sum: only sums on the wire, with a division of its own after.
        reduce_unused: reduce zeros for parameters that got no gradient.
        all_reduce_hook: called with each reduced shard (in the reduce dtype), which it may change in place.
    """

    reduce: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    force_sum: bool = False
    reduce_unused: bool = False
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True)
class Division:
    """Where the division by the number of ranks happens.

    Args:
        multiply: factor before any collective, 1 for none.
        divide_before, divide_after: divisors around the collectives, 1 for none.
        scatter, all_reduce: reductions of the two collectives, "avg" or "sum".
    """

    scatter: str
    all_reduce: str
    multiply: float = 1.0
    divide_before: float = 1.0
    divide_after: float = 1.0


def choose_division(mesh: DataParallelMesh, dtype: torch.dtype, options: ReduceOptions) -> Division:
    """float32 and bfloat16 are averaged by the collective itself. float16 (and any other dtype) could
    overflow in the sum, so half of the division, as a power of two, comes before it.
    """
    factor, wide = options.divide_factor, dtype in (torch.float32, torch.bfloat16)
    if wide and not options.force_sum:
        if factor is None:
            return Division("sum", "sum") if mesh.size == 1 else Division("avg", "avg")
        if mesh.shard is not None and factor == mesh.shard.size:
            return Division("avg", "sum")
        return Division("sum", "sum", multiply=1 / factor)
    factor = float(mesh.size) if factor is None else factor
    if wide:
        return Division("sum", "sum", divide_after=factor)
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Division("sum", "sum", divide_before=before, divide_after=factor / before)


def reduce_scatter(tensor: torch.Tensor, op: str, axis: Axis) -> torch.Tensor:
    """(parts * rows, ...) on every rank to this rank's reduced (rows, ...)."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(tensor, op, axis.size, axis.group_name))


def all_reduce(tensor: torch.Tensor, op: str, axis: Axis) -> torch.Tensor:
    """The reduction of every rank's tensor, of the same shape."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, op, axis.group_name))
