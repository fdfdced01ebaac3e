"""All-reduce. In one shot every rank reads all and combines all: one trip, and world times the bytes. In two shots
chunks are dealt to the ranks in turn: each rank combines its own, and writes the result to all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft.inductor.comm.kernels.reduction import Reduction
from weft.inductor.comm.kernels.text import (
    blocks,
    find_places,
    load,
    look_up,
    places,
    pointer,
    store,
    widened,
)
from weft.inductor.comm.kernels.transport import Transport
from weft.inductor.multi_tensor.text import indented


@dataclass(frozen=True, kw_only=True)
class AllReduce(Transport):
    """What the two have in common. ``sizes`` are elements of the members.

    Attributes:
        wire: the type of the members.
        source: the type of tensors of this rank's own that are copied into its buffer first; None where what is to be
            combined lies there already. ``before`` must stay where there is one.
        reduction: what becomes of the ranks' values.
    """

    wire: torch.dtype
    source: torch.dtype | None = None
    reduction: Reduction = field(default_factory=Reduction)

    def __post_init__(self) -> None:
        assert self.before or self.source is None, "peers read what is copied"

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

        own = f"tl.load(bases + rank) + tl.load(member + {self._words - 2})"
        return [
            f"for first_chunk in range(program * {self.round}, number, programs * {self.round}):",
            f"    for chunk in range(first_chunk, tl.minimum(first_chunk + {self.round}, number)):",
            *indented(look_up(self._words), 2),
            f"        source_at = {pointer('tl.load(member)', source)}",
            f"        own_at = {pointer(own, self.wire)}",
            *indented(blocks(["source_at", "own_at"], copy), 2),
        ]

    def _find(self) -> list[str]:
        """Lines that find out about a chunk, and where it lies in the buffers of all ranks."""
        return [
            *look_up(self._words),
            f"offset = tl.load(member + {self._words - 2})",
            *find_places(self.world, "offset", self.wire),
        ]

    def _combine(self, mask: str) -> list[str]:
        return self.reduction.lines(self.world, self.wire, self._at_a_time(self.wire), mask)


@dataclass(frozen=True, kw_only=True)
class OneShotAllReduce(AllReduce):
    """For what is small. Results go to tensors of this rank's own, not into the buffer.

    ``after`` keeps a rank from overwriting what a peer still reads; without it, something else has to.

    Attributes:
        result: the type of the results.
    """

    result: torch.dtype
    programs: int = 32
    block: int = 1024
    warps: int = 4

    @property
    def name(self) -> str:
        return "one_shot_all_reduce"

    def rows(self, results: Sequence[int], offsets: Sequence[int], sources: Sequence[int] = ()) -> list[list[int]]:
        """The rows of members, without the last word.

        Args:
            results: the addresses of the results.
            offsets: where members lie in the buffers, in bytes.
            sources: the addresses of what is copied there first, if :attr:`source` says so.
        """
        columns = [results, offsets] if self.source is None else [sources, results, offsets]
        return [list(row) for row in zip(*columns, strict=True)]

    @property
    def _words(self) -> int:
        return 3 if self.source is None else 4

    def _lines(self) -> list[str]:
        def pull(mask: str) -> list[str]:
            return [*self._combine(mask), store("result_at", "total", self.result, mask)]

        return [
            *self._copy(),
            *self._begin(),
            "for chunk in range(program, number, programs):",
            *indented(self._find()),
            f"    result_at = {pointer(f'tl.load(member + {self._words - 3})', self.result)}",
            *indented(blocks(["result_at", *places(self.world)], pull)),
            *self._end(),
        ]


@dataclass(frozen=True, kw_only=True)
class TwoShotAllReduce(AllReduce):
    """For what is large. Results replace the members in the buffers of all ranks; without ``after``, something else has
    to tell when they are there.
    """

    programs: int = 64
    block: int = 4096
    warps: int = 16

    @property
    def name(self) -> str:
        return "two_shot_all_reduce"

    @property
    def round(self) -> int:
        return self.world

    def rows(self, offsets: Sequence[int], sources: Sequence[int] = ()) -> list[list[int]]:
        """The rows of members, without the last word.

        Args:
            offsets: where members lie in the buffers, in bytes.
            sources: the addresses of what is copied there first, if :attr:`source` says so.
        """
        columns = [offsets] if self.source is None else [sources, offsets]
        return [list(row) for row in zip(*columns, strict=True)]

    @property
    def _words(self) -> int:
        return 2 if self.source is None else 3

    def _lines(self) -> list[str]:
        def exchange(mask: str) -> list[str]:
            return [*self._combine(mask), *(store(place, "total", self.wire, mask) for place in places(self.world))]

        return [
            *self._copy(),
            *self._begin(),
            # Between the barriers nobody else touches a chunk of this rank, on any rank.
            "for chunk in range(program * WORLD + rank, number, programs * WORLD):",
            *indented(self._find()),
            *indented(blocks(places(self.world), exchange)),
            *self._end(),
        ]
