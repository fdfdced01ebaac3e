"""The kernels of transports that touch this rank's memory alone, in triton's interpreter: against torch, to the bit."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from weft.inductor.multi_tensor.launch_plan import pointer_table
from weft.inductor.runtime.kernels import compile_kernels
from weft.inductor.transports.kernels import failure
from weft.inductor.transports.kernels.peer_kernel import PeerGroup
from weft.inductor.transports.kernels.reduce_scatter import LocalReduceScatter, PullReduceScatter
from weft.inductor.transports.kernels.reduction import RankReduction
from weft.inductor.transports.kernels.shard_copy import TYPES, ShardCopy

CPU = torch.device("cpu")
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
SIZES = [(1,), (7,), (512,), (2048,), (2049,), (64, 65), (4096, 3)]


def numbers(draw: torch.Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many magnitudes, with ties of rounding."""
    scale = 2.0 ** torch.randint(-6, 6, (size,), generator=draw)
    return (torch.randn(size, generator=draw) * scale).to(dtype)


@pytest.mark.parametrize(("source", "wire"), [*itertools.product(TYPES, [bf16]), (f32, f32), (bf16, f16)])
def test_shards_are_copied_to_the_arena_and_the_results(source: torch.dtype, wire: torch.dtype) -> None:
    draw, chosen = torch.Generator().manual_seed(1), random.Random(2)
    shapes = chosen.sample(SIZES, 5)
    shards = [numbers(draw, torch.Size(shape).numel(), source).view(shape) for shape in shapes]
    slots = [torch.full(shape, 7.0, dtype=wire) for shape in shapes]
    results = [torch.full((3, *shape), 9.0, dtype=wire) for shape in shapes]
    owns = [result[1] for result in results]

    made = ShardCopy(tuple(shard.numel() for shard in shards), source, wire)
    rows = made.rows(*([tensor.data_ptr() for tensor in of] for of in (shards, slots, owns)))
    (kernel,) = compile_kernels([made.kernel], CPU)
    kernel.launch(made.grid, 0, made.chunks, pointer_table(rows))

    for shard, slot, result in zip(shards, slots, results, strict=True):
        assert torch.equal(slot, shard.to(wire))
        assert torch.equal(result[1], shard.to(wire))
        assert torch.equal(result[::2], torch.full_like(result[::2], 9.0))


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("result", [f32, bf16])
def test_local_parts_are_summed_in_rank_order(world: int, rank: int, result: torch.dtype) -> None:
    draw, chosen = torch.Generator().manual_seed(world), random.Random(rank)
    sizes = [torch.Size(shape).numel() for shape in chosen.sample(SIZES, 5)]
    gap = 128  # elements between members, and in front of those of this rank
    starts = [*itertools.accumulate((-(-size // 8) * 8 + gap for size in sizes), initial=gap)]
    landing = [numbers(draw, starts[-1], bf16) for _ in range(world)]
    own = numbers(draw, starts[-1] + gap, bf16)
    landing[rank].fill_(torch.nan)  # nothing lands there
    results = [torch.zeros(size, dtype=result) for size in sizes]

    made = LocalReduceScatter(
        world=world,
        sizes=tuple(sizes),
        entry_barrier=False,
        exit_barrier=False,
        wire=bf16,
        result=result,
        reduction=RankReduction("sum", 1 / world),
    )
    bases = [own.data_ptr() if peer == rank else landing[peer].data_ptr() for peer in range(world)]
    record = torch.zeros(failure.WORDS, dtype=torch.int32)
    peers = PeerGroup(world, rank, torch.tensor(bases), torch.zeros(world, dtype=torch.int64), record, 1)
    landed = [start * bf16.itemsize for start in starts[:-1]]
    rows = made.rows([each.data_ptr() for each in results], landed, [at + gap * bf16.itemsize for at in landed])
    (kernel,) = compile_kernels([made.kernel], CPU)
    kernel.launch(made.grid, 0, *made.arguments(peers, 0, 0, made.chunks, pointer_table(rows)))

    for size, start, found in zip(sizes, starts, results, strict=False):
        parts = [
            own[start + gap :][:size].float() if peer == rank else landing[peer][start:][:size].float()
            for peer in range(world)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert torch.equal(found, (total * torch.tensor(1 / world, dtype=f32)).to(result))


def test_a_local_sum_has_many_programs_and_no_signal_pad_slots() -> None:
    large = (1 << 26, 1 << 20)
    landed = LocalReduceScatter(world=8, sizes=large, entry_barrier=False, exit_barrier=False, wire=bf16, result=f32)
    pulled = PullReduceScatter(world=8, sizes=large, wire=bf16, result=f32)
    assert landed.grid[0] == 1056 > pulled.grid[0]
    assert landed.slots == 0
