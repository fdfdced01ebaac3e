"""A barrier of all ranks as a kernel of its own: around copies, which no kernel makes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from weft.inductor.comm.kernels.failure import What
from weft.inductor.comm.kernels.text import kernel, wait
from weft.inductor.comm.kernels.transport import Grid, Peers
from weft.inductor.runtime.kernel_source import KernelSource
from weft.inductor.runtime.kernels import Argument

_SIGNATURE = {
    "pads": "*i64",
    "failure": "*i32",
    "slots": "i32",
    "rank": "i32",
    "collective": "i32",
    "patience": "i32",
}


@dataclass(frozen=True)
class Barrier:
    """What comes after it on one rank's stream comes after what is before it on the streams of all.

    Attributes:
        world: ranks of the group.
        what: what a failure is recorded as.
        grid: how many programs to launch.
    """

    world: int
    what: What = What.TO_BEGIN
    grid: Grid = (1, 1, 1)

    @property
    def slots(self) -> int:
        """Words that the kernel needs in every signal pad."""
        return self.world

    @functools.cached_property
    def kernel(self) -> KernelSource:
        """The kernel, the same on all ranks."""
        return kernel("meet", [wait(self.what)], _SIGNATURE, self.world, 1)

    def arguments(self, peers: Peers, slots: int, collective: int) -> tuple[Argument, ...]:
        """What to launch the kernel with; see :meth:`Transport.arguments`."""
        return peers.pads, peers.failure, slots, peers.rank, collective, peers.patience
