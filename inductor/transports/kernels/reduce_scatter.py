"""Reduce-scatter by pulling: each rank reads its part of each member from the buffers of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weft.inductor.codegen.triton_text import chunk_loop, indented
from weft.inductor.graph.gpu import HOPPER_MULTIPROCESSORS
from weft.inductor.transports.kernels.peer_kernel import PeerKernel
from weft.inductor.transports.kernels.peer_kernel_text import (
    chunk_lookup,
    peer_names,
    peer_pointers,
    pointer,
    rounded,
    store,
)
from weft.inductor.transports.kernels.reduction import RankReduction


@dataclass(frozen=True, kw_only=True)
class PullReduceScatter(PeerKernel):
    """Combines members of parts of equal sizes, one a rank, in their order.

    ``sizes`` are elements of one part. ``exit_barrier`` keeps a rank from overwriting what a peer still reads;
    without it, something else has to. Columns of :meth:`rows`: addresses of this rank's results, offsets of the members
    in the buffers in bytes. ``programs`` was fitted to 8 H200 with no other kernel running, 512 MB of
    bfloat16 summed in float32: 1,428 us with 64 programs, 1,570 with 32, 2,587 with 16; NCCL takes 2,764 us in float32
    and 1,410 in bfloat16.

    Attributes:
        wire: the type of the members.
        result: the type of this rank's results.
        reduction: how the ranks' values are combined.
        squares: whether each program writes the sum of the squares of its results to one more argument, float32[grid].
    """

    name: ClassVar[str] = "pull_reduce_scatter"
    wire: torch.dtype
    result: torch.dtype
    reduction: RankReduction = field(default_factory=RankReduction)
    squares: bool = False
    programs: int = 64
    block: int = 8192
    warps: int = 16

    @property
    def extra_arguments(self) -> dict[str, str]:
        """The sums of squares, if asked for."""
        return {"squares": "*fp32"} if self.squares else {}

    def _own_columns(self) -> list[list[int]]:
        return [[size * self.wire.itemsize for size in self.sizes]]

    def _lines(self) -> list[str]:
        def pull(mask: str) -> list[str]:
            lines = self.reduction.lines(self.world, self.wire, self._at_a_time(self.wire), mask)
            if self.squares:
                sum_ = "tail_squares" if mask else "block_squares"
                # Squares of the stored values: the norm is that of the gradient that the optimizer reads.
                lines += [f"total = {rounded('total', self.result)}", f"{sum_} += total * total"]
            return [*lines, store("result_at", "total", self.result, mask)]

        # Two accumulators, because whole and masked blocks have different sizes. They are summed to one number per
        # program, so the result does not depend on timing.
        no_squares = ["block_squares = tl.zeros([BLOCK], tl.float32)", "tail_squares = tl.zeros([TAIL], tl.float32)"]
        all_squares = "tl.store(squares + program, tl.sum(block_squares, 0) + tl.sum(tail_squares, 0))"
        return [
            *self._begin(),
            *(no_squares if self.squares else []),
            "for chunk in range(program, number, programs):",
            *indented(chunk_lookup(4)),
            f"    result_at = {pointer('tl.load(member)', self.result)}",
            *indented(self._find()),
            *indented(chunk_loop(["result_at", *peer_names(self.world)], pull, "TAIL")),
            *([all_squares] if self.squares else []),
            *self._end(),
        ]

    def _find(self) -> list[str]:
        """Lines that say where the parts lie."""
        # Every rank reads its peers in the order of ranks: a sum must not depend on which rank computes it.
        # Offset of the member, then this rank's part of it, in every rank's buffer.
        shift = "shift = tl.load(member + 1) + tl.load(member + 2) * rank"
        return [shift, *peer_pointers(self.world, "shift", self.wire)]


@dataclass(frozen=True, kw_only=True)
class LocalReduceScatter(PullReduceScatter):
    """The sum of a reduce-scatter whose parts copy engines have already brought to this rank; it gives the same bits.

    ``bases`` holds the address of one *slot* for each peer's parts, and of this rank's own buffer, where its own part
    is read. Columns of :meth:`rows`: addresses of this rank's results, offsets of the parts in a slot, offsets of this
    rank's parts in its buffer, in bytes.

    There is no barrier, so there may be more programs than are resident at once: many small ones reach the memory's
    bandwidth, and free their multiprocessors for computation soon. On an H200, 8 programs per multiprocessor do.
    """

    name: ClassVar[str] = "local_reduce_scatter"
    programs_per_multiprocessor: ClassVar[int] = 8
    programs: int = programs_per_multiprocessor * HOPPER_MULTIPROCESSORS
    block: int = 2048
    warps: int = 4

    @property
    def slots(self) -> int:
        """None: it has no barrier."""
        return 0

    def _own_columns(self) -> list[list[int]]:
        return []

    def _find(self) -> list[str]:
        # The bases of peers are local slots here, see `_CopySum`; only this rank's own part lies in its arena.
        shift = "tl.where(rank == {rank}, own, landed)"
        # Two offsets per member: in the slots that copies fill, and in this rank's arena.
        loads = ["landed = tl.load(member + 1)", "own = tl.load(member + 2)"]
        return [*loads, *peer_pointers(self.world, shift, self.wire)]
