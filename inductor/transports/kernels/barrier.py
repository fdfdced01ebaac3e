"""A barrier of all ranks as a kernel of its own, for copies by copy engine, which run outside of kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.runtime.kernels import Argument
from weft.inductor.transports.kernels.failure import FailureKind
from weft.inductor.transports.kernels.peer_kernel import Grid, PeerGroup
from weft.inductor.transports.kernels.peer_kernel_text import barrier_call, peer_kernel_source

_SIGNATURE = {
    "pads": "*i64",
    "failure": "*i32",
    "slots": "i32",
    "rank": "i32",
    "collective": "i32",
    "max_polls": "i32",
}


@dataclass(frozen=True)
class Barrier:
    """Work after it on one rank's stream starts after the work before it on the streams of all ranks has finished.

    Attributes:
        name: of the kernel, by which traces recognise communication.
        world: ranks of the group.
        what: what a failure is recorded as.
        grid: how many programs to launch.
    """

    name: ClassVar[str] = "peer_barrier"
    world: int
    what: FailureKind = FailureKind.ENTRY_BARRIER
    grid: Grid = (1, 1, 1)

    @property
    def slots(self) -> int:
        """Words that the kernel needs in every signal pad."""
        return self.world

    @functools.cached_property
    def kernel(self) -> KernelSource:
        """The kernel, the same on all ranks."""
        # One program and one warp: it has as little to schedule as a kernel can have, so it gets onto a multiprocessor
        # beside a GEMM that leaves little room.
        return peer_kernel_source(self.name, [barrier_call(self.what)], _SIGNATURE, self.world, 1)

    def arguments(self, peers: PeerGroup, slots: int, collective: int) -> tuple[Argument, ...]:
        """What to launch the kernel with; see :meth:`Transport.arguments`."""
        return peers.pads, peers.failure, slots, peers.rank, collective, peers.max_polls
