"""Collectives on CPU tensors whose waits can be interrupted.

``_c10d_functional`` hands out tensors, and its wait ends only with the collective: where a rank never comes, that is
the timeout of the process group, half an hour. So programs issue collectives over gloo through the process group, which
returns the work to wait for, and wait in :meth:`weft.capture.agreement.lockstep.Lockstep.wait`. The process group runs
the same operation as for ``_c10d_functional``.

What has no counterpart here (coalesced forms, complex numbers, dtypes that travel as bytes, other backends) runs as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft import torch_adapter
from weft.capture.agreement.collective_ring import RingEntry, record
from weft.capture.agreement.lockstep import CollectiveWork, Lockstep, lockstep
from weft.capture.node_kinds import WAIT, group_among, is_collective, is_wait
from weft.gloo import KNOWN_DTYPES
from weft.inductor.graph.collectives import COLLECTIVES, collective_op
from weft.inductor.graph.sizes import tensors_of
from weft.rank_watch import CannotEnd, Point
from weft.torch_adapter import OpOverload

Tensor = torch.Tensor
Node = torch.fx.Node

_ops = torch.ops._c10d_functional
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
# The attribute of an unfinished result that holds its _Unfinished. It goes with the wait.
_UNFINISHED = "_weft_unfinished"


class _Unfinished(NamedTuple):
    """A collective that is under way: its group, its place in the order of all ranks, and what is left to do after. In
    a world of one rank, and outside of the main thread, it has no place."""

    work: CollectiveWork
    group: str
    ranks: Lockstep | None
    point: Point | None
    finish: Callable[[], object] | None
    entry: RingEntry


# What issues a collective returns its result, its work, and what is left to do once that has ended.
_Issued = tuple[Tensor, CollectiveWork, Callable[[], object] | None]


def _all_reduce(group: Any, tensor: Tensor, reduction: str, _: str) -> _Issued:
    return _all_reduce_in_place(group, tensor.clone(memory_format=torch.contiguous_format), reduction, _)


def _all_reduce_in_place(group: Any, tensor: Tensor, reduction: str, _: str) -> _Issued:
    options = dist.AllreduceOptions()
    options.reduceOp = _REDUCTIONS[reduction]
    return tensor, group.allreduce([tensor], options), None


def _all_gather(group: Any, tensor: Tensor, size: int, _: str) -> _Issued:
    whole = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
    # torch 2.13 has a new name for the method of 2.11.
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    return whole, gather(whole, tensor), None


def _reduce_scatter(group: Any, tensor: Tensor, reduction: str, size: int, _: str) -> _Issued:
    # The process group does the same for gloo, which has no such operation, but its work takes no timeout.
    whole, work, _finish = _all_reduce(group, tensor, reduction, _)
    part = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    own = whole.chunk(size)[group.rank()]
    return part, work, lambda: part.copy_(own)


def _all_to_all(group: Any, tensor: Tensor, receives: list[int], sends: list[int], _: str) -> _Issued:
    out = tensor.new_empty((sum(receives), *tensor.shape[1:]))
    return out, group.alltoall_base(out, tensor, receives, sends, dist.AllToAllOptions()), None


def _broadcast(group: Any, tensor: Tensor, source: int, _: str) -> _Issued:
    out = tensor.clone(memory_format=torch.contiguous_format)
    options = dist.BroadcastOptions()
    options.rootRank = source
    return out, group.broadcast([out], options), None


_ISSUE: dict[OpOverload, Callable[..., _Issued]] = {
    _ops.all_reduce.default: _all_reduce,
    _ops.all_reduce_.default: _all_reduce_in_place,
    _ops.all_gather_into_tensor.default: _all_gather,
    _ops.reduce_scatter_tensor.default: _reduce_scatter,
    _ops.all_to_all_single.default: _all_to_all,
    _ops.broadcast.default: _broadcast,
}


def interruptible(nodes: Iterable[Node | None]) -> dict[OpOverload, Callable[..., Any]]:
    """What a program of these nodes calls in place of collectives on CPUs and their waits. All collectives are counted.
    Where a result is read by anything but a wait, which would not see that it is unfinished, all run as before."""
    # A node has as many lines as its statement.
    starts = [node for node in dict.fromkeys(nodes) if node is not None and is_collective(node) and _on_cpu(node)]
    waited = all(is_wait(user) for node in starts if node.target in _ISSUE for user in node.users)
    # A program may call another form of an operation than its graph holds: one that works in place.
    forms = [form for row in COLLECTIVES for form in row.forms] if starts else []
    calls: dict[OpOverload, Callable[..., Any]] = {op: _issuing(op, _ISSUE.get(op) if waited else None) for op in forms}
    return {**calls, WAIT: _wait} if waited and starts else calls


def _on_cpu(start: Node) -> bool:
    return all(each.device.type == "cpu" for each in tensors_of(start))


def _issuing(op: OpOverload, issue: Callable[..., _Issued] | None) -> Callable[..., Any]:
    original = torch_adapter.kernel(op)
    row = collective_op(op)
    assert row is not None

    def record_of(operands: tuple[Any, ...], group: str, point: Point | None) -> RingEntry:
        payload = operands[row.payload]
        parts = payload if isinstance(payload, (list, tuple)) else [payload]
        size = sum(part.numel() * part.element_size() for part in parts)
        call, index = point or (-1, -1)
        return record(op._schema.name.partition("::")[2], group, size, call, index)

    def start(tensor: Any, *how: Any, **named: Any) -> Any:
        ranks = lockstep()
        group = group_among(op, (tensor, *how), named)
        if issue is None or named or not _over_gloo(op, tensor, how, group):
            result = original(tensor, *how, **named)
            if ranks is not None:
                record_of((tensor, *how), group, ranks.issue())
            return result
        try:
            result, work, finish = issue(torch_adapter.process_group(group), tensor, *how)
        except RuntimeError as error:
            if ranks is None:
                raise
            raise CannotEnd(ranks.explain(error, group)) from error
        point = ranks.issue() if ranks is not None else None
        entry = record_of((tensor, *how), group, point)
        setattr(result, _UNFINISHED, _Unfinished(work, group, ranks, point, finish, entry))
        return result

    return start


def _over_gloo(op: OpOverload, tensor: Tensor, how: tuple[Any, ...], group: str) -> bool:
    """Whether gloo carries this collective as it is."""
    if tensor.dtype not in KNOWN_DTYPES or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    row = collective_op(op)
    if row is not None and row.reduction is not None and how[row.reduction - 1] not in _REDUCTIONS:
        return False
    return "cpu:gloo" in dist.get_backend_config(torch_adapter.process_group(group))


def _wait(tensor: Tensor) -> Tensor:
    unfinished = tensor.__dict__.pop(_UNFINISHED, None)
    if unfinished is None:
        return _original_wait(tensor)
    work, group, ranks, point, finish, entry = unfinished
    # Alone, or outside of the main thread, nobody counts calls, and the timeout is that of the group.
    if ranks is None or point is None:
        work.wait()
    else:
        ranks.wait(work, group, point)
    entry.end()
    if finish is not None:
        finish()
    return tensor


_original_wait = torch_adapter.kernel(WAIT)
