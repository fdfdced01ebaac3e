"""The kernels of transports compiled for sm_90: what they need, how they reach memory, and how they wait."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
import torch

from weft import triton_adapter
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.transports.kernels.all_gather import PushGather
from weft.inductor.transports.kernels.all_reduce import OneShotAllReduce, TwoShotAllReduce
from weft.inductor.transports.kernels.barrier import Barrier
from weft.inductor.transports.kernels.peer_kernel import PeerKernel
from weft.inductor.transports.kernels.reduce_scatter import PullReduceScatter
from weft.inductor.transports.kernels.reduction import RankReduction

bf16, f16, f32, i64 = torch.bfloat16, torch.float16, torch.float32, torch.int64

REGISTERS = 65536  # of a multiprocessor

MUCH = (1 << 26, 1 << 20)
MEAN = RankReduction("sum", 0.125)

# A kernel, and what a thread loads and what it stores of a block: (bytes of an element, how many tensors), ...
KERNELS: dict[str, tuple[PeerKernel, list[tuple[int, int]], list[tuple[int, int]]]] = {
    "gather_cast": (PushGather(world=8, sizes=MUCH, source=f32, wire=bf16), [(4, 1)], [(2, 8)]),
    "gather": (PushGather(world=8, sizes=MUCH, source=bf16, wire=bf16, entry_barrier=False), [(2, 1)], [(2, 8)]),
    "gather_of_2": (PushGather(world=2, sizes=MUCH, source=f32, wire=f16), [(4, 1)], [(2, 2)]),
    "pull": (PullReduceScatter(world=8, sizes=MUCH, wire=bf16, result=f32, reduction=MEAN), [(2, 8)], [(4, 1)]),
    "pull_squares": (
        PullReduceScatter(world=8, sizes=MUCH, wire=bf16, result=f32, reduction=MEAN, squares=True, programs=16),
        [(2, 8)],
        [(4, 1)],
    ),
    "pull_float32": (
        PullReduceScatter(world=8, sizes=MUCH, wire=f32, result=f32, squares=True, exit_barrier=False),
        [(4, 8)],
        [(4, 1)],
    ),
    "pull_bfloat16": (PullReduceScatter(world=8, sizes=MUCH, wire=bf16, result=bf16), [(2, 8)], [(2, 1)]),
    "pull_of_3": (PullReduceScatter(world=3, sizes=MUCH, wire=f16, result=f32), [(2, 3)], [(4, 1)]),
    "pull_of_16": (PullReduceScatter(world=16, sizes=MUCH, wire=bf16, result=f32), [(2, 16)], [(4, 1)]),
    "one_shot": (OneShotAllReduce(world=8, sizes=MUCH, wire=f32, result=f32), [(4, 8)], [(4, 1)]),
    "one_shot_copy": (
        OneShotAllReduce(world=8, sizes=MUCH, wire=bf16, source=bf16, result=bf16),
        [(2, 1), (2, 8)],
        [(2, 1), (2, 1)],
    ),
    "one_shot_counts": (
        OneShotAllReduce(world=8, sizes=MUCH, wire=i64, source=i64, result=i64, reduction=RankReduction("max")),
        [(8, 1), (8, 8)],
        [(8, 1), (8, 1)],
    ),
    "two_shot": (TwoShotAllReduce(world=8, sizes=MUCH, wire=bf16), [(2, 8)], [(2, 8)]),
    "two_shot_copy": (TwoShotAllReduce(world=8, sizes=MUCH, wire=f32, source=f32), [(4, 1), (4, 8)], [(4, 1), (4, 8)]),
    "two_shot_max": (
        TwoShotAllReduce(world=4, sizes=MUCH, wire=f32, reduction=RankReduction("max")),
        [(4, 4)],
        [(4, 4)],
    ),
}


@functools.cache
def compiled(source: KernelSource) -> triton_adapter.Compiled:
    with triton_adapter.compiling():
        return triton_adapter.compile_function(
            source.function(),
            source.signature,
            source.constants,
            source.divisible,
            source.num_warps,
            source.num_stages,
            90,
            source.registers,
        )


def cubin_of(source: KernelSource, folder: Path) -> Path:
    path = folder / "cubin"
    path.write_bytes(compiled(source).cubin)
    return path


SOURCES = {name: transport.kernel for name, (transport, _, _) in KERNELS.items()} | {"barrier": Barrier(8).kernel}


@pytest.mark.parametrize("name", SOURCES)
def test_registers_suffice_and_nothing_spills(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    registers, local = triton_adapter.resource_usage(cubin_of(source, tmp_path))
    assert local == 0
    assert registers * 32 * source.num_warps <= REGISTERS
    assert compiled(source).shared <= 48 * 1024


@pytest.mark.parametrize("name", SOURCES)
def test_waiting_releases_and_acquires_for_all_gpus_and_uses_no_multicast(name: str) -> None:
    ptx = compiled(SOURCES[name]).ptx
    barriers = sum((KERNELS[name][0].entry_barrier, KERNELS[name][0].exit_barrier)) if name in KERNELS else 1
    # Each barrier signals once, reads its slots before the loop and in it, and may write a record.
    assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b32", ptx)) == 2 * barriers
    assert len(re.findall(r"atom\.global\.sys\.acquire\.add\.u32", ptx)) == 2 * barriers
    assert len(re.findall(r"atom\.\S*\.cas\.b32", ptx)) == barriers
    assert len(re.findall(r"\batom\.|\bred\.", ptx)) == 5 * barriers
    assert "multimem" not in ptx
    assert "nanosleep" not in ptx


@pytest.mark.parametrize("name", KERNELS)
def test_whole_chunks_move_16_bytes_at_a_time(name: str) -> None:
    transport, loads, stores = KERNELS[name]
    elements = transport.block // (32 * transport.warps)
    ptx = compiled(transport.kernel).ptx
    wide = r"\.global\.(?:v4\.b32|v2\.b64)"
    # More where the compiler unrolls a loop.
    assert len(re.findall(r"\bld" + wide, ptx)) >= sum(max(1, elements * size // 16) * many for size, many in loads)
    assert len(re.findall(r"\bst" + wide, ptx)) >= sum(max(1, elements * size // 16) * many for size, many in stores)


@pytest.mark.parametrize(
    ("name", "peers"),
    [("pull", 8), ("pull_squares", 8), ("pull_float32", 4), ("pull_bfloat16", 8), ("pull_of_16", 6), ("two_shot", 8)],
)
def test_loads_from_many_peers_are_in_flight_at_once(name: str, peers: int, tmp_path: Path) -> None:
    from triton import knobs

    transport, _, _ = KERNELS[name]
    assert isinstance(transport, PullReduceScatter | TwoShotAllReduce)
    command = [knobs.nvidia.cuobjdump.path, "-sass", str(cubin_of(transport.kernel, tmp_path))]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    operations = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+\s+)?([\w.]+)", listing, re.MULTILINE)
    first = operations.index("LDG.E.128")
    until = next(at for at in range(first, len(operations)) if operations[at] == "FADD")
    under_way = 16 * operations[first:until].count("LDG.E.128")
    of_a_peer = transport.block // (32 * transport.warps) * transport.wire.itemsize
    assert under_way >= of_a_peer * min(transport.world, peers)
