"""Shards brought, by one kernel and in the type that is sent, to where they belong: into this rank's arena, where peers
copy them from, and into its own part of the results.

Copies could do either; but a copy within one GPU is done by its multiprocessors, between the products that it holds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weft.inductor.multi_tensor.plan import BLOCK, WARPS, chunk_elements, chunk_table
from weft.inductor.multi_tensor.text import TRITON_DTYPES, Column, walk
from weft.inductor.runtime.kernel_source import KernelSource

# What the kernel reads and writes.
TYPES = tuple(TRITON_DTYPES)


@dataclass(frozen=True)
class Deposit:
    """The kernel for one collective.

    Attributes:
        sizes: elements of each shard.
        source: the type of the shards, one of ``TYPES``.
        wire: that of the arena and of the results, one of ``TYPES``.
    """

    sizes: tuple[int, ...]
    source: torch.dtype
    wire: torch.dtype

    @property
    def kernel(self) -> KernelSource:
        """Its arguments are :attr:`chunks`, and the addresses of :meth:`rows` as ``multi_tensor.plan.addresses`` lays
        them out, both on the device."""
        columns = [
            Column("value", self.source),
            Column("slot", self.wire, False, "value"),
            Column("own", self.wire, False, "value"),
        ]
        signature = {"chunks": "*i32", "pointers": "*i64"}
        constants = {"CHUNK": self._chunk, "BLOCK": BLOCK}
        text = walk("deposit_shards", columns)
        return KernelSource("deposit_shards", text, signature, constants, frozenset(signature), WARPS, 1)

    @cached_property
    def chunks(self) -> torch.Tensor:
        """The table of chunks, int32[chunks, 4], on the CPU."""
        return chunk_table(self.sizes, [0] * len(self.sizes), self._chunk)

    @property
    def grid(self) -> tuple[int, int, int]:
        """How many programs to launch."""
        return len(self.chunks), 1, 1

    def rows(self, shards: Sequence[int], slots: Sequence[int], owns: Sequence[int]) -> list[list[int]]:
        """The rows of members: the addresses of shards, of their slots in the arena, and of this rank's parts of the
        results."""
        return [list(row) for row in zip(shards, slots, owns, strict=True)]

    @cached_property
    def _chunk(self) -> int:
        return chunk_elements(self.sizes)
