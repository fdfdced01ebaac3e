"""Steps over the memory of other GPUs, against NCCL; eager and as CUDA graphs. Needs GPUs that reach each other."""

from __future__ import annotations

import time

import pytest
import torch
from peer_steps import COPIES, KERNELS, device, model, over_peers, sharded, step_of, train

from harness import run_ranks
from weft import errors, knobs
from weft.inductor.transports.symmetric_memory import reachable, symmetric_buffer

pytestmark = pytest.mark.gpu(2)

WORLD = min(8, torch.cuda.device_count())


def trained(rank: int, world: int, transports: list[str], bf16: bool, recorded: bool) -> tuple[float, str, int]:
    """The largest difference between training over NCCL and over peers, the program, how often it was replayed."""
    nets = [sharded(model(64, 256), bf16) for _ in range(2)]
    expected = train(step_of(nets[0]), nets[0], rank, 6)
    compiled = over_peers(step_of(nets[1]), transports, recorded=recorded)
    _, got = train(compiled, nets[1], rank, 6)
    far = max((got[name] - value).abs().max().item() for name, value in expected[1].items())
    partitions = getattr(compiled.programs[-1], "partitions", compiled.programs[-1:])
    return far, compiled.programs[-1].source, sum(getattr(partition, "replays", 0) for partition in partitions)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("transports", "gather"), [(KERNELS, "peer_gather"), (COPIES, "copy_engine_gather")])
def test_sharded_training_is_that_over_nccl(transports: list[str], gather: str, bf16: bool, recorded: bool) -> None:
    for far, source, replays in run_ranks(trained, WORLD, transports, bf16, recorded, timeout=300, backend="nccl"):
        assert far < (2e-2 if bf16 else 1e-3)
        assert gather in source
        assert "c10d" not in source
        assert (replays > 0) is recorded


def shared(rank: int, world: int) -> list[int]:
    group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
    assert reachable("world", group, device()) is None
    buffer = symmetric_buffer("world", group, device(), 1 << 20, "")
    for peer in range(world):
        buffer.view(4 * rank, (1,), torch.int32, peer).fill_(100 * rank + peer)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    return buffer.view(0, (world,), torch.int32).tolist()


def test_what_a_rank_writes_its_peers_read() -> None:
    for rank, seen in enumerate(run_ranks(shared, WORLD, timeout=120, backend="nccl")):
        assert seen == [100 * peer + rank for peer in range(WORLD)]


def late(rank: int, world: int, recorded: bool) -> str:
    net = sharded(model(64, 256))
    with knobs.override(peer_timeout_s=2.0):
        step = over_peers(step_of(net), KERNELS, recorded=recorded)
        train(step, net, rank, 5)
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == world - 1:
        store.wait([f"told {rank}" for rank in range(world - 1)])
        return ""

    def go_on() -> None:
        for _ in range(20):
            train(step, net, rank, 1)
            time.sleep(0.5)

    with pytest.raises(errors.PeerTimeout) as caught:
        go_on()
    store.set(f"told {rank}", "")
    return str(caught.value)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graph"])
def test_a_rank_that_is_late_ends_the_others(recorded: bool) -> None:
    *others, _ = run_ranks(late, WORLD, recorded, timeout=120, backend="nccl")
    assert all(f"rank {WORLD - 1} (axis 'world') did not come" in text for text in others)
