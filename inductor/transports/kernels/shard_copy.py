"""Copies shards, cast to the dtype that is sent, into this rank's arena and into its own part of the results.

Peers copy from the arena by copy engine. Copies within one GPU run on its multiprocessors anyway and delay GEMMs, so
one kernel does both copies and the cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.codegen.triton_text import write_kernel
from weft.inductor.multi_tensor.chunked_kernel import COLUMN_DTYPES, Column, chunked_kernel_lines
from weft.inductor.multi_tensor.launch_plan import BLOCK, WARPS, chunk_elements, chunk_table

# What the kernel reads and writes.
TYPES = COLUMN_DTYPES


@dataclass(frozen=True)
class ShardCopy:
    """The kernel for one collective.

    Attributes:
        name: of the kernel, by which traces recognise communication.
        sizes: elements of each shard.
        source: the type of the shards, one of ``TYPES``.
        wire: that of the arena and of the results, one of ``TYPES``.
    """

    name: ClassVar[str] = "copy_shards"
    sizes: tuple[int, ...]
    source: torch.dtype
    wire: torch.dtype

    @property
    def kernel(self) -> KernelSource:
        """Its arguments are :attr:`chunks`, and the addresses of :meth:`rows` as ``launch_plan.pointer_table`` lays
        them out, both on the device."""
        # One read, two writes: the second spares a copy within the GPU from the arena to the result.
        columns = [
            Column("value", self.source),
            Column("slot", self.wire, False, "value"),
            Column("own", self.wire, False, "value"),
        ]
        signature = {"chunks": "*i32", "pointers": "*i64"}
        constants = {"CHUNK": self._chunk, "BLOCK": BLOCK}
        return write_kernel(
            self.name, chunked_kernel_lines(columns), signature, constants, divisible=signature, num_warps=WARPS
        )

    @cached_property
    def chunks(self) -> torch.Tensor:
        """The table of chunks, int32[chunks, 4], on the CPU."""
        return chunk_table(self.sizes, [0] * len(self.sizes), self._chunk)

    @property
    def grid(self) -> tuple[int, int, int]:
        """How many programs to launch."""
        # One program per chunk: there is no barrier, so they need not be resident at once.
        return len(self.chunks), 1, 1

    def rows(self, shards: Sequence[int], slots: Sequence[int], owns: Sequence[int]) -> list[list[int]]:
        """The rows of members: the addresses of shards, of their slots in the arena, and of this rank's parts of the
        results."""
        return [list(row) for row in zip(shards, slots, owns, strict=True)]

    @cached_property
    def _chunk(self) -> int:
        return chunk_elements(self.sizes)
