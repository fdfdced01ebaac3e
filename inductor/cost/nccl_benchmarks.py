"""Benchmarks of torch's collectives for ``weft calibrate``: one per kind of collective and dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import weft.gloo  # noqa: F401 - all-gathers on the CPU that may be in flight together
from weft.inductor.graph.collectives import COLLECTIVES, KINDS

_ops = torch.ops._c10d_functional

Wait = Callable[[], object]
Start = Callable[[], Wait]


@dataclass(frozen=True)
class BenchmarkGroup:
    """The process group of a benchmark, its global ranks, and this rank's device."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True)
class CollectiveBenchmark:
    """A benchmark of one kind of collective over one transport. All other fields are as in
    :class:`weft.inductor.cost.cluster.TransportModel`.

    Attributes:
        dtype: of the tensors of the benchmark.
        dtypes: names of the dtypes that the results count for.
        prepare: takes the group, the bytes of the unsharded tensors in all, and the number of tensors. Allocates, and
            returns a function that starts the collective; that one returns a function that makes the compute stream
            wait for its end.
        coalesces: whether one call takes several tensors.
        symmetric: whether it uses symmetric memory.
    """

    transport: str
    kind: str
    dtype: torch.dtype
    prepare: Callable[[BenchmarkGroup, int, int], Start]
    dtypes: tuple[str, ...] = ()
    crosses: bool = False
    ctas: int = 0
    coalesces: bool = False
    symmetric: bool = False


def torch_benchmarks(backend: str) -> list[CollectiveBenchmark]:
    """The benchmarks of torch's functional collectives, in place where a compiled step uses the in-place form."""
    nccl = backend == "nccl"
    default_dtype = torch.bfloat16 if nccl else torch.float32

    def benchmark(kind: str, dtype: torch.dtype = default_dtype, dtypes: tuple[str, ...] = ()) -> CollectiveBenchmark:
        coalesces = nccl and any(row.kind.name == kind and row.coalesced is not None for row in COLLECTIVES)
        prepare = functools.partial(_PREPARE[kind], dtype=dtype)
        return CollectiveBenchmark(backend, kind, dtype, prepare, dtypes, crosses=True, coalesces=coalesces)

    # The interference of a reduction grows as elements get smaller, so float32 is measured separately.
    wide = [benchmark("reduce_scatter", torch.float32, ("float32",))] if nccl else []
    return [*wide, *(benchmark(kind) for kind in KINDS if kind in _PREPARE)]


# ---- collectives of torch


def _tensors(peers: BenchmarkGroup, dtype: torch.dtype, size: int, members: int, whole: bool) -> list[torch.Tensor]:
    """``members`` tensors of ``size`` bytes in all, or this rank's shards of them."""
    ranks = len(peers.ranks)
    part = max(1, size // (members * ranks * dtype.itemsize))
    elements = part * ranks if whole else part
    return [torch.zeros(elements, dtype=dtype, device=peers.device) for _ in range(members)]


def _calls(peers: BenchmarkGroup, size: int, members: int, *, of_torch: _OfTorch, dtype: torch.dtype) -> Start:
    tensors = _tensors(peers, dtype, size, members, of_torch.whole)
    arguments = of_torch.arguments(len(peers.ranks), tensors[0].numel())
    op, operand = (of_torch.op, tensors[0]) if members == 1 else (of_torch.coalesced, tensors)

    def start() -> Wait:
        found = op(operand, *arguments, peers.group.group_name)
        return lambda: [_ops.wait_tensor(result) for result in (found if members > 1 else [found])]

    return start


def _send_recv(peers: BenchmarkGroup, size: int, members: int, *, dtype: torch.dtype) -> Start:
    """Every rank sends to the next one."""
    (sent,) = _tensors(peers, dtype, size, 1, True)
    received = torch.empty_like(sent)
    at = peers.ranks.index(dist.get_rank())
    after, before = (peers.ranks[(at + step) % len(peers.ranks)] for step in (1, -1))

    def start() -> Wait:
        send = dist.P2POp(dist.isend, sent, after, peers.group)
        receive = dist.P2POp(dist.irecv, received, before, peers.group)
        works = dist.batch_isend_irecv([send, receive])
        return lambda: [work.wait() for work in works]

    return start


@dataclass(frozen=True)
class _OfTorch:
    """A functional collective of torch.

    Attributes:
        op, coalesced: the operations of one tensor and of several; their last argument is the group.
        whole: whether the operand is the unsharded tensor, not this rank's shard of it.
        arguments: those between operand and group, from the world size and the elements of the operand.
    """

    op: Any
    coalesced: Any
    whole: bool
    arguments: Callable[[int, int], tuple[Any, ...]]


_OF_TORCH = {
    "all_gather": _OfTorch(
        _ops.all_gather_into_tensor, _ops.all_gather_into_tensor_coalesced, False, lambda ranks, _: (ranks,)
    ),
    "reduce_scatter": _OfTorch(
        _ops.reduce_scatter_tensor, _ops.reduce_scatter_tensor_coalesced, True, lambda ranks, _: ("sum", ranks)
    ),
    "all_reduce": _OfTorch(_ops.all_reduce_, _ops.all_reduce_coalesced_, True, lambda *_: ("sum",)),
    "broadcast": _OfTorch(_ops.broadcast_, None, True, lambda *_: (0,)),
    "all_to_all": _OfTorch(_ops.all_to_all_single, None, True, lambda n, count: ([count // n] * n, [count // n] * n)),
}
_PREPARE: dict[str, Callable[..., Start]] = {
    **{kind: functools.partial(_calls, of_torch=of_torch) for kind, of_torch in _OF_TORCH.items()},
    "send_recv": _send_recv,
}
