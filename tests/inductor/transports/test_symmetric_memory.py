"""Memory that ranks share: everybody sees what anybody writes, nothing is left behind, and who cannot is told why."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from harness import RanksFailed, run_ranks
from weft import errors, host_processes, knobs, torch_adapter
from weft.inductor.transports import symmetric_memory
from weft.inductor.transports.kernels import failure
from weft.inductor.transports.symmetric_memory import SymmetricBuffer, reachable, refuse_multicast, symmetric_buffer

CPU = torch.device("cpu")


def world_group() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def a_buffer(size: int = 4096, plan: str = "", group: str | None = None) -> SymmetricBuffer:
    return symmetric_buffer("world", group or world_group(), CPU, size, plan)


# ---- on the CPU


def everybody_writes_to_everybody(rank: int, world: int) -> list[float]:
    buffer = a_buffer()
    for peer in range(world):
        buffer.view(rank * 8, (2,), torch.float32, peer).fill_(10 * rank + peer)
    dist.barrier()
    return buffer.view(0, (2 * world,), torch.float32).tolist()


def test_what_a_rank_writes_its_peers_read() -> None:
    for rank, seen in enumerate(run_ranks(everybody_writes_to_everybody, 3)):
        assert seen == [10.0 * writer + rank for writer in range(3) for _ in range(2)]


def addresses(rank: int, world: int) -> list[bool]:
    buffer = a_buffer(100)
    inside = buffer.view(0, (1,), torch.uint8).data_ptr() == buffer.peers.bases[rank].item()
    pads = [int(address) for address in buffer.peers.pads]
    zero = [not torch.frombuffer(_memory(pad, 4096), dtype=torch.uint8).any() for pad in pads]
    pad_bytes = 4 * symmetric_memory.MAX_STREAMS * symmetric_memory.PROGRAMS * world
    apart = buffer.peers.bases[rank].item() - pads[rank] >= pad_bytes
    return [inside, apart, *zero, buffer.size >= 100, buffer.rank == rank]


def _memory(address: int, size: int) -> Any:
    import ctypes

    return (ctypes.c_uint8 * size).from_address(address)


def test_kernels_are_given_where_buffers_and_pads_lie() -> None:
    assert all(all(found) for found in run_ranks(addresses, 2))


def one_after_the_other(rank: int, world: int) -> list[Any]:
    first = a_buffer(1000)
    first.view(0, (1,), torch.float32).fill_(rank)
    second, third = a_buffer(900), a_buffer(1 << 20)
    fourth = a_buffer(1 << 19)
    dist.barrier()
    kept = first.view(0, (1,), torch.float32, 1 - rank).item()
    return [second is first, third is first, fourth is third, third.size >= 1 << 20, kept]


def test_a_program_that_fits_takes_the_buffer_that_there_is() -> None:
    assert run_ranks(one_after_the_other, 2) == [[True, False, True, True, 1.0], [True, False, True, True, 0.0]]


def of_subgroups(rank: int, world: int) -> tuple[list[int], float]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    buffer = symmetric_buffer("replicate", groups[rank % 2].group_name, CPU, 64, "")
    buffer.view(0, (1,), torch.float32, 1 - buffer.rank).fill_(rank)
    dist.barrier()
    return list(buffer.ranks), buffer.view(0, (1,), torch.float32).item()


def test_groups_share_memory_of_their_own() -> None:
    assert run_ranks(of_subgroups, 4) == [([0, 2], 2.0), ([1, 3], 3.0), ([0, 2], 0.0), ([1, 3], 1.0)]


def unlike(rank: int, world: int, plans: list[str], sizes: list[int]) -> str:
    with pytest.raises(errors.ArenaMismatch) as caught:
        a_buffer(sizes[rank], plans[rank])
    return str(caught.value)


@pytest.mark.parametrize(("plans", "sizes"), [(["a", "b"], [64, 64]), (["a", "a"], [64, 96])])
def test_different_plans_are_refused_on_all_ranks(plans: list[str], sizes: list[int]) -> None:
    for text in run_ranks(unlike, 2, plans, sizes):
        assert "rank 1 has" in text
        assert "rank 0" in text


def more_than_there_is(rank: int, world: int) -> str:
    with pytest.raises(errors.PeersUnreachable) as caught:
        a_buffer(1 << 50)
    return str(caught.value)


def test_memory_that_cannot_be_had_is_an_error_on_all_ranks() -> None:
    assert all("cannot address each other's memory" in text for text in run_ranks(more_than_there_is, 2))


def lanes(rank: int, world: int) -> list[int]:
    buffer = a_buffer()
    found = [buffer.first_word(name) for name in ("gather", "reduce", "gather")]
    for extra in range(symmetric_memory.MAX_STREAMS - 2):
        buffer.first_word(f"stream {extra}")
    with pytest.raises(IndexError):
        buffer.first_word("one too many")
    return found


def test_each_lane_has_slots_of_its_own() -> None:
    step = symmetric_memory.PROGRAMS * 2
    assert run_ranks(lanes, 2) == [[0, step, 0]] * 2


def as_if_on_gpus(rank: int, world: int) -> list[Any]:
    """The steps of sharing memory of GPUs, with a CPU's in its place."""
    said: list[str] = []
    torch.cuda.synchronize = lambda device: said.append("synchronized")  # type: ignore[assignment]
    torch_adapter.symmetric_empty = lambda size, device: torch.ones(size, dtype=torch.uint8)  # type: ignore

    def peers(memory: torch.Tensor, group: str) -> tuple[list[torch.Tensor], object]:
        said.append("mapped")
        return [memory] * world, memory

    torch_adapter.symmetric_peers = peers  # type: ignore[assignment]
    for name in symmetric_memory.NO_MULTICAST:
        os.environ.pop(name, None)
    with pytest.raises(errors.MulticastNotOff):
        symmetric_memory._on_gpu("world", world_group(), CPU, 4096)
    os.environ.update(symmetric_memory.NO_MULTICAST)
    buffer = symmetric_memory._on_gpu("world", world_group(), CPU, 4096)
    pad = torch.frombuffer(_memory(int(buffer.peers.pads[rank]), 4 * symmetric_memory.MAX_STREAMS), dtype=torch.uint8)
    return [said, bool(pad.any()), bool(buffer.view(0, (8,), torch.uint8).all()), buffer.size >= 4096]


def test_pads_of_gpus_are_clear_before_peers_can_signal() -> None:
    assert run_ranks(as_if_on_gpus, 2) == [[["synchronized", "mapped"], False, True, True]] * 2


# ---- nothing is left behind


def descriptors() -> int:
    """How many of this process's are of shared memory or of processes; connections come and go beside them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd" in link or "pidfd" in link for link in found)


def files_of(rank: int, world: int, ends: str) -> set[str]:
    before = set(os.listdir("/dev/shm"))
    held = descriptors()
    buffer = a_buffer(1 << 16)
    buffer.view(0, (1,), torch.float32).fill_(1)
    left = descriptors() - held
    assert left == world + 1, left  # a handle of each process, and the mapping's own
    if ends == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return set(os.listdir("/dev/shm")) - before


@pytest.mark.parametrize("ends", ["well", "killed"])
def test_no_file_stays_whatever_the_end(ends: str) -> None:
    before = set(os.listdir("/dev/shm"))
    if ends == "well":
        assert run_ranks(files_of, 2, ends) == [set(), set()]
    else:
        with pytest.raises(RanksFailed):
            run_ranks(files_of, 2, ends)
    assert set(os.listdir("/dev/shm")) <= before


# ---- failures


def tells_who(rank: int, world: int, dies: bool) -> tuple[str, str, int]:
    with knobs.override(peer_timeout_s=7.5):
        buffer = a_buffer()
    buffer.check()
    if rank == 1:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        return "", "", 1
    time.sleep(0.3)
    number = buffer.failure_number("push_gather of model.a, model.b at train.py:7 in step")
    buffer.peers.failure[2:4] = torch.tensor([number, 1], dtype=torch.int32)  # type: ignore[index]
    buffer.peers.failure[0] = int(failure.FailureKind.ENTRY_BARRIER)  # type: ignore[index]
    with pytest.raises(errors.WeftError) as caught:
        buffer.check()
    return type(caught.value).__name__, str(caught.value), caught.value.rank  # type: ignore[attr-defined]


def test_a_rank_that_is_late_is_told_from_one_that_is_dead() -> None:
    kind, text, missing = run_ranks(tells_who, 2, False)[0]
    assert (kind, missing) == ("PeerTimeout", 1)
    assert "rank 1 (axis 'world')" in text
    assert "train.py:7" in text
    assert "7.5 s" in text
    assert "WEFT_PEER_TIMEOUT_S" in text


def dead_one(rank: int, world: int) -> None:
    kind, text, missing = tells_who(rank, world, True)
    assert (kind, missing) == ("PeerLost", 1)
    assert "died" in text
    raise ValueError("said so")


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(dead_one, 2)
    assert "said so" in str(caught.value)


def never_comes(rank: int, world: int) -> str:
    dist.barrier()  # gloo connects all ranks before the first of them may go
    if rank == 1:
        return ""
    with knobs.override(peer_timeout_s=0.5), pytest.raises(errors.PeersUnreachable) as caught:
        a_buffer()
    return str(caught.value)


def test_a_rank_that_does_not_come_to_a_rendezvous_is_an_error() -> None:
    assert "not all of 2 ranks came" in run_ranks(never_comes, 2)[0]


# ---- who cannot


def apart(rank: int, world: int) -> tuple[str | None, str, str | None]:
    host_processes.host = lambda: f"host{rank} {rank}"  # type: ignore[assignment]
    why = reachable("world", world_group(), CPU)
    with pytest.raises(errors.PeersUnreachable) as caught:
        a_buffer()
    return why, str(caught.value), reachable("world", world_group(), CPU)


def test_ranks_of_different_hosts_agree_that_they_cannot() -> None:
    for why, text, again in run_ranks(apart, 2):
        assert why == again == "they are on different hosts, host0 and host1"
        assert "different hosts" in text
        assert "NCCL" in text


def in_containers(rank: int, world: int) -> str | None:
    host_processes.host = lambda: f"host boot pid:[{rank}]"  # type: ignore[assignment]
    return reachable("world", world_group(), CPU)


def test_containers_that_do_not_see_each_other_are_no_peers() -> None:
    assert (
        run_ranks(in_containers, 2) == ["they are on different hosts or in different containers, all called host"] * 2
    )


def test_a_sandbox_may_hide_what_tells_hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(*_: object) -> str:
        raise FileNotFoundError

    assert len(host_processes.host().split()) == 3
    monkeypatch.setattr(host_processes.Path, "read_text", hidden)
    monkeypatch.setattr(os, "readlink", hidden)
    assert host_processes.host() == socket.gethostname()


def not_watched(rank: int, world: int) -> tuple[str | None, int]:
    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    held = descriptors()
    if rank == 1:
        os.pidfd_open = refused  # type: ignore[assignment]
    return reachable("world", world_group(), CPU), descriptors() - held


def test_where_processes_cannot_be_watched_nobody_shares_memory() -> None:
    why = "rank 1 cannot watch the processes of the others ([Errno 1] Operation not permitted)"
    assert run_ranks(not_watched, 2) == [(why, 0)] * 2


def on_gpus_that_are_not_there(rank: int, world: int) -> list[str | None]:
    return [reachable("world", world_group(), torch.device("cuda", rank)), reachable("world", world_group(), CPU)]


def test_what_is_reachable_depends_on_the_device() -> None:
    for on_gpu, on_cpu in run_ranks(on_gpus_that_are_not_there, 2):
        assert on_gpu == "this torch has no symmetric memory on cuda"
        assert on_cpu is None


def test_a_fake_world_has_no_peers() -> None:
    with weft.fake_world(8):
        assert reachable("world", world_group(), CPU) == "the other ranks of a fake world are not there"


def test_gpus_share_nothing_unless_multicast_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    refuse_multicast()
    monkeypatch.setattr(torch_adapter, "can_share_gpu_memory", lambda: True)
    for name, wrong in (("NCCL_NVLS_ENABLE", "1"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", None)):
        monkeypatch.setenv(name, wrong) if wrong else monkeypatch.delenv(name)
        with pytest.raises(errors.MulticastNotOff) as caught:
            refuse_multicast()
        text = str(caught.value)
        assert f"{name} is {wrong or 'not set'}" in text
        assert all(f"{each}={value}" in text for each, value in off.items())
        assert symmetric_memory._why_not(host_processes.host(), torch.device("cuda", 0)) == text
        monkeypatch.setenv(name, off[name])
