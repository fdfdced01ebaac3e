"""Symmetric memory: one buffer per rank of a group, all of the same size, each mapped by all ranks.

On GPUs it is torch's symmetric memory, and the ranks are on one host. On the CPU it is an anonymous file (memfd) that
each process maps, so that every peer-access collective can be tested without a GPU. The kernel of the operating system
frees it when the last process has ended, also after a crash.

The rendezvous takes place when a program is compiled, never while a step runs. A buffer begins with its rank's signal
pad (see ``kernels/device_functions.py``); the rest is the arena. Each program has its own arena plan; the
programs of a group share the buffer. A program that needs more bytes than the buffer has gets a new, larger one, and
earlier programs keep the old one.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import select
import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft import errors, host_processes, knobs, torch_adapter
from weft.capture.agreement import device_watch
from weft.capture.agreement.store_rendezvous import StoreRendezvous
from weft.capture.fake.fake_world import current_fake_world
from weft.inductor.transports.kernels import failure
from weft.inductor.transports.kernels.peer_kernel import PeerGroup
from weft.inductor.transports.rendezvous import peer_rendezvous

log = logging.getLogger(__name__)

# A signal pad has a part per communication stream, with a row per program of a kernel and a word per rank. Kernels of
# different streams run at the same time; with shared words one barrier would take the signals of another.
MAX_STREAMS = 8
PROGRAMS = 256
_WORD = 4  # bytes

# Granularity of GPU memory that peers can map, in bytes.
_GRANULARITY = 2 << 20

# Seconds per poll of a signal pad, on a GPU and in Triton's interpreter. Kernels count polls, so the timeout becomes a
# number of polls.
_SECONDS_PER_POLL = {"cuda": 1e-6, "cpu": 1e-3}

# Seconds in which a kernel that waits notices that the host has ended all waiting: it looks every 64 polls.
_NOTICED_S = 1.0

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class SymmetricBuffer:
    """The buffers of all ranks of a group, as mapped into this process.

    Args:
        axis: the group's name in graphs.
        ranks: global ranks of the group, in its order.
        rank: this process's rank in the group.
        parts: the buffers, uint8, in the order of the group.
        processes: pidfds of the ranks' processes; the buffer owns and closes them.
        keep: an object that must stay alive as long as the buffers are used.

    Attributes:
        axis: the group's name in graphs.
        ranks: global ranks of the group, in its order.
        rank: this process's rank in the group.
        device: of this rank's buffer.
        size: bytes of the arena.
        peers: kernel arguments: base addresses of arenas and signal pads, the failure record, the poll limit.
        timeout: seconds until a missing rank is an error.
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
        # The pad comes first, so its address does not depend on the size of the arena.
        pad = _pad_bytes(len(ranks))
        self.size = len(parts[rank]) - pad
        self._arenas = [part[pad:] for part in parts]
        self._processes = processes
        self._keep = keep
        self._descriptions: list[str] = []
        self._stream_names: list[str] = []
        self._record = torch.zeros(failure.WORDS, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        # Kernels write this record over PCIe into pinned host memory, so check() can read it without a synchronisation.
        self._failed = ctypes.c_int32.from_address(self._record.data_ptr())
        # Kernels have no clock that is the same on all GPUs, so they count. The counter is an int32.
        max_polls = min(int(self.timeout / _SECONDS_PER_POLL[self.device.type]), 2**31 - 1)
        tables = [[part.data_ptr() + offset for part in parts] for offset in (pad, 0)]
        # Each process maps the buffers at addresses of its own, so these tables differ between ranks. Offsets do not.
        bases, pads = (torch.tensor(table, dtype=torch.int64).to(self.device) for table in tables)
        self.peers = PeerGroup(len(ranks), rank, bases, pads, self._record, max_polls)
        weakref.finalize(self, _close, processes)
        device_watch.shared_memory.add(self)

    def view(self, offset: int, sizes: Sequence[int], dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
        """A contiguous tensor at ``offset`` bytes of an arena.

        Args:
            rank: the owner of the arena, as a rank of the group; None for this rank.
        """
        arena = self._arenas[self.rank if rank is None else rank]
        # Offsets are multiples of 256 bytes, so the view to any dtype is aligned.
        size = torch.Size(sizes).numel() * dtype.itemsize
        return arena[offset : offset + size].view(dtype).view(torch.Size(sizes))

    def first_word(self, stream_name: str) -> int:
        """Index of the first signal-pad word for kernels of a communication stream.

        Indices are given out in the order of first calls, so all ranks must ask in the same order. Otherwise a rank
        would signal words that its peers do not poll, and barriers would time out.

        Raises:
            IndexError: there are more than ``MAX_STREAMS`` streams.
        """
        if stream_name not in self._stream_names:
            if len(self._stream_names) == MAX_STREAMS:
                raise IndexError(f"more than {MAX_STREAMS} communication streams")
            self._stream_names.append(stream_name)
        # Stream by stream, program by program, rank by rank: the layout that kernels compute with
        # (`device_functions.py`).
        return self._stream_names.index(stream_name) * PROGRAMS * len(self.ranks)

    def failure_number(self, collective: str) -> int:
        """The number that stands for ``collective`` (a description for messages) in the failure record."""
        if collective not in self._descriptions:
            self._descriptions.append(collective)
        return self._descriptions.index(collective)

    def check(self) -> None:
        """Raise if a rank was missing at a barrier of this buffer so far. It reads pinned host memory and does not
        synchronise with the GPU.

        Raises:
            PeerLost: the process of the missing rank has ended.
            PeerTimeout: it is still running.
        """
        # The kernel writes this word last, with release order, so the others are there.
        if self._failed.value:
            found = failure.read(self._record)
            assert found is not None
            # A pidfd becomes readable when its process has ended.
            ended = bool(select.select([self._processes[found.rank]], [], [], 0)[0])
            kind = errors.PeerLost if ended else errors.PeerTimeout
            raise kind(self.ranks[found.rank], self.axis, self._descriptions[found.collective], self.timeout)

    def end_waiting(self) -> str:
        """Have kernels that wait for a rank go on, and later ones not wait. What they compute is wrong.

        Returns the collective that a kernel waited for; "" where none did.
        """
        failure.end_waiting(self._record)
        until = time.monotonic() + _NOTICED_S
        while self._failed.value == failure.FailureKind.STOPPED and time.monotonic() < until:
            time.sleep(0.01)
        found = failure.read(self._record)
        if found is None or found.what is failure.FailureKind.STOPPED:
            return ""
        return self._descriptions[found.collective]


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _pad_bytes(world: int) -> int:
    return _round_up(MAX_STREAMS * PROGRAMS * world * _WORD, mmap.PAGESIZE)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def buffer_bytes(world: int, size: int, device: torch.device) -> int:
    """Bytes per rank of a buffer with an arena of ``size`` bytes for ``world`` ranks. torch's caching allocator does
    not count them."""
    least = _pad_bytes(world) + max(size, mmap.PAGESIZE)
    # The driver maps whole granules, and memory limits are about what it takes.
    return _round_up(least, _GRANULARITY if device.type == "cuda" else mmap.PAGESIZE)


# ---- peer access

_reachable: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str | None]] = weakref.WeakKeyDictionary()


def reachable(axis: str, group: str, device: torch.device) -> str | None:
    """Why the ranks of a group cannot access each other's memory, as a message; None if they can.

    A collective call: every rank of the group must call it, and all get the same answer, so that all choose the same
    transports. The answer is cached per group and device type.

    Args:
        axis: the group's name in graphs.
        group: the name under which torch registered it.
        device: of this rank's tensors.

    Raises:
        PeersUnreachable: a rank did not join the rendezvous within ``knobs.peer_timeout_s``.
    """
    if current_fake_world() is not None:
        return "the other ranks of a fake world are not there"
    # By group object, not by name: a name may be used again after the group is destroyed.
    known = _reachable.setdefault(torch_adapter.process_group(group), {})
    if device.type not in known:
        # Each check is agreed on before the next one starts: a rank that skipped a rendezvous would block the others.
        rendezvous = peer_rendezvous(axis, group, f"reachable/{device.type}")
        why = rendezvous.first_objection(_why_not(rendezvous.broadcast(host_processes.host()), device))
        if why is None:
            rendezvous = peer_rendezvous(axis, group, f"watched/{device.type}")
            why = rendezvous.first_objection(_why_not_watched(rendezvous))
        # Last, since it maps memory: rendezvous of torch blocks where a rank does not come.
        if why is None and device.type == "cuda":
            why = peer_rendezvous(axis, group, "mapped").first_objection(_why_not_mapped(group, device))
        # Also a failure is remembered: ranks would otherwise make these rendezvous for every schedule.
        known[device.type] = why
    return known[device.type]


def _why_not(host: str, device: torch.device) -> str | None:
    """Why this process cannot share memory with those of ``host`` (see :func:`weft.host_processes.host`); None if it
    can."""
    # The cheapest questions first, and those whose answer says most to the user.
    here = host_processes.host()
    if here != host:
        names = host.split()[0], here.split()[0]
        if names[0] == names[1]:
            return f"they are on different hosts or in different containers, all called {names[0]}"
        return f"they are on different hosts, {names[0]} and {names[1]}"
    if device.type == "cpu":
        return None
    if device.type != "cuda" or not torch_adapter.can_share_gpu_memory():
        return f"this torch has no symmetric memory on {device.type}"
    # Before torch's first rendezvous, which would create the multicast object.
    wrong = _multicast()
    if wrong:
        return str(errors.MulticastNotOff(wrong))
    # Asked for all visible GPUs: which of them the peers use is not known here.
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    blind = next((other for other in others if not torch.cuda.can_device_access_peer(device, other)), None)
    return None if blind is None else f"GPU {device.index} has no access to the memory of GPU {blind}"


def _why_not_watched(rendezvous: StoreRendezvous) -> str | None:
    """Why this process cannot watch its peers' processes with pidfds; None if it can. Some containers refuse the call
    or hide processes, and then a dead rank could not be told from a slow one."""
    try:
        # Opened and closed again: what counts is whether it is allowed.
        _close(_processes(rendezvous))
    except OSError as error:
        return f"rank {dist.get_rank()} cannot watch the processes of the others ({error})"
    return None


def _why_not_mapped(group: str, device: torch.device) -> str | None:
    """Why one page of every rank cannot be mapped, although the GPUs have peer access; None if it can. Some containers
    forbid it to processes."""
    try:
        # Memory that peers may map comes from another allocator than torch's usual one.
        torch_adapter.symmetric_peers(torch_adapter.symmetric_empty(mmap.PAGESIZE, device), group)
    except RuntimeError as error:
        return f"mapping their memory failed ({str(error).splitlines()[0]})"
    return None


def _multicast() -> list[str]:
    """The environment variables that do not switch multicast off, each with its value."""
    found = ((name, os.environ.get(name), wanted) for name, wanted in NO_MULTICAST.items())
    return [f"{name} is {'not set' if value is None else value}" for name, value, wanted in found if value != wanted]


# ---- allocation

_buffers: weakref.WeakKeyDictionary[dist.ProcessGroup, SymmetricBuffer] = weakref.WeakKeyDictionary()


def symmetric_buffer(axis: str, group: str, device: torch.device, size: int, plan: str) -> SymmetricBuffer:
    """A buffer with an arena of at least ``size`` bytes: the group's current one, or a new one if that is too small.

    A collective call: every rank of the group must call it equally often and in the same order.

    Args:
        axis: the group's name in graphs.
        group: the name under which torch registered it.
        device: of this rank's tensors.
        size: bytes of the arena.
        plan: text that must be equal on all ranks. Ranks with different arena plans would read each other's wrong
        bytes.

    Raises:
        MulticastNotOff: the environment lets a library use NVLink multicast.
        PeersUnreachable: the ranks have no peer access, or there is not enough memory.
        ArenaMismatch: ``size`` or ``plan`` differs between ranks.
    """
    why = reachable(axis, group, device)
    if why is not None:
        raise errors.PeersUnreachable(axis, why)
    pg = torch_adapter.process_group(group)
    # Before any memory is mapped: ranks of different plans would read each other's wrong bytes.
    _agree(axis, group, f"{size} bytes, plan {hashlib.sha256(plan.encode()).hexdigest()[:16]}")
    # All ranks have agreed on `size` and have the same history, so they come to the same branch.
    known = _buffers.get(pg)
    if known is None or known.size < size or known.device != device:
        make = _on_gpu if device.type == "cuda" else _on_cpu
        # A program that was bound before keeps the smaller buffer: its kernels have those addresses. Memory of both is
        # held until it is gone.
        known = _buffers[pg] = make(axis, group, device, max(size, mmap.PAGESIZE))
        log.info("the ranks over %s share %.1f MiB each", axis, known.size / 2**20)
    return known


def _agree(axis: str, group: str, plan: str) -> None:
    """Raise ArenaMismatch on all ranks if ``plan`` differs from that of the group's first rank on any of them."""
    # All ranks take part before any raises: a rank that left early would let the others wait for the timeout.
    rendezvous = peer_rendezvous(axis, group, "plan")
    first = rendezvous.broadcast(plan)
    rank = dist.get_rank()
    difference = None if first == plan else f"rank {rank} has {plan}, rank {rendezvous.ranks[0]} {first}"
    why = rendezvous.first_objection(difference)
    if why is not None:
        raise errors.ArenaMismatch(axis, rank, why)


def refuse_multicast() -> None:
    """Raise if a library may use NVLink multicast in this process.

    Raises:
        MulticastNotOff: a variable of ``NO_MULTICAST`` has another value.
    """
    wrong = _multicast()
    if wrong:
        raise errors.MulticastNotOff(wrong)


def _on_gpu(axis: str, group: str, device: torch.device, size: int) -> SymmetricBuffer:
    # Again, right before the rendezvous: the answer of `reachable` is cached, and the environment can change.
    refuse_multicast()
    rendezvous = peer_rendezvous(axis, group, "buffer")
    pad = _pad_bytes(len(rendezvous.ranks))
    # The same size on all ranks, as torch's rendezvous demands: `_agree` has compared it.
    memory = torch_adapter.symmetric_empty(_round_up(pad + size, mmap.PAGESIZE), device)
    memory[:pad].zero_()
    # The pad must be zero before peers can map it: they may signal at once, and a later memset would erase that signal.
    torch.cuda.synchronize(device)
    # Before mapping: a rank that dies from here on is seen by its pidfd.
    processes = _processes(rendezvous)
    try:
        parts, keep = torch_adapter.symmetric_peers(memory, group)
    except RuntimeError as error:
        raise errors.PeersUnreachable(axis, str(error).splitlines()[0]) from error
    return SymmetricBuffer(axis, rendezvous.ranks, rendezvous.at, parts, processes, keep)


def _on_cpu(axis: str, group: str, device: torch.device, size: int) -> SymmetricBuffer:
    rendezvous = peer_rendezvous(axis, group, "buffer")
    world = len(rendezvous.ranks)
    # One file for all ranks, one part after the other.
    part = _round_up(_pad_bytes(world) + size, mmap.PAGESIZE)
    file, whole, why = -1, torch.empty(0, dtype=torch.uint8), None
    try:
        if rendezvous.at == 0:
            # Without a name in the file system, nothing is left behind by a crash.
            file = os.memfd_create("weft")
            os.truncate(file, world * part)
    except OSError as error:
        why = f"{world * part} bytes for all of them cannot be had ({error})"
    # An empty name tells the others that there is no file. All ranks go on to the same rendezvous either way.
    name = rendezvous.broadcast("" if why else f"/proc/{os.getpid()}/fd/{file}")
    try:
        if name:
            file = file if rendezvous.at == 0 else os.open(name, os.O_RDWR)
            whole = torch.frombuffer(mmap.mmap(file, world * part), dtype=torch.uint8)
    except OSError as error:
        why = f"rank {dist.get_rank()} cannot open the memory of rank {rendezvous.ranks[0]} ({error})"
    # The first rank may close its file only after this rendezvous: the others open it through /proc until then.
    why = rendezvous.first_objection(why)
    if file >= 0:
        os.close(file)
    if why is not None:
        raise errors.PeersUnreachable(axis, why)
    # The mapping keeps the memory when the file is closed, and goes with the last tensor of it.
    return SymmetricBuffer(axis, rendezvous.ranks, rendezvous.at, whole.split(part), _processes(rendezvous), whole)


def _processes(rendezvous: StoreRendezvous) -> list[int]:
    """Pidfds of the processes of all ranks. Unlike process ids, the system does not reuse them."""
    return [os.pidfd_open(int(text)) for text in rendezvous.gather(str(os.getpid()))]
