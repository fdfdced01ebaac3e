"""Memory that all ranks of a group can address: one buffer a rank, of the same size, mapped by all of its peers.

On GPUs it is torch's symmetric memory, and the ranks are those of one host. On the CPU it is a file without a name
(memfd) that each process maps, so that all that runs over peers can run on a CPU; the system frees it when the last of
them has ended, however it ended.

Ranks meet when a program is made, never while a step runs. A buffer begins with its rank's signal pad (see
``kernels/device.py``); the rest is the arena, which programs lay out, each for itself. A program that needs more than
there is gets a new buffer, and those made before keep theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import mmap
import os
import select
import socket
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from weft import errors, knobs, torch_adapter
from weft.capture.fake_world import current_fake_world
from weft.inductor.comm.kernels import failure
from weft.inductor.comm.kernels.transport import Peers
from weft.inductor.comm.meeting import Meeting

log = logging.getLogger(__name__)

# A signal pad has a part for each lane, and in it a row of words, one a rank, for each program of a kernel.
LANES = 8
PROGRAMS = 256
_WORD = 4  # bytes

# What a GPU's memory is given out in, where peers map it (bytes).
_GRANULE = 2 << 20

# Seconds that one look at a signal pad takes: on a GPU, and in triton's interpreter.
_LOOK = {"cuda": 1e-6, "cpu": 1e-3}

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class SymmetricBuffer:
    """The buffers of all ranks of a group, as one rank sees them.

    Args:
        parts: the buffers, uint8, in the order of the group.
        processes: handles (pidfd) of the ranks' processes, which it closes in the end.
        keep: what has to live as long as the buffers are used.

    Attributes:
        axis: the group's name in graphs.
        ranks: those of the world that are in the group, in its order.
        rank: this one's number in the group.
        size: bytes of the arena.
        peers: what kernels are given to find the buffers, and to wait for each other.
        timeout: seconds that a rank is waited for.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        parts: Sequence[torch.Tensor],
        processes: Sequence[int],
        keep: object,
    ) -> None:
        self.axis = axis
        self.ranks = tuple(ranks)
        self.rank = rank
        self.device = parts[rank].device
        self.timeout = knobs.peer_timeout_s
        pad = _pad_bytes(len(ranks))
        self.size = len(parts[rank]) - pad
        self._arenas = [part[pad:] for part in parts]
        self._processes = processes
        self._keep = keep
        self._told: list[str] = []
        self._lanes: list[str] = []
        self._record = torch.zeros(failure.WORDS, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._failed = ctypes.c_int32.from_address(self._record.data_ptr())
        patience = min(int(self.timeout / _LOOK[self.device.type]), 2**31 - 1)
        tables = [[part.data_ptr() + offset for part in parts] for offset in (pad, 0)]
        bases, pads = (torch.tensor(table, dtype=torch.int64).to(self.device) for table in tables)
        self.peers = Peers(len(ranks), rank, bases, pads, self._record, patience)
        weakref.finalize(self, _close, processes)

    def view(self, offset: int, sizes: Sequence[int], dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
        """The contiguous tensor at ``offset`` (bytes) of the arena of a rank of the group; of this one for None."""
        arena = self._arenas[self.rank if rank is None else rank]
        size = torch.Size(sizes).numel() * dtype.itemsize
        return arena[offset : offset + size].view(dtype).view(torch.Size(sizes))

    def slots(self, lane: str) -> int:
        """The first word of every signal pad that kernels of this lane wait at. Ranks must ask for lanes in one order.

        Raises:
            IndexError: there are more lanes than ``LANES``.
        """
        if lane not in self._lanes:
            if len(self._lanes) == LANES:
                raise IndexError(f"more than {LANES} lanes")
            self._lanes.append(lane)
        return self._lanes.index(lane) * PROGRAMS * len(self.ranks)

    def tell(self, collective: str) -> int:
        """The number under which a failure of ``collective`` (words for people) is recorded."""
        if collective not in self._told:
            self._told.append(collective)
        return self._told.index(collective)

    def check(self) -> None:
        """Return where no rank was waited for in vain so far. Reads the host's memory: no GPU is waited for.

        Raises:
            PeerLost: the process of the missing rank has ended.
            PeerTimeout: it has not.
        """
        if self._failed.value:
            found = failure.read(self._record)
            assert found is not None
            ended = bool(select.select([self._processes[found.rank]], [], [], 0)[0])
            kind = errors.PeerLost if ended else errors.PeerTimeout
            raise kind(self.ranks[found.rank], self.axis, self._told[found.collective], self.timeout)


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _pad_bytes(world: int) -> int:
    return _whole(LANES * PROGRAMS * world * _WORD, mmap.PAGESIZE)


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def buffer_bytes(world: int, size: int, device: torch.device) -> int:
    """Bytes that a buffer with an arena of ``size`` takes of each of ``world`` ranks. torch's allocator counts none."""
    least = _pad_bytes(world) + max(size, mmap.PAGESIZE)
    return _whole(least, _GRANULE if device.type == "cuda" else mmap.PAGESIZE)


# ---- which ranks can share memory

_reachable: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str | None]] = weakref.WeakKeyDictionary()


def reachable(axis: str, group: str, device: torch.device) -> str | None:
    """Why the ranks of a group cannot address each other's memory, in words; None where they can.

    Every rank of the group must call this, and all get the same answer. It is remembered.

    Args:
        axis: the group's name in graphs.
        group: as torch registered it.
        device: that of this rank's tensors.

    Raises:
        PeersUnreachable: a rank did not come to say what it can.
    """
    if current_fake_world() is not None:
        return "the other ranks of a fake world are not there"
    known = _reachable.setdefault(torch_adapter.process_group(group), {})
    if device.type not in known:
        meeting = Meeting(axis, group, f"reachable/{device.type}")
        why = meeting.verdict(_why_not(meeting.lead(_host()), device))
        if why is None:
            meeting = Meeting(axis, group, f"watched/{device.type}")
            why = meeting.verdict(_why_not_watched(meeting))
        if why is None and device.type == "cuda":
            why = Meeting(axis, group, "mapped").verdict(_why_not_mapped(group, device))
        known[device.type] = why
    return known[device.type]


def _host() -> str:
    """What two processes have in common that run on one machine and see each other, as far as a container tells."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def _why_not(host: str, device: torch.device) -> str | None:
    here = _host()
    if here != host:
        names = host.split()[0], here.split()[0]
        if names[0] == names[1]:
            return f"they are on different hosts or in different containers, all called {names[0]}"
        return f"they are on different hosts, {names[0]} and {names[1]}"
    if device.type == "cpu":
        return None
    if device.type != "cuda" or not torch_adapter.can_share_gpu_memory():
        return f"this torch has no symmetric memory on {device.type}"
    wrong = _multicast()
    if wrong:
        return str(errors.MulticastNotOff(wrong))
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    blind = next((other for other in others if not torch.cuda.can_device_access_peer(device, other)), None)
    return None if blind is None else f"GPU {device.index} has no access to the memory of GPU {blind}"


def _why_not_watched(meeting: Meeting) -> str | None:
    """Why this process cannot be told of the end of another: some containers refuse the call, or hide processes."""
    try:
        _close(_processes(meeting))
    except OSError as error:
        return f"rank {dist.get_rank()} cannot watch the processes of the others ({error})"
    return None


def _why_not_mapped(group: str, device: torch.device) -> str | None:
    """Why a page of memory of all ranks cannot be mapped, though GPUs can: some containers do not let processes."""
    try:
        torch_adapter.symmetric_peers(torch_adapter.symmetric_empty(mmap.PAGESIZE, device), group)
    except RuntimeError as error:
        return f"mapping their memory failed ({str(error).splitlines()[0]})"
    return None


def _multicast() -> list[str]:
    """The variables that do not switch multicast off, and what they are."""
    found = ((name, os.environ.get(name), wanted) for name, wanted in NO_MULTICAST.items())
    return [f"{name} is {'not set' if value is None else value}" for name, value, wanted in found if value != wanted]


# ---- making buffers

_buffers: weakref.WeakKeyDictionary[dist.ProcessGroup, SymmetricBuffer] = weakref.WeakKeyDictionary()


def symmetric_buffer(axis: str, group: str, device: torch.device, size: int, plan: str) -> SymmetricBuffer:
    """A buffer for a program that needs ``size`` bytes: the group's, or a new one where that is too small.

    Every rank of the group must call this, as often and in the same order as the others.

    Args:
        axis: the group's name in graphs.
        group: as torch registered it.
        device: that of this rank's tensors.
        plan: what has to be the same on all ranks, as text.

    Raises:
        MulticastNotOff: the environment lets a library switch NVLink multicast on.
        PeersUnreachable: the ranks cannot address each other's memory, or there is not enough of it.
        ArenaMismatch: ``size`` or ``plan`` differs between ranks.
    """
    why = reachable(axis, group, device)
    if why is not None:
        raise errors.PeersUnreachable(axis, why)
    pg = torch_adapter.process_group(group)
    _agree(axis, group, f"{size} bytes, plan {hashlib.sha256(plan.encode()).hexdigest()[:16]}")
    known = _buffers.get(pg)
    if known is None or known.size < size or known.device != device:
        make = _on_gpu if device.type == "cuda" else _on_cpu
        known = _buffers[pg] = make(axis, group, device, max(size, mmap.PAGESIZE))
        log.info("the ranks over %s share %.1f MiB each", axis, known.size / 2**20)
    return known


def _agree(axis: str, group: str, plan: str) -> None:
    meeting = Meeting(axis, group, "plan")
    first = meeting.lead(plan)
    rank = dist.get_rank()
    difference = None if first == plan else f"rank {rank} has {plan}, rank {meeting.ranks[0]} {first}"
    why = meeting.verdict(difference)
    if why is not None:
        raise errors.ArenaMismatch(axis, rank, why)


def refuse_multicast() -> None:
    """Return where no library will switch NVLink multicast on in this process.

    Raises:
        MulticastNotOff: one would.
    """
    wrong = _multicast()
    if wrong:
        raise errors.MulticastNotOff(wrong)


def _on_gpu(axis: str, group: str, device: torch.device, size: int) -> SymmetricBuffer:
    refuse_multicast()
    meeting = Meeting(axis, group, "buffer")
    pad = _pad_bytes(len(meeting.ranks))
    memory = torch_adapter.symmetric_empty(_whole(pad + size, mmap.PAGESIZE), device)
    memory[:pad].zero_()
    # A peer that has mapped this pad may signal at once.
    torch.cuda.synchronize(device)
    processes = _processes(meeting)
    try:
        parts, keep = torch_adapter.symmetric_peers(memory, group)
    except RuntimeError as error:
        raise errors.PeersUnreachable(axis, str(error).splitlines()[0]) from error
    return SymmetricBuffer(axis, meeting.ranks, meeting.rank, parts, processes, keep)


def _on_cpu(axis: str, group: str, device: torch.device, size: int) -> SymmetricBuffer:
    meeting = Meeting(axis, group, "buffer")
    world = len(meeting.ranks)
    part = _whole(_pad_bytes(world) + size, mmap.PAGESIZE)
    file, whole, why = -1, torch.empty(0, dtype=torch.uint8), None
    try:
        if meeting.rank == 0:
            file = os.memfd_create("weft")
            os.truncate(file, world * part)
    except OSError as error:
        why = f"{world * part} bytes for all of them cannot be had ({error})"
    name = meeting.lead("" if why else f"/proc/{os.getpid()}/fd/{file}")
    try:
        if name:
            file = file if meeting.rank == 0 else os.open(name, os.O_RDWR)
            whole = torch.frombuffer(mmap.mmap(file, world * part), dtype=torch.uint8)
    except OSError as error:
        why = f"rank {dist.get_rank()} cannot open the memory of rank {meeting.ranks[0]} ({error})"
    # The first rank's file has to be there until all have opened it.
    why = meeting.verdict(why)
    if file >= 0:
        os.close(file)
    if why is not None:
        raise errors.PeersUnreachable(axis, why)
    return SymmetricBuffer(axis, meeting.ranks, meeting.rank, whole.split(part), _processes(meeting), whole)


def _processes(meeting: Meeting) -> list[int]:
    """Handles of the processes of all ranks: unlike numbers of processes, they are never given to others."""
    return [os.pidfd_open(int(text)) for text in meeting.exchange(str(os.getpid()))]
