"""All-gather by pushing: each rank writes its shards where they belong, into the buffers of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
class PushGather(Transport):
    """Gathers shards of equal sizes, and casts them on the way. A member is the shards of all ranks, in their order.

    ``sizes`` are elements of one shard. ``before`` keeps a rank from overwriting what a peer still reads; without it,
    something else has to. Measured on 8 H200, 512 MB of bfloat16 from float32 shards: 1,517 us with 8 programs, 1,486
    with 16, 1,415 with 132; NCCL takes as long without the cast.

    Attributes:
        source: the type of the shards.
        wire: the type of the members.
    """

    source: torch.dtype
    wire: torch.dtype
    programs: int = 8
    block: int = 8192
    warps: int = 16

    @property
    def name(self) -> str:
        return "push_gather"

    def rows(self, shards: Sequence[int], offsets: Sequence[int]) -> list[list[int]]:
        """The rows of members, without the last word.

        Args:
            shards: the addresses of this rank's shards.
            offsets: where members lie in the buffers, in bytes.
        """
        steps = [size * self.wire.itemsize for size in self.sizes]
        return [list(row) for row in zip(shards, offsets, steps, strict=True)]

    def _lines(self) -> list[str]:
        def push(mask: str) -> list[str]:
            value = f"value = {widened(load('shard_at', mask), self.source)}"
            return [value, *(store(place, "value", self.wire, mask) for place in places(self.world))]

        return [
            *self._begin(),
            "for chunk in range(program, number, programs):",
            *indented(look_up(4)),
            f"    shard_at = {pointer('tl.load(member)', self.source)}",
            "    shift = tl.load(member + 1) + tl.load(member + 2) * rank",
            # Each rank begins with itself: they do not all send to the same peer at a time.
            *indented(find_places(self.world, "shift", self.wire, first="rank")),
            *indented(blocks(["shard_at", *places(self.world)], push)),
            *self._end(),
        ]
