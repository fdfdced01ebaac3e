"""Benchmarks of torch's collectives for ``weft calibrate``: one per kind of collective and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
        prepare = _PREPARE[kind](dtype)
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


def _waiting(results: torch.Tensor | list[torch.Tensor]) -> Wait:
    tensors = [results] if isinstance(results, torch.Tensor) else results
    return lambda: [_ops.wait_tensor(result) for result in tensors]


def _gather(dtype: torch.dtype) -> Callable[[BenchmarkGroup, int, int], Start]:
    def prepare(peers: BenchmarkGroup, size: int, members: int) -> Start:
        parts, ranks, name = _tensors(peers, dtype, size, members, False), len(peers.ranks), peers.group.group_name
        if members == 1:
            return lambda: _waiting(_ops.all_gather_into_tensor(parts[0], ranks, name))
        return lambda: _waiting(_ops.all_gather_into_tensor_coalesced(parts, ranks, name))

    return prepare


def _reduce_scatter(dtype: torch.dtype) -> Callable[[BenchmarkGroup, int, int], Start]:
    def prepare(peers: BenchmarkGroup, size: int, members: int) -> Start:
        wholes, ranks, name = _tensors(peers, dtype, size, members, True), len(peers.ranks), peers.group.group_name
        if members == 1:
            return lambda: _waiting(_ops.reduce_scatter_tensor(wholes[0], "sum", ranks, name))
        return lambda: _waiting(_ops.reduce_scatter_tensor_coalesced(wholes, "sum", ranks, name))

    return prepare


def _all_reduce(dtype: torch.dtype) -> Callable[[BenchmarkGroup, int, int], Start]:
    def prepare(peers: BenchmarkGroup, size: int, members: int) -> Start:
        wholes, name = _tensors(peers, dtype, size, members, True), peers.group.group_name
        if members == 1:
            return lambda: _waiting(_ops.all_reduce_(wholes[0], "sum", name))
        return lambda: _waiting(_ops.all_reduce_coalesced_(wholes, "sum", name))

    return prepare


def _broadcast(dtype: torch.dtype) -> Callable[[BenchmarkGroup, int, int], Start]:
    def prepare(peers: BenchmarkGroup, size: int, members: int) -> Start:
        (whole,), name = _tensors(peers, dtype, size, 1, True), peers.group.group_name
        return lambda: _waiting(_ops.broadcast_(whole, 0, name))

    return prepare


def _all_to_all(dtype: torch.dtype) -> Callable[[BenchmarkGroup, int, int], Start]:
    def prepare(peers: BenchmarkGroup, size: int, members: int) -> Start:
        (whole,), name = _tensors(peers, dtype, size, 1, True), peers.group.group_name
        split = [whole.numel() // len(peers.ranks)] * len(peers.ranks)
        return lambda: _waiting(_ops.all_to_all_single(whole, split, split, name))

    return prepare


def _send_recv(dtype: torch.dtype) -> Callable[[BenchmarkGroup, int, int], Start]:
    """Every rank sends to the next one."""

    def prepare(peers: BenchmarkGroup, size: int, members: int) -> Start:
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

    return prepare


_PREPARE = {
    "all_gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
