"""What all transports share: tensors cut into chunks, and what their kernels are launched with.

A *member* is one tensor of a collective; a kernel serves many. It lies at the same offset in the *symmetric buffer* of
every rank, memory that all ranks of the group can address. Members are cut into chunks, which programs do in turn. Two
tables in device memory say what there is:

``chunks``   int32, a row a chunk: member, number of the chunk in it, elements in the chunk, 0
``members``  int64, a row a member: addresses of this rank's own tensors, then the offset in the buffers and other
             numbers of bytes; then 1 where all of these are multiples of 16

Programs are few: each waits for the program of the same number of every other rank, so all have to run at once, with
whatever runs beside them. Grids and chunks are the same on all ranks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from weft.inductor.comm.kernels.failure import What
from weft.inductor.comm.kernels.text import kernel, wait
from weft.inductor.multi_tensor.plan import chunk_table
from weft.inductor.runtime.kernel_source import KernelSource
from weft.inductor.runtime.kernels import Argument

Grid = tuple[int, int, int]

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
    "patience": "i32",
}

# To look a chunk up takes as long as to load a block: a chunk is several blocks, where each program still has many.
_MOST_BLOCKS = 4
_WANTED_CHUNKS = 8

# Bytes that a thread of 16 warps has registers for: what is loaded at a time, and the addresses of that.
_LOADS = 320
_ADDRESS = 8


@dataclass(frozen=True)
class Peers:
    """A group of ranks as one of them sees it.

    Attributes:
        world: how many ranks there are.
        rank: the number of this one.
        bases: int64[world], the address of each rank's symmetric buffer in this process.
        pads: int64[world], that of each rank's signal pad.
        failure: int32[failure.WORDS], this rank's record.
        patience: how many times a barrier reads its slots before it gives up, less than 2**31. A reading takes about
            a microsecond.
    """

    world: int
    rank: int
    bases: Argument
    pads: Argument
    failure: Argument
    patience: int


@dataclass(frozen=True, kw_only=True)
class Transport(ABC):
    """The kernel that serves one collective.

    Attributes:
        world: ranks of the group.
        sizes: elements of each member, or of the part of it that belongs to one rank.
        before: whether ranks wait for each other before anything is moved.
        after: whether they do afterwards.
        programs: the most there may be.
        block: elements that a program has in registers at a time, a power of two.
        warps: of a program.
    """

    world: int
    sizes: tuple[int, ...]
    before: bool = True
    after: bool = True
    programs: int
    block: int
    warps: int

    @functools.cached_property
    def chunk(self) -> int:
        """Elements of a chunk."""
        chunk = _MOST_BLOCKS * self.block
        while chunk > self.block and self._chunks_of(chunk) < _WANTED_CHUNKS * self.programs * self.round:
            chunk //= 2
        return chunk

    @property
    def round(self) -> int:
        """How many chunks there are for the programs of one number, of all ranks, at a time."""
        return 1

    @functools.cached_property
    def chunks(self) -> torch.Tensor:
        """The table of chunks, int32[chunks, 4], on the CPU."""
        return chunk_table(self.sizes, [0] * len(self.sizes), self.chunk)

    @property
    def grid(self) -> Grid:
        """How many programs to launch."""
        return max(1, min(self.programs, -(-self._chunks_of(self.chunk) // self.round))), 1, 1

    @property
    def slots(self) -> int:
        """Words that the kernel needs in every signal pad."""
        return self.grid[0] * self.world

    @functools.cached_property
    def kernel(self) -> KernelSource:
        """The kernel, the same on all ranks."""
        lines = ["program = tl.program_id(0)", "programs = tl.num_programs(0)", *self._lines()]
        sizes = {"CHUNK": self.chunk, "BLOCK": self.block, "TAIL": max(1, self.block // 4)}
        return kernel(self.name, lines, _SIGNATURE | self.others, self.world, self.warps, **sizes)

    @property
    def others(self) -> dict[str, str]:
        """Names and types of arguments that this kernel has and not all have."""
        return {}

    def arguments(
        self, peers: Peers, slots: int, collective: int, chunks: Argument, members: Argument, *others: Argument
    ) -> tuple[Argument, ...]:
        """What to launch the kernel with.

        Args:
            slots: the first of its words in every signal pad; launches that never run at the same time may share them.
            collective: the number that a failure is recorded with.
            chunks: :attr:`chunks` on the device.
            members: the table of members on the device: ``addresses(transport.rows(...))`` of multi_tensor/plan.py.
            others: those of :attr:`others`.
        """
        numbers = self._chunks_of(self.chunk), slots, peers.rank, collective, peers.patience
        return chunks, members, peers.bases, peers.pads, peers.failure, *numbers, *others

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the kernel."""

    @abstractmethod
    def _lines(self) -> list[str]:
        """The body of the kernel; ``program`` and ``programs`` are there."""

    def _chunks_of(self, elements: int) -> int:
        return sum(-(-size // elements) for size in self.sizes)

    def _begin(self) -> list[str]:
        """The first barrier. If a rank is missing, nothing is moved."""
        return [f"number = tl.where({wait(What.TO_BEGIN)}, number, 0)"] if self.before else []

    def _end(self) -> list[str]:
        """The last barrier."""
        return [wait(What.TO_END)] if self.after else []

    def _at_a_time(self, dtype: torch.dtype) -> int:
        """From how many peers a program loads at a time."""
        elements = max(1, self.block // (32 * self.warps))
        return max(1, (_LOADS - self.world * _ADDRESS) // (elements * dtype.itemsize))
