"""All-reduce in one shot or two.

In one shot every rank reads and combines the data of all ranks: one round trip, and world times the bytes. In two shots
each rank combines every world-th chunk and writes the result to all ranks: a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weft.inductor.codegen.triton_text import chunk_loop, indented
from weft.inductor.transports.kernels.peer_kernel import PeerKernel
from weft.inductor.transports.kernels.peer_kernel_text import (
    chunk_lookup,
    load,
    peer_names,
    peer_pointers,
    pointer,
    store,
    widened,
)
from weft.inductor.transports.kernels.reduction import RankReduction


@dataclass(frozen=True, kw_only=True)
class AllReduce(PeerKernel):
    """The base of both. ``sizes`` are elements of the members.

    Columns of :meth:`rows`: addresses of this rank's own tensors if ``source`` is not None, addresses of the results in
    one shot, offsets of the members in the buffers in bytes.

    Attributes:
        wire: the type of the members.
        source: the type of this rank's own tensors, which are copied into its buffer first; None if the data is in the
            buffer already. A copy needs ``entry_barrier``.
        reduction: how the ranks' values are combined.
    """

    wire: torch.dtype
    source: torch.dtype | None = None
    reduction: RankReduction = field(default_factory=RankReduction)

    def __post_init__(self) -> None:
        # Without the barrier peers would read a buffer before the copy into it is done.
        assert self.entry_barrier or self.source is None, "peers read what is copied"

    @property
    @abstractmethod
    def _words(self) -> int:
        """Words of a row of members: the address of the source comes first, the offset and the alignment last."""

    def _copy(self) -> list[str]:
        """Lines that copy the chunks which this program will read from the buffers of peers."""
        if self.source is None:
            return []
        source = self.source

        def copy(mask: str) -> list[str]:
            return [
                f"value = {widened(load('source_at', mask), source)}",
                store("own_at", "value", self.wire, mask),
            ]

        # The copy goes to this rank's own buffer, at the offset where peers look for it.
        own = f"tl.load(bases + rank) + tl.load(member + {self._words - 2})"
        return [
            # A barrier orders a program against the programs of its number only. So each copies exactly the chunks that
            # these will read here.
            f"for first_chunk in range(program * {self.round}, number, programs * {self.round}):",
            f"    for chunk in range(first_chunk, tl.minimum(first_chunk + {self.round}, number)):",
            *indented(chunk_lookup(self._words), 2),
            f"        source_at = {pointer('tl.load(member)', source)}",
            f"        own_at = {pointer(own, self.wire)}",
            *indented(chunk_loop(["source_at", "own_at"], copy, "TAIL"), 2),
        ]

    def _find(self) -> list[str]:
        """Lines that look up a chunk and its address in the buffers of all ranks."""
        return [
            *chunk_lookup(self._words),
            f"offset = tl.load(member + {self._words - 2})",
            *peer_pointers(self.world, "offset", self.wire),
        ]

    def _combine(self, mask: str) -> list[str]:
        return self.reduction.lines(self.world, self.wire, self._at_a_time(self.wire), mask)


@dataclass(frozen=True, kw_only=True)
class OneShotAllReduce(AllReduce):
    """For small tensors. Results go to tensors of this rank's own, not into the buffer.

    ``exit_barrier`` keeps a rank from overwriting what a peer still reads; without it, something else has to do so.
    ``programs``, ``block`` and ``warps`` are choices for tensors of at most some hundred KB.

    Attributes:
        result: the type of the results.
    """

    name: ClassVar[str] = "one_shot_all_reduce"
    result: torch.dtype
    programs: int = 32
    block: int = 1024
    warps: int = 4

    @property
    def _words(self) -> int:
        return 3 if self.source is None else 4

    def _lines(self) -> list[str]:
        def pull(mask: str) -> list[str]:
            return [*self._combine(mask), store("result_at", "total", self.result, mask)]

        return [
            # Copy, barrier, read: what this program reads of a peer, the program of its number there has copied before
            # the barrier.
            *self._copy(),
            *self._begin(),
            "for chunk in range(program, number, programs):",
            *indented(self._find()),
            f"    result_at = {pointer(f'tl.load(member + {self._words - 3})', self.result)}",
            *indented(chunk_loop(["result_at", *peer_names(self.world)], pull, "TAIL")),
            *self._end(),
        ]


@dataclass(frozen=True, kw_only=True)
class TwoShotAllReduce(AllReduce):
    """For large tensors. Results replace the members in the buffers of all ranks.

    Without ``exit_barrier``, something else has to order the readers of the results behind the writes of all ranks.
    ``programs`` is that of the pulling reduce-scatter, which was fitted to 8 H200; ``block`` and ``warps`` are choices.
    """

    name: ClassVar[str] = "two_shot_all_reduce"
    programs: int = 64
    block: int = 4096
    warps: int = 16

    @property
    def round(self) -> int:
        """One chunk for each rank: each combines its own."""
        # Chunks of a round go to the ranks in turn, so ranks combine about equal parts of every member.
        return self.world

    @property
    def _words(self) -> int:
        return 2 if self.source is None else 3

    def _lines(self) -> list[str]:
        def exchange(mask: str) -> list[str]:
            return [*self._combine(mask), *(store(place, "total", self.wire, mask) for place in peer_names(self.world))]

        return [
            # Copy, barrier, exchange, barrier: the second one keeps readers from results that a peer has not written
            # yet.
            *self._copy(),
            *self._begin(),
            # Between the barriers nobody else touches a chunk of this rank, on any rank.
            "for chunk in range(program * WORLD + rank, number, programs * WORLD):",
            *indented(self._find()),
            *indented(chunk_loop(peer_names(self.world), exchange, "TAIL")),
            *self._end(),
        ]
