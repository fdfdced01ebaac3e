"""Symmetric memory on the CPU: the ranks of a test map one file, in which each has a buffer and a signal pad.

    def body(rank: int, world: int, path: str) -> Failure | None:
        here = Here(path, rank, world)
        here.launch(transport, rows, collective=7)
        return here.failure()

    def test_it(path: str) -> None:           # path: the fixture below
        run_ranks(body, 4, path)

Kernels run in triton's interpreter, whose atomics are the machine's. Every rank sees the file at other addresses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from weft.inductor.multi_tensor.launch_plan import pointer_table
from weft.inductor.runtime.kernels import compile_kernels
from weft.inductor.transports.kernels import failure
from weft.inductor.transports.kernels.barrier import Barrier
from weft.inductor.transports.kernels.failure import Failure
from weft.inductor.transports.kernels.peer_kernel import PeerGroup, PeerKernel

BUFFER = 1 << 22  # bytes
PAD = 1 << 14

# Readings of the slots until a rank is given up: a minute, where four ranks share two cores.
MAX_POLLS = 20_000

_CPU = torch.device("cpu")


def make(folder: Path, world: int = 8) -> str:
    """The file for a group of at most ``world`` ranks, all 0."""
    path = folder / "peers"
    path.touch()
    os.truncate(path, world * (BUFFER + PAD))
    return str(path)


class Here:
    """What one rank has.

    Attributes:
        buffers: the symmetric buffers of all ranks, uint8[BUFFER].
        buffer: its own.
        pad: its signal pad, uint32[PAD // 4].
        record: its record of a failure.
    """

    def __init__(self, path: str, rank: int, world: int, max_polls: int = MAX_POLLS) -> None:
        size = BUFFER + PAD
        file = torch.from_file(path, shared=True, size=world * size, dtype=torch.uint8)
        self.buffers = [part[:BUFFER] for part in file.split(size)]
        self.buffer = self.buffers[rank]
        self.pad = file.split(size)[rank][BUFFER:].view(torch.uint32)
        self.record = torch.zeros(failure.WORDS, dtype=torch.int32)
        bases = torch.arange(world) * size + file.data_ptr()
        self.peers = PeerGroup(world, rank, bases, bases + BUFFER, self.record, max_polls)

    def launch(
        self,
        transport: PeerKernel,
        rows: Sequence[Sequence[int]],
        *others: torch.Tensor,
        collective: int = 0,
        slots: int = 0,
    ) -> None:
        """Run the kernel of a transport on all of its programs."""
        (kernel,) = compile_kernels([transport.kernel], _CPU)
        chunks, members = transport.chunks, pointer_table(rows)
        kernel.launch(transport.grid, 0, *transport.arguments(self.peers, slots, collective, chunks, members, *others))

    def meet(self, collective: int = 0, slots: int = 0) -> None:
        """Run the barrier kernel."""
        barrier = Barrier(self.peers.world)
        (kernel,) = compile_kernels([barrier.kernel], _CPU)
        kernel.launch(barrier.grid, 0, *barrier.arguments(self.peers, slots, collective))

    def failure(self) -> Failure | None:
        """What this rank's kernels recorded."""
        return failure.read(self.record)
