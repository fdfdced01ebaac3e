"""How ``weft calibrate`` times collectives: each way in which ranks can carry out each kind, by torch's here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import weft.gloo  # noqa: F401 - all-gathers on the CPU that may be in flight together

_ops = torch.ops._c10d_functional

Wait = Callable[[], object]
Start = Callable[[], Wait]


@dataclass(frozen=True)
class Peers:
    """The ranks that carry out a collective: a process group, its ranks in the world, this rank's device."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True)
class Way:
    """A way to carry out one kind of collective. See :class:`weft.inductor.comm.cluster.Transport` for what is named
    alike.

    Attributes:
        dtype: that it is timed with.
        dtypes: that its figures are meant for.
        prepare: of peers, bytes of the whole tensors and how many tensors these are: a function that starts the
            collective, and returns one that lets the compute stream wait for its end.
        coalesces: whether it takes several tensors.
        symmetric: whether it uses symmetric memory.
    """

    transport: str
    kind: str
    dtype: torch.dtype
    prepare: Callable[[Peers, int, int], Start]
    dtypes: tuple[str, ...] = ()
    sums: str = ""
    crosses: bool = False
    ctas: int = 0
    coalesces: bool = False
    symmetric: bool = False


def torch_ways(backend: str) -> list[Way]:
    """The collectives of torch: those of a step's graph, in place where its program has them in place."""
    nccl = backend == "nccl"
    usual = torch.bfloat16 if nccl else torch.float32

    def way(kind: str, dtype: torch.dtype = usual, dtypes: tuple[str, ...] = ()) -> Way:
        sums = "wire" if kind in ("reduce_scatter", "all_reduce") else ""
        coalesces = nccl and kind in ("all_gather", "reduce_scatter", "all_reduce")
        return Way(backend, kind, dtype, _PREPARE[kind](dtype), dtypes, sums, True, coalesces=coalesces)

    # What sums costs the more computation beside it the smaller the elements are.
    wide = [way("reduce_scatter", torch.float32, ("float32",))] if nccl else []
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv")
    return [*wide, *(way(kind) for kind in kinds)]


# ---- collectives of torch


def _tensors(peers: Peers, dtype: torch.dtype, size: int, members: int, whole: bool) -> list[torch.Tensor]:
    """Tensors of ``size`` bytes altogether, or each rank's part of them."""
    ranks = len(peers.ranks)
    part = max(1, size // (members * ranks * dtype.itemsize))
    elements = part * ranks if whole else part
    return [torch.zeros(elements, dtype=dtype, device=peers.device) for _ in range(members)]


def _waiting(results: torch.Tensor | list[torch.Tensor]) -> Wait:
    listed = [results] if isinstance(results, torch.Tensor) else results
    return lambda: [_ops.wait_tensor(result) for result in listed]


def _gather(dtype: torch.dtype) -> Callable[[Peers, int, int], Start]:
    def prepare(peers: Peers, size: int, members: int) -> Start:
        parts, ranks, name = _tensors(peers, dtype, size, members, False), len(peers.ranks), peers.group.group_name
        if members == 1:
            return lambda: _waiting(_ops.all_gather_into_tensor(parts[0], ranks, name))
        return lambda: _waiting(_ops.all_gather_into_tensor_coalesced(parts, ranks, name))

    return prepare


def _reduce_scatter(dtype: torch.dtype) -> Callable[[Peers, int, int], Start]:
    def prepare(peers: Peers, size: int, members: int) -> Start:
        wholes, ranks, name = _tensors(peers, dtype, size, members, True), len(peers.ranks), peers.group.group_name
        if members == 1:
            return lambda: _waiting(_ops.reduce_scatter_tensor(wholes[0], "sum", ranks, name))
        return lambda: _waiting(_ops.reduce_scatter_tensor_coalesced(wholes, "sum", ranks, name))

    return prepare


def _all_reduce(dtype: torch.dtype) -> Callable[[Peers, int, int], Start]:
    def prepare(peers: Peers, size: int, members: int) -> Start:
        wholes, name = _tensors(peers, dtype, size, members, True), peers.group.group_name
        if members == 1:
            return lambda: _waiting(_ops.all_reduce_(wholes[0], "sum", name))
        return lambda: _waiting(_ops.all_reduce_coalesced_(wholes, "sum", name))

    return prepare


def _broadcast(dtype: torch.dtype) -> Callable[[Peers, int, int], Start]:
    def prepare(peers: Peers, size: int, members: int) -> Start:
        (whole,), name = _tensors(peers, dtype, size, 1, True), peers.group.group_name
        return lambda: _waiting(_ops.broadcast_(whole, 0, name))

    return prepare


def _all_to_all(dtype: torch.dtype) -> Callable[[Peers, int, int], Start]:
    def prepare(peers: Peers, size: int, members: int) -> Start:
        (whole,), name = _tensors(peers, dtype, size, 1, True), peers.group.group_name
        split = [whole.numel() // len(peers.ranks)] * len(peers.ranks)
        return lambda: _waiting(_ops.all_to_all_single(whole, split, split, name))

    return prepare


def _send_recv(dtype: torch.dtype) -> Callable[[Peers, int, int], Start]:
    """Every rank sends to the next one."""

    def prepare(peers: Peers, size: int, members: int) -> Start:
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
