"""How ``weft calibrate`` times collectives over memory that peers share: as the program of a step runs them.

Shards are float32 and travel as bfloat16; what is reduced lies in the arena already, where a step's products put it.
Ranks meet before gathers by kernels and before all-reduces, which a step can often do without: there, these take a
little less than measured here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.inductor.comm.arena import ALIGNMENT
from weft.inductor.comm.bound import Bound, bound
from weft.inductor.comm.symmetric import symmetric_buffer
from weft.inductor.comm.transports import (
    CopyEngineGather,
    CopySumReduceScatter,
    PeerAllReduce,
    PeerCall,
    PeerGather,
    PeerReduceScatter,
)
from weft.inductor.comm.ways import Peers, Start, Way
from weft.inductor.runtime.kernels import compile_kernels

AXIS = "calibrate"
"""What messages call the group."""

_WIRE = torch.bfloat16
_NARROW = ("bfloat16", "float16")

_Make = Callable[[int, tuple[int, ...]], PeerCall]  # of the ranks' number and the members' places in the arena


def peer_ways() -> list[Way]:
    """A way for each transport of :mod:`weft.inductor.comm.transports`; several where a number of programs matters."""

    def gather(name: str, programs: int) -> Way:
        make: _Make = lambda world, offsets: PeerGather(AXIS, world, programs, offsets, opens=True)
        return _way(name, "all_gather", make, ctas=programs)

    def copies(world: int, offsets: tuple[int, ...]) -> PeerCall:
        return CopyEngineGather(AXIS, world, 0, offsets, ahead=True)

    def reduce_scatter(name: str, programs: int) -> Way:
        make: _Make = lambda world, offsets: PeerReduceScatter(AXIS, world, programs, offsets)
        return _way(name, "reduce_scatter", make, sums="float32", dtypes=_NARROW, ctas=programs)

    def copy_sum(world: int, offsets: tuple[int, ...]) -> PeerCall:
        return CopySumReduceScatter(AXIS, world, 0, offsets)

    def all_reduce(name: str, shots: int, programs: int) -> Way:
        make: _Make = lambda world, offsets: PeerAllReduce(AXIS, world, programs, offsets, opens=True, shots=shots)
        return _way(name, "all_reduce", make, sums="float32", ctas=programs)

    return [
        gather("push", 8),
        gather("push_32", 32),
        _way("copy_engine", "all_gather", copies),
        reduce_scatter("pull", 64),
        reduce_scatter("pull_32", 32),
        reduce_scatter("pull_16", 16),
        _way("copy_sum", "reduce_scatter", copy_sum, sums="float32", dtypes=_NARROW),
        all_reduce("one_shot", 1, 64),
        all_reduce("two_shot", 2, 64),
    ]


def _way(name: str, kind: str, make: _Make, *, sums: str = "", dtypes: tuple[str, ...] = (), ctas: int = 0) -> Way:
    def prepare(peers: Peers, size: int, members: int) -> Start:
        world = len(peers.ranks)
        part = max(1, size // (members * world * _WIRE.itemsize))  # elements that one rank has of a member
        step = -(-part * world * _WIRE.itemsize // ALIGNMENT) * ALIGNMENT
        call = make(world, tuple(step * member for member in range(members)))
        buffer = symmetric_buffer(AXIS, peers.group.group_name, peers.device, step * members, f"{call} of {part}")
        places = [buffer.view(offset, (part * world,), _WIRE) for offset in call.offsets]
        shards = [torch.zeros(part, device=peers.device) for _ in range(members)]
        wholes = [torch.zeros_like(place) for place in places] if kind == "all_reduce" else places
        given, made = {
            "all_gather": (shards, wholes),
            "reduce_scatter": (wholes, shards),
            "all_reduce": (wholes, wholes),
        }[kind]
        collective = bound(call, given, made, buffer, f"{name} of {size} bytes")
        collective.attach(compile_kernels(collective.sources(), peers.device))
        return lambda: _start(collective, given)

    return Way(name, kind, _WIRE, prepare, dtypes, sums, ctas=ctas, coalesces=True, symmetric=True)


def _start(collective: Bound, given: list[torch.Tensor]) -> Callable[[], object]:
    collective(given)
    return collective.wait
