"""Many all-gathers in flight over gloo: the answers of torch.distributed, and no memory harmed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft.gloo
from harness import run_ranks

pytestmark = pytest.mark.gloo

# torch's own kernels end with a signal after some 5,000 gathers of such sizes.
ROUNDS = 3000
SIZES = [(16,), (48, 32), (16, 32), (1,), (512,), (80, 32), (0, 4), (16, 80)]


def many_in_flight(rank: int, world: int, coalesced: bool) -> int:
    """How many gathers gave a wrong answer, of ROUNDS times all SIZES at once."""
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    filled = [[torch.full(size, 100.0 * i + r) for r in range(world)] for i, size in enumerate(SIZES)]
    expected = [torch.cat(parts) for parts in filled]
    wrong = 0
    for _ in range(ROUNDS):
        parts = [parts[rank] * 1 for parts in filled]
        if coalesced:
            started = ops.all_gather_into_tensor_coalesced(parts, world, group)
        else:
            started = [ops.all_gather_into_tensor(part, world, group) for part in parts]
        del parts
        whole = [ops.wait_tensor(tensor) for tensor in started]
        wrong += sum(not torch.equal(*pair) for pair in zip(whole, expected, strict=True))
    return wrong


def every_dtype(rank: int, world: int) -> list[str]:
    """The dtypes for which a gather or a broadcast is not what all ranks' tensors say."""
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16]
    different = []
    for dtype in dtypes:
        parts = [(torch.arange(12).reshape(3, 4).t() + r).to(dtype) for r in range(world)]
        whole = ops.wait_tensor(ops.all_gather_into_tensor(parts[rank], world, group))
        sent = [ops.broadcast(part, world - 1, group) for part in (parts[rank], parts[rank][0, 0])]
        received = [ops.wait_tensor(tensor) for tensor in sent]
        pairs = [(whole, torch.cat(parts)), (received[0], parts[-1]), (received[1], parts[-1][0, 0])]
        if any(a.dtype != dtype or not torch.equal(_numbers(a), _numbers(b)) for a, b in pairs):
            different.append(str(dtype))
    return different


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_complex() else tensor.double()


@pytest.mark.parametrize("coalesced", [False, True])
def test_gathers_in_flight_together(coalesced: bool) -> None:
    assert weft.gloo is not None
    assert run_ranks(many_in_flight, 2, coalesced) == [0, 0]


def test_gathers_and_broadcasts_of_every_dtype() -> None:
    assert run_ranks(every_dtype, 2) == [[], []]
