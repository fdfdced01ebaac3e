"""The base of all kernels between GPUs: tensors in chunks, and the arguments of launches.

A *member* is one tensor of a collective; a kernel serves many. It has the same offset in the *symmetric buffer* of
every rank, memory that all ranks of the group can address. Members are split into chunks, which programs take in turn.
Two tables in device memory describe them:

``chunks``   int32, a row a chunk: member, number of the chunk in it, elements in the chunk, 0
``members``  int64, a row a member: addresses of this rank's own tensors, then the offset in the buffers and other
             numbers of bytes; then 1 where all of these are multiples of 16

Each program waits at barriers for the program of the same number of every other rank. So all programs have to be
resident at once, beside whatever else runs: there are few. Grids and chunks are the same on all ranks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.multi_tensor.launch_plan import chunk_table
from weft.inductor.runtime.kernels import Argument
from weft.inductor.transports.kernels.failure import FailureKind
from weft.inductor.transports.kernels.peer_kernel_text import barrier_call, peer_kernel_source

Grid = tuple[int, int, int]

# Addresses and counts are arguments, so that collectives of equal dtypes and block sizes share one kernel.
_SIGNATURE = {
    "chunks": "*i32",
    "members": "*i64",
    "bases": "*i64",
    "pads": "*i64",
    "failure": "*i32",
    "number": "i32",
    "slots": "i32",
    "rank": "i32",
    "collective": "i32",
    "max_polls": "i32",
}

# Looking a chunk up takes as long as loading a block, so a chunk is several blocks, as long as each program has enough
# chunks.
_MOST_BLOCKS = 4
_WANTED_CHUNKS = 8

# Bytes of registers that a thread has for loads in flight and their addresses, in a program of 16 warps on Hopper.
_LOADS = 320
_ADDRESS = 8  # of a pointer


@dataclass(frozen=True)
class PeerGroup:
    """A process group as one of its ranks addresses it.

    Attributes:
        world: how many ranks there are.
        rank: the number of this one.
        bases: int64[world], the address of each rank's symmetric buffer in this process.
        pads: int64[world], that of each rank's signal pad.
        failure: int32[failure.WORDS], this rank's record.
        max_polls: how many times a barrier reads its slots before it gives up, less than 2**31. A reading takes about
            a microsecond.
    """

    world: int
    rank: int
    bases: Argument
    pads: Argument
    failure: Argument
    max_polls: int


@dataclass(frozen=True, kw_only=True)
class PeerKernel(ABC):
    """The kernel that serves one collective.

    Attributes:
        name: of the kernel, by which traces recognise communication.
        world: ranks of the group.
        sizes: elements of each member, or of the part of it that belongs to one rank.
        entry_barrier: whether ranks wait for each other before anything is moved.
        exit_barrier: whether they do afterwards.
        programs: the most there may be.
        block: elements that a program has in registers at a time, a power of two.
        warps: of a program.
    """

    name: ClassVar[str]
    world: int
    sizes: tuple[int, ...]
    entry_barrier: bool = True
    exit_barrier: bool = True
    programs: int
    block: int
    warps: int

    @functools.cached_property
    def chunk(self) -> int:
        """Elements of a chunk."""
        # Divided while programs would get fewer chunks than `_WANTED_CHUNKS`: with a few each, the last round leaves
        # most of them idle.
        chunk = _MOST_BLOCKS * self.block
        while chunk > self.block and self._chunks_of(chunk) < _WANTED_CHUNKS * self.programs * self.round:
            chunk //= 2
        return chunk

    @property
    def round(self) -> int:
        """Consecutive chunks that programs of the same number share across ranks; 1 if each rank does all chunks."""
        return 1

    @functools.cached_property
    def chunks(self) -> torch.Tensor:
        """The table of chunks, int32[chunks, 4], on the CPU."""
        # From sizes only, so the tables of all ranks are equal and chunk n means the same elements everywhere.
        return chunk_table(self.sizes, [0] * len(self.sizes), self.chunk)

    @property
    def grid(self) -> Grid:
        """How many programs to launch."""
        # Never more programs than chunks: each one more takes part in the barriers, and moves nothing.
        return max(1, min(self.programs, -(-self._chunks_of(self.chunk) // self.round))), 1, 1

    @property
    def slots(self) -> int:
        """Words that the kernel needs in every signal pad."""
        # A row per program, a word per rank in it.
        return self.grid[0] * self.world

    @functools.cached_property
    def kernel(self) -> KernelSource:
        """The kernel, the same on all ranks."""
        # Grid and chunks follow from sizes only. A rank with another grid would wait for programs that do not exist.
        lines = ["program = tl.program_id(0)", "programs = tl.num_programs(0)", *self._lines()]
        # Smaller blocks in the masked branch: a short member would fill only a part of a whole one.
        sizes = {"CHUNK": self.chunk, "BLOCK": self.block, "TAIL": max(1, self.block // 4)}
        return peer_kernel_source(self.name, lines, _SIGNATURE | self.extra_arguments, self.world, self.warps, **sizes)

    @property
    def extra_arguments(self) -> dict[str, str]:
        """Names and types of arguments that this kernel has and not all have."""
        return {}

    def rows(self, *columns: Sequence[int]) -> list[list[int]]:
        """The rows of ``members`` without the last word.

        Args:
            columns: as the class of the kernel lists them, a number per member in each.
        """
        return [list(row) for row in zip(*columns, *self._own_columns(), strict=True)]

    def _own_columns(self) -> list[list[int]]:
        """The columns that follow from the sizes of the members: they come behind those of :meth:`rows`."""
        return []

    def arguments(
        self, peers: PeerGroup, slots: int, collective: int, chunks: Argument, members: Argument, *extra: Argument
    ) -> tuple[Argument, ...]:
        """What to launch the kernel with.

        Args:
            slots: the first of its words in every signal pad; launches that never run at the same time may share them.
            collective: the number that a failure is recorded with.
            chunks: :attr:`chunks` on the device.
            members: the table of members on the device: ``pointer_table(kernel.rows(...))`` of launch_plan.py.
            extra: those of :attr:`extra_arguments`.
        """
        numbers = self._chunks_of(self.chunk), slots, peers.rank, collective, peers.max_polls
        return chunks, members, peers.bases, peers.pads, peers.failure, *numbers, *extra

    @abstractmethod
    def _lines(self) -> list[str]:
        """The body of the kernel; the registers ``program`` and ``programs`` are defined before it."""

    def _chunks_of(self, elements: int) -> int:
        return sum(-(-size // elements) for size in self.sizes)

    def _begin(self) -> list[str]:
        """The entry barrier. If a rank is missing, the kernel moves nothing."""
        return (
            # Zero chunks: every loop over chunks is then empty, and the exit barrier still signals.
            [f"number = tl.where({barrier_call(FailureKind.ENTRY_BARRIER)}, number, 0)"] if self.entry_barrier else []
        )

    def _end(self) -> list[str]:
        """The exit barrier."""
        return [barrier_call(FailureKind.EXIT_BARRIER)] if self.exit_barrier else []

    def _at_a_time(self, dtype: torch.dtype) -> int:
        """The number of peers from which a program loads at once: as many as its registers can hold the values of."""
        # A thread holds this many elements of each block that is in flight, and a pointer for each rank.
        elements = max(1, self.block // (32 * self.warps))
        return max(1, (_LOADS - self.world * _ADDRESS) // (elements * dtype.itemsize))
