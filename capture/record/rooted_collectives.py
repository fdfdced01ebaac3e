"""Collectives with a root, and batches of sends and receives, as collectives in which all ranks do the same.

- ``reduce`` is an all-reduce. Only the root's tensor takes the result; with NCCL, eager leaves that of other ranks as
  it is too. A sum over more than two ranks may be added in another order than in eager.
- ``gather`` and ``scatter`` are an all-to-all with split sizes: all ranks send to the root, or the root sends to all.
- ``batch_isend_irecv`` is an all-to-all in which each rank exchanges with its peers. In eager, ranks without an
  operation need not call it. In a captured step all ranks of the group do: the comparison of the captures names those
  that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft import thread_patches, torch_adapter
from weft.capture.record.collective_call import CollectiveCall, data_of, into, into_pieces
from weft.capture.record.collective_work import CapturedWork, WorkInBatch

Tensor = torch.Tensor


def reduce(tensor: Tensor, dst: int | None, op: Any, group: Any, group_dst: int | None) -> CollectiveCall:
    """The call for ``torch.distributed.reduce``."""
    call = CollectiveCall("reduce", group)
    root = call.root(dst, group_dst, "dst")
    data = data_of(tensor, call, op)
    call.name, call.inputs, call.reduction, call.outputs = "all_reduce", [data], call.reduction_name(op), [tensor]
    # Other ranks take nothing. Where the root only logs its result, all ranks have one graph, and so one schedule.
    call.write = into([data]) if call.group.rank() == root else lambda results: None
    return call


def gather(
    tensor: Tensor, gather_list: list[Tensor] | None, dst: int | None, group: Any, group_dst: int | None
) -> CollectiveCall:
    """The call for ``torch.distributed.gather``."""
    call = CollectiveCall("gather", group)
    root = call.root(dst, group_dst, "dst", default=0)
    outputs = _of_root(call, root, gather_list, tensor, "gather_list", "dst")
    size = data_of(tensor).numel()
    received = [size if outputs else 0] * call.size
    return _exchange(call, [data_of(tensor)], _only(call, root, size), outputs, received)


def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None, src: int | None, group: Any, group_src: int | None
) -> CollectiveCall:
    """The call for ``torch.distributed.scatter``."""
    call = CollectiveCall("scatter", group)
    root = call.root(src, group_src, "src", default=0)
    inputs = _of_root(call, root, scatter_list, tensor, "scatter_list", "src")
    size = data_of(tensor).numel()
    sent = [size if inputs else 0] * call.size
    return _exchange(call, map(data_of, inputs), sent, [tensor], _only(call, root, size))


def batch(operations: Sequence[dist.P2POp], launch: Callable[[CollectiveCall], CapturedWork]) -> list[CapturedWork]:
    """The works of ``torch.distributed.batch_isend_irecv``, as many as eager's: one for all where the backend
    coalesces them, else one for each.

    There is one call for each dtype, in an order that all ranks share. The work of an operation waits for its call.
    """
    group = operations[0].group if operations else None
    call = CollectiveCall("batch_isend_irecv", group)
    call.require(bool(operations), "it has no operations")
    by_dtype: dict[str, list[dist.P2POp]] = {}
    for operation in operations:
        call.require(isinstance(operation, dist.P2POp), f"a {type(operation).__name__} was given for a P2POp")
        call.require(operation.group == call.group, "its operations are of several groups; make one call for each")
        by_dtype.setdefault(str(operation.tensor.dtype), []).append(operation)
    coalesces = torch_adapter.coalesces(call.group, operations[0].tensor.device)
    works = {
        dtype: launch(_batch_of_one_dtype(by_dtype[dtype], call.group, by_tag=not coalesces))
        for dtype in sorted(by_dtype)
    }
    if coalesces:
        return [WorkInBatch(call.name, list(works.values()), [each.tensor for each in operations])]
    return [WorkInBatch(call.name, [works[str(each.tensor.dtype)]], [each.tensor]) for each in operations]


def _batch_of_one_dtype(operations: Sequence[dist.P2POp], group: dist.ProcessGroup, *, by_tag: bool) -> CollectiveCall:
    call = CollectiveCall("batch_isend_irecv", group)
    send = thread_patches.original(dist.isend)
    # Messages between two ranks are matched by their tags, which NCCL does not know, and in the order in which each of
    # the two issues its operations.
    ordered = sorted(operations, key=lambda each: (each.group_peer, each.tag if by_tag else 0))
    sends = [each for each in ordered if thread_patches.original(each.op) is send]
    receives = [each for each in ordered if thread_patches.original(each.op) is not send]
    outputs = [each.tensor for each in receives]
    like = operations[0].tensor
    inputs = [data_of(each.tensor) for each in sends] or [data_of(like).new_empty(0)]
    return _exchange(call, inputs, _by_peer(call, sends), outputs, _by_peer(call, receives))


def _only(call: CollectiveCall, rank: int, size: Any) -> list[Any]:
    """``size`` elements for one rank of the group, and none for the others."""
    return [size if each == rank else 0 for each in range(call.size)]


def _by_peer(call: CollectiveCall, operations: Iterable[dist.P2POp]) -> list[Any]:
    """How many elements go to, or come from, each rank of the group."""
    sizes: list[Any] = [0] * call.size
    for operation in operations:
        sizes[operation.group_peer] += data_of(operation.tensor).numel()
    return sizes


def _of_root(
    call: CollectiveCall, root: int, given: list[Tensor] | None, like: Tensor, name: str, root_name: str
) -> list[Tensor]:
    """The list that only the root gives: one tensor for each rank, of the size and dtype of ``like``."""
    if call.group.rank() != root:
        call.require(not given, f"{name} is given on a rank that is not {root_name}")
        return []
    given = list(given or ())
    call.require(len(given) == call.size, f"{name} has {len(given)} tensors for {call.size} ranks")
    call.same_dtype(like, *given)
    for each in given:
        call.require(each.numel() == like.numel(), f"the tensors of {name} have other sizes than the rank's own")
    return given


def _exchange(
    call: CollectiveCall, inputs: Iterable[Tensor], sent: list[Any], outputs: list[Tensor], received: list[Any]
) -> CollectiveCall:
    """The call as an all-to-all of ``sent[r]`` elements to rank r and ``received[r]`` elements from it."""
    flat = [each.reshape(-1) for each in inputs]
    call.name, call.inputs = "all_to_all_single", [torch.cat(flat) if flat else data_of(outputs[0]).new_empty(0)]
    call.splits, call.outputs = (received, sent), outputs
    call.write = into_pieces([data_of(each) for each in outputs])
    return call
