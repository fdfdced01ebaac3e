"""Benchmarks of the symmetric-memory transports for ``weft calibrate``: the same calls that a compiled step makes.

Shards are float32 and are sent as bfloat16. Operands of reductions are in the arena already, where a step's GEMMs write
them. Gathers by kernels and all-reduces begin with a barrier. A step can often omit it, so there they take a little
less time than measured here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.inductor.cost.nccl_benchmarks import BenchmarkGroup, CollectiveBenchmark, Start
from weft.inductor.runtime.kernels import compile_kernels
from weft.inductor.transports.arena import ALIGNMENT
from weft.inductor.transports.peer_calls import (
    CopyEngineGather,
    CopySumReduceScatter,
    PeerAllReduce,
    PeerCall,
    PeerGather,
    PeerReduceScatter,
)
from weft.inductor.transports.peer_launch import BoundPeerCall, bind_call
from weft.inductor.transports.symmetric_memory import symmetric_buffer

AXIS = "calibrate"
"""Name of the group in messages."""

_WIRE = torch.bfloat16
_NARROW = ("bfloat16", "float16")

# From the world size and the byte offsets of the members in the arena.
_Make = Callable[[int, tuple[int, ...]], PeerCall]


def peer_benchmarks() -> list[CollectiveBenchmark]:
    """A benchmark for each transport of :mod:`weft.inductor.transports.peer_calls`, with several numbers of programs
    where these matter."""

    def gather(name: str, programs: int) -> CollectiveBenchmark:
        make: _Make = lambda world, offsets: PeerGather(AXIS, world, programs, offsets, opening_barrier=True)
        return _benchmark(name, "all_gather", make, ctas=programs)

    def copies(world: int, offsets: tuple[int, ...]) -> PeerCall:
        return CopyEngineGather(AXIS, world, 0, offsets, copy_in_on_compute_stream=True)

    def reduce_scatter(name: str, programs: int) -> CollectiveBenchmark:
        make: _Make = lambda world, offsets: PeerReduceScatter(AXIS, world, programs, offsets)
        return _benchmark(name, "reduce_scatter", make, dtypes=_NARROW, ctas=programs)

    def copy_sum(world: int, offsets: tuple[int, ...]) -> PeerCall:
        return CopySumReduceScatter(AXIS, world, 0, offsets)

    def all_reduce(name: str, shots: int, programs: int) -> CollectiveBenchmark:
        make: _Make = lambda world, offsets: PeerAllReduce(
            AXIS, world, programs, offsets, opening_barrier=True, shots=shots
        )
        return _benchmark(name, "all_reduce", make, ctas=programs)

    return [
        gather("push", 8),
        gather("push_32", 32),
        _benchmark("copy_engine", "all_gather", copies),
        reduce_scatter("pull", 64),
        reduce_scatter("pull_32", 32),
        reduce_scatter("pull_16", 16),
        _benchmark("copy_sum", "reduce_scatter", copy_sum, dtypes=_NARROW),
        all_reduce("one_shot", 1, 64),
        all_reduce("two_shot", 2, 64),
    ]


def _benchmark(
    name: str, kind: str, make: _Make, *, dtypes: tuple[str, ...] = (), ctas: int = 0
) -> CollectiveBenchmark:
    def prepare(peers: BenchmarkGroup, size: int, members: int) -> Start:
        world = len(peers.ranks)
        part = max(1, size // (members * world * _WIRE.itemsize))  # elements that one rank has of a member
        step = -(-part * world * _WIRE.itemsize // ALIGNMENT) * ALIGNMENT
        call = make(world, tuple(step * member for member in range(members)))
        buffer = symmetric_buffer(AXIS, peers.group.group_name, peers.device, step * members, f"{call} of {part}")
        places = [buffer.view(offset, (part * world,), _WIRE) for offset in call.offsets]
        shards = [torch.zeros(part, device=peers.device) for _ in range(members)]
        wholes = [torch.zeros_like(place) for place in places] if kind == "all_reduce" else places
        operands, results = {
            "all_gather": (shards, wholes),
            "reduce_scatter": (wholes, shards),
            "all_reduce": (wholes, wholes),
        }[kind]
        collective = bind_call(call, operands, results, buffer, f"{name} of {size} bytes")
        collective.attach(compile_kernels(collective.sources(), peers.device))
        return lambda: _start(collective, operands)

    return CollectiveBenchmark(name, kind, _WIRE, prepare, dtypes, ctas=ctas, coalesces=True, symmetric=True)


def _start(collective: BoundPeerCall, operands: list[torch.Tensor]) -> Callable[[], object]:
    collective(operands)
    return collective.wait
