"""Runnable peer-access collectives of this rank: memory, communication stream, kernels, address tables.

:func:`weft.inductor.transports.instantiate.bind` puts them in place of the calls of a graph. A call launches its
collective on a communication stream and returns at once. Its results may be read after a wait. Its inputs are
referenced until then; otherwise the allocator could reuse their memory while the communication stream reads it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from weft import torch_adapter
from weft.capture.agreement.collective_ring import record
from weft.errors import TransportNotBound
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.runtime.batched_copies import BlockCopy, copies_on
from weft.inductor.runtime.bound_plan import AddressTable
from weft.inductor.runtime.kernels import Kernel
from weft.inductor.transports import comm_streams
from weft.inductor.transports.kernels.all_gather import PushGather
from weft.inductor.transports.kernels.all_reduce import OneShotAllReduce, TwoShotAllReduce
from weft.inductor.transports.kernels.barrier import Barrier
from weft.inductor.transports.kernels.failure import FailureKind
from weft.inductor.transports.kernels.peer_kernel import PeerGroup, PeerKernel
from weft.inductor.transports.kernels.reduction import RankReduction
from weft.inductor.transports.kernels.shard_copy import ShardCopy
from weft.inductor.transports.peer_calls import (
    CopyEngineGather,
    CopySumReduceScatter,
    PeerAllReduce,
    PeerCall,
    PeerReduceScatter,
    bytes_of,
)
from weft.inductor.transports.symmetric_memory import PROGRAMS, SymmetricBuffer

Tensors = Sequence[torch.Tensor]

# One kernel on a GPU for all tensors, casts included; separate copies would be one launch per tensor.
_copy_each = torch_adapter.kernel(torch.ops.aten._foreach_copy_.default)


class BoundPeerCall(ABC):
    """A runnable peer-access collective of this rank, called like its :class:`PeerCall`. A subclass that is made with
    ``transport`` runs the calls of that transport.

    Args:
        call: what it runs, with offsets.
        inputs, outputs: fake tensors like its inputs and outputs.
        buffer: the group's symmetric memory.
        description: description of the collective for error messages.

    A call raises errors.PeerLost or errors.PeerTimeout after a rank was missing at a barrier of this buffer. On the CPU
    the same call raises. On a GPU a later call raises, because kernels record the failure and no call synchronises.
    """

    collective = True
    shares_as_fakes = True
    classes: ClassVar[dict[str, type[BoundPeerCall]]] = {}  # by the name of the transport that each runs

    def __init_subclass__(cls, transport: str = "") -> None:
        if transport:
            BoundPeerCall.classes[transport] = cls

    def __init__(
        self, call: PeerCall, inputs: Tensors, outputs: Tensors, buffer: SymmetricBuffer, description: str
    ) -> None:
        self.__name__ = self.__qualname__ = call.__name__
        self.group = call.group
        self.kind = call.kind
        self.in_arena = call.in_arena
        self.call = call
        self.buffer = buffer
        self.device = buffer.device
        # Fakes are read now: a call must not touch them, it runs on the host's critical path.
        self._output_specs = [(tuple(val.shape), val.stride(), val.dtype) for val in outputs]
        # The graph's description of the arena, read once more: what runs is what was laid out.
        self._members = list(zip(call.offsets, call.arena_tensors(inputs, outputs), strict=True))
        self._slots = [buffer.view(offset, *member) for offset, member in self._members]
        # An input with this address was written into the arena by its producer and needs no copy.
        self._slot_addresses = [slot.data_ptr() for slot in self._slots]
        self._description = description
        # Kernels can only write numbers down. The buffer keeps the descriptions.
        self._number = buffer.failure_number(description)
        # Calls of one stream never overlap, so they share words of the signal pad. Those of two streams may, and must
        # not.
        self._first_word = buffer.first_word(call.stream_name)
        self._stream = comm_streams.comm_stream(self.device, call.stream_name)
        # An event per call: the wait must not depend on what is launched on the stream in between.
        self._done = self._stream.event()
        # The inputs between start and wait. Without these references the allocator could hand their memory to nodes of
        # the compute stream while this stream still reads it.
        self._inputs_in_use: Tensors | None = None

    @property
    def takes_out(self) -> bool:
        """Whether a call accepts ``out`` tensors for its results. Results in the arena have fixed addresses."""
        return not self.in_arena

    def __call__(self, inputs: Tensors, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        # Before anything is launched: no barrier waits once a failure is recorded, so the call would compute from
        # incomplete data.
        self.buffer.check()
        # A copy that this makes is kept alive by `_inputs_in_use`, like the inputs themselves.
        inputs = [tensor.contiguous() for tensor in inputs]
        # On the compute stream: pointer tables, and what `_write_addresses` launches. Then the communication stream
        # forks: an opening barrier if one is needed, copies into the arena, the barrier that every call has, data, and
        # the event `_done`. The compute stream goes on at once, and waits for the event in :meth:`wait`.
        results = self._results(out or [None] * len(self._output_specs))
        self._write_addresses(inputs, results)
        size = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        # NCCL's flight recorder does not see this call.
        entry = record(self._description, self.group, size)
        with self._stream.fork(self._done) as stream:
            self._run(inputs, results, stream)
        self._inputs_in_use = inputs
        # There is no stream: everything has run, and a failure has been written down by now.
        if self.device.type == "cpu":
            self.buffer.check()
            entry.end()
        return results

    def wait(self) -> None:
        """Block the compute stream until the results are written. All results complete together, so only the first of
        several waits has to do anything."""
        if self._inputs_in_use is not None:
            # Behind this, work on the compute stream may overwrite the inputs, so the references can go. The host does
            # not wait.
            self._stream.wait(self._done)
            self._inputs_in_use = None

    def check(self) -> None:
        """Raise if a rank was missing so far, and make the compute stream wait for this collective's stream. It must
        run before each replay of a CUDA graph that contains this call, because a replay runs no Python.

        Raises:
            PeerLost, PeerTimeout: a rank was missing.
        """
        self.buffer.check()
        # A replay forks from the compute stream only. Without this, its first collective could overlap with one that
        # was launched before the replay, and use the same words of the signal pad.
        self._stream.join()

    def _results(self, out: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The tensors that the results will be written to."""
        if self.in_arena:
            # The same tensors in every call. `unsupported_reason` has made sure that nobody holds them after the step.
            return [*self._slots]
        return [
            # Allocated on the compute stream. The communication stream forks behind the allocation and is waited for
            # before the results are read, so the allocator's order by the compute stream is right for them.
            torch.empty_strided(sizes, strides, dtype=dtype, device=self.device) if place is None else place
            for place, (sizes, strides, dtype) in zip(out, self._output_specs, strict=True)
        ]

    def _copy_in(self, inputs: Tensors) -> None:
        """Copy those inputs into the arena that their producers did not write there, and cast them to its dtype."""
        # By address and not by the plan: a producer that did not take its slot has written elsewhere.
        moved = [at for at, value in enumerate(inputs) if value.data_ptr() != self._slot_addresses[at]]
        if moved:
            _copy_each([self._slots[at] for at in moved], [inputs[at] for at in moved])

    @abstractmethod
    def sources(self) -> list[KernelSource]:
        """The kernels that it launches; :meth:`attach` takes them compiled in the same order."""

    @abstractmethod
    def attach(self, kernels: Sequence[Kernel]) -> None:
        """Take the kernels compiled from :meth:`sources` and prepare their launches."""

    @abstractmethod
    def _write_addresses(self, inputs: Tensors, results: Tensors) -> None:
        """Write the tensors' addresses into the kernels' pointer tables, on the compute stream: the communication
        stream starts after it."""

    @abstractmethod
    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        """Launch everything on the communication stream ``stream`` (its address)."""


class _KernelCollective(BoundPeerCall):
    """A collective whose results one kernel writes. Its barriers are kernels of their own with one program. If all
    programs of the large kernel waited for a late rank, they would keep their SMs from computation."""

    transport: PeerKernel

    def __init__(
        self, call: PeerCall, inputs: Tensors, outputs: Tensors, buffer: SymmetricBuffer, description: str
    ) -> None:
        super().__init__(call, inputs, outputs, buffer, description)
        self.transport = self._transport(inputs, outputs)
        # Each program signals through its own row of the signal pad. More programs would use another stream's rows.
        assert self.transport.slots <= PROGRAMS * call.world, f"{self.transport.grid} programs"
        self._chunks = self.transport.chunks.to(self.device)
        # The number of columns depends on the transport; a word for the alignment follows each row.
        row = self._rows([0] * len(inputs), [0] * len(outputs))[0]
        self._table = AddressTable(len(inputs) * (len(row) + 1), self.device)

    @abstractmethod
    def _transport(self, inputs: Tensors, outputs: Tensors) -> PeerKernel:
        """The kernel for these fake inputs and outputs."""

    @abstractmethod
    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        """The rows of the kernel's pointer table, one per tensor, for addresses of inputs and results."""

    def sources(self) -> list[KernelSource]:
        return [self.transport.kernel, *(barrier.kernel for barrier in self._barriers())]

    def attach(self, kernels: Sequence[Kernel]) -> None:
        # In the order of `sources`. Both barriers have one source, which compiles once.
        kernel, *barriers = kernels
        peers = self._peers()
        tables = self._chunks, self._table.start
        arguments = self.transport.arguments(peers, self._first_word, self._number, *tables, *self._extra_arguments())
        # A prepared launch keeps no tensor alive. All of these are attributes of this object or of the buffer.
        self._launch = kernel.prepare(self.transport.grid, *arguments)
        self._entry_barrier, self._exit_barrier = (
            compiled.prepare(barrier.grid, *barrier.arguments(peers, self._first_word, self._number))
            for compiled, barrier in zip(barriers, self._barriers(), strict=True)
        )

    def _peers(self) -> PeerGroup:
        """The base addresses from which the kernel reads each rank's data."""
        return self.buffer.peers

    def _extra_arguments(self) -> list[torch.Tensor]:
        """Kernel arguments beyond the common ones, see :attr:`PeerKernel.extra_arguments`."""
        return []

    def _barriers(self) -> list[Barrier]:
        """The barriers before and after the kernel; the record of a failure says which one it was."""
        return [Barrier(self.call.world, what) for what in (FailureKind.ENTRY_BARRIER, FailureKind.EXIT_BARRIER)]

    def _write_addresses(self, inputs: Tensors, results: Tensors) -> None:
        # The table is copied only where an address has changed since the last call.
        rows = self._rows(*([tensor.data_ptr() for tensor in of] for of in (inputs, results)))
        self._table.fill(rows, _current_stream(self.device))

    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        # The planner asks for it where no other barrier is between the last use of these bytes and this call.
        if self.call.opening_barrier:
            self._entry_barrier(stream)
        self._launch(stream)


class _Push(_KernelCollective, transport="push"):
    """Opening barrier if needed, push, exit barrier. Results may be read only after the exit barrier: before it, some
    rank may not have pushed its shards yet."""

    def _transport(self, inputs: Tensors, outputs: Tensors) -> PeerKernel:
        return PushGather(
            **_common(self.call, inputs),
            entry_barrier=False,
            exit_barrier=False,
            source=inputs[0].dtype,
            wire=outputs[0].dtype,
        )

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(inputs, self.call.offsets)

    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        super()._run(inputs, results, stream)
        self._exit_barrier(stream)


class _Pull(_KernelCollective, transport="pull"):
    """Opening barrier if needed, copy in, barrier, reduce. Without the middle barrier the kernel would read inputs that
    a slow peer has not copied into its arena yet. It needs no barrier after the kernel: the arena planner counts on the
    next collective's barrier before it lets anybody overwrite the inputs.

    Attributes:
        squares: the partial sums of squares, see :class:`PeerSquares`; empty if the call has none.
    """

    def __init__(
        self, call: PeerCall, inputs: Tensors, outputs: Tensors, buffer: SymmetricBuffer, description: str
    ) -> None:
        super().__init__(call, inputs, outputs, buffer, description)
        # At a fixed address, since the kernel's arguments are prepared once.
        self.squares = torch.zeros(self._reduce_scatter.sums if self._reduce_scatter.squares else 0, device=self.device)

    @property
    def _reduce_scatter(self) -> PeerReduceScatter:
        assert isinstance(self.call, PeerReduceScatter)
        return self.call

    def _extra_arguments(self) -> list[torch.Tensor]:
        return [self.squares] if self._reduce_scatter.squares else []

    def _transport(self, inputs: Tensors, outputs: Tensors) -> PeerKernel:
        return self._reduce_scatter.kernel(
            **_common(self.call, outputs),
            entry_barrier=False,
            exit_barrier=False,
            wire=inputs[0].dtype,
            result=outputs[0].dtype,
            reduction=_reduction(self.call),
            squares=self._reduce_scatter.squares,
        )

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(results, self.call.offsets)

    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        if self.call.opening_barrier:
            self._entry_barrier(stream)
        # Peers have read what was here: by the opening barrier, or by another one since.
        self._copy_in(inputs)
        self._entry_barrier(stream)
        self._fetch(stream)
        self._launch(stream)

    def _fetch(self, stream: int) -> None:
        """Copy what the kernel reads to this rank. Nothing here: the kernel reads the memory of peers."""


class _Staging:
    """Local staging memory, shared by the collectives of one communication stream of a device. They run one after the
    other, so each may overwrite it once the kernel before has read it, and the largest need is enough for all."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._reserved = 0

    def reserve(self, size: int) -> None:
        """Reserve at least ``size`` bytes. All collectives of a program call this before the first :meth:`take`, so
        that all of them take the same memory."""
        self._reserved = max(self._reserved, size)

    def take(self, size: int) -> torch.Tensor:
        """A uint8 tensor of ``size`` bytes. If the memory has to grow, earlier programs keep their old tensor."""
        # A program whose kernels point into the old memory holds it by its tensor.
        if len(self._memory) < self._reserved:
            self._memory = torch.empty(self._reserved, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:size]


# By device and stream name. Freed when the last program that uses it is gone.
_stagings: weakref.WeakValueDictionary[tuple[torch.device, str], _Staging] = weakref.WeakValueDictionary()


class _CopySum(_Pull, transport="copy_sum"):
    """A :class:`_Pull` whose kernel reads local memory only: this rank's parts from its own arena, those of peers from
    staging slots, one per peer, which copy engines fill.

    Copies and kernel run on one stream. So, as in :class:`_Pull`, this rank has finished reading peers' arenas when it
    reaches the stream's next barrier, and the next collective of the stream overwrites the slots after the kernel.
    """

    def __init__(
        self, call: CopySumReduceScatter, inputs: Tensors, outputs: Tensors, buffer: SymmetricBuffer, description: str
    ) -> None:
        arena_tensors = call.arena_tensors(inputs, outputs)
        # Before `super().__init__`, which asks for the rows of the pointer table.
        *self._staging_offsets, self._slot = call.staging_offsets(arena_tensors)
        # Size of this rank's part of each tensor and its offset in the arena, in bytes. The plan is the same on all
        # ranks, so the offset is valid in every peer's arena.
        self._sizes = [bytes_of(member) // call.world for member in arena_tensors]
        self._parts = [at + buffer.rank * size for at, size in zip(call.offsets, self._sizes, strict=True)]
        super().__init__(call, inputs, outputs, buffer, description)
        self._staging = _stagings.setdefault((self.device, call.stream_name), _Staging(self.device))
        self._staging.reserve(call.staging_bytes(arena_tensors))

    def attach(self, kernels: Sequence[Kernel]) -> None:
        # All ranks copy at once and start with their successors, so each rank serves one peer at a time.
        peers = _peers_in_turn(self.buffer)
        self._staged = self._staging.take(len(peers) * self._slot)
        # A slot has the parts of one peer, at the same offsets for every peer: one row of the pointer table serves all
        # of them.
        slots = [self._staged.data_ptr() + at * self._slot for at in range(len(peers))]
        arenas = _arenas(self.buffer)
        # The kernel sums in rank order from these bases. Only this rank's own entry points into an arena.
        bases = dict(zip(peers, slots, strict=True)) | {self.buffer.rank: arenas[self.buffer.rank]}
        self._bases = torch.tensor([bases[rank] for rank in range(self.call.world)], dtype=torch.int64).to(self.device)
        parts = [*zip(self._staging_offsets, self._parts, self._sizes, strict=True)]
        # A turn per peer: reads from several peers at a time take from each other's bandwidth.
        copies_by_peer = [
            [BlockCopy(arenas[peer] + part, at, landed, size) for landed, part, size in parts]
            for at, peer in enumerate(peers)
        ]
        self._copies = copies_on(self.device, copies_by_peer, self._description)
        # Staging has a fixed address, so the copies are aimed once and not per call.
        self._copies.aim(slots)
        super().attach(kernels)

    def _peers(self) -> PeerGroup:
        return replace(self.buffer.peers, bases=self._bases)

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(results, self._staging_offsets, self._parts)

    def _fetch(self, stream: int) -> None:
        self._copies.issue(stream)


class _OneShot(_KernelCollective, transport="one_shot"):
    """One kernel copies the inputs into the arena, passes a barrier and sums. Peers read what it copies, so the barrier
    is inside the kernel."""

    def _transport(self, inputs: Tensors, outputs: Tensors) -> PeerKernel:
        return OneShotAllReduce(
            **_common(self.call, inputs),
            exit_barrier=False,
            wire=inputs[0].dtype,
            source=inputs[0].dtype,
            result=outputs[0].dtype,
            reduction=_reduction(self.call),
        )

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(inputs, results, self.call.offsets)


class _TwoShot(_KernelCollective, transport="two_shot"):
    """As :class:`_OneShot`, but the kernel also has a barrier at its end: peers write parts of this rank's results."""

    def _transport(self, inputs: Tensors, outputs: Tensors) -> PeerKernel:
        dtype, reduction = inputs[0].dtype, _reduction(self.call)
        return TwoShotAllReduce(**_common(self.call, inputs), wire=dtype, source=dtype, reduction=reduction)

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(inputs, self.call.offsets)


class _CopyEngine(BoundPeerCall, transport="copy_engine"):
    """All-gather by copies from one peer after the other. Several peers at a time are half as fast (8 H200). Copies
    without a barrier just before are a third slower, because ranks drift and read from the same peer (4 H200).

    A kernel casts this rank's shards and writes them to the arena and to the results. It runs on the compute stream
    where that is safe (``copy_in_on_compute_stream``). On the communication stream it waits for a free SM beside a
    large GEMM, and persistent GEMMs leave none until they end. With a kernel and two barriers on the communication
    stream, the all-gathers waited for half of the forward of an 8B step on 8 H200.
    """

    def __init__(
        self, call: PeerCall, inputs: Tensors, outputs: Tensors, buffer: SymmetricBuffer, description: str
    ) -> None:
        super().__init__(call, inputs, outputs, buffer, description)
        self._deposit = ShardCopy(tuple(val.numel() for val in inputs), inputs[0].dtype, outputs[0].dtype)
        self._chunks = self._deposit.chunks.to(self.device)
        self._table = AddressTable(len(inputs) * (len(self._deposit.rows([0], [0], [0])[0]) + 1), self.device)
        # Blocks of one result lie behind each other in rank order, so rank r's block begins at r times the size.
        self._sizes = [bytes_of(member) for _, member in self._members]
        arenas = _arenas(buffer)
        copies_by_peer = [
            [
                BlockCopy(arenas[rank] + offset, at, rank * size, size)
                for at, (offset, size) in enumerate(zip(call.offsets, self._sizes, strict=True))
            ]
            for rank in _peers_in_turn(buffer)
        ]
        self._copies = copies_on(self.device, copies_by_peer, description)

    def sources(self) -> list[KernelSource]:
        return [Barrier(self.call.world).kernel, self._deposit.kernel]

    def attach(self, kernels: Sequence[Kernel]) -> None:
        meet, deposit = kernels
        barrier = Barrier(self.call.world)
        # One kernel for both barriers. They run one after the other on one stream, and each takes the next epoch.
        arguments = barrier.arguments(self.buffer.peers, self._first_word, self._number)
        self._entry_barrier = meet.prepare(barrier.grid, *arguments)
        self._launch = deposit.prepare(self._deposit.grid, self._chunks, self._table.start)

    def _write_addresses(self, inputs: Tensors, results: Tensors) -> None:
        starts = [result.data_ptr() for result in results]
        # Results are outside the arena and can have other addresses in each call.
        self._copies.aim(starts)
        # This rank's own block of each result. Copy engines bring only the blocks of peers.
        owns = [start + self.buffer.rank * size for start, size in zip(starts, self._sizes, strict=True)]
        rows = self._deposit.rows([shard.data_ptr() for shard in inputs], self._slot_addresses, owns)
        self._table.fill(rows, _current_stream(self.device))
        if self._copy_in_on_compute_stream:
            # can_write() holds here: peers have finished with these bytes, so no opening barrier is needed.
            self._launch(_current_stream(self.device))

    @property
    def _copy_in_on_compute_stream(self) -> bool:
        assert isinstance(self.call, CopyEngineGather)
        return self.call.copy_in_on_compute_stream

    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        # Otherwise `_write_addresses` has launched it, on the compute stream, and the fork comes behind it.
        if not self._copy_in_on_compute_stream:
            if self.call.opening_barrier:
                self._entry_barrier(stream)
            self._launch(stream)
        # Without this barrier a copy could read shards that a slow peer has not written yet.
        self._entry_barrier(stream)
        self._copies.issue(stream)


class BoundWait:
    """The wait for a :class:`BoundPeerCall`; returns its argument."""

    waits = True
    shares_as_fakes = True

    def __init__(self, start: BoundPeerCall) -> None:
        self.__name__ = self.__qualname__ = "peer_wait"
        self.start = start

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        self.start.wait()
        return result


class BoundSquares:
    """The sums of squares of a bound reduce-scatter, at a fixed address. Each call overwrites them."""

    shares_as_fakes = True
    free = True

    def __init__(self, start: BoundPeerCall) -> None:
        assert isinstance(start, _Pull)
        self.__name__ = self.__qualname__ = "peer_squares"
        self.start = start

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        return self.start.squares


def bind_call(
    call: PeerCall, inputs: Tensors, outputs: Tensors, buffer: SymmetricBuffer, description: str
) -> BoundPeerCall:
    """The runnable form of ``call`` on this rank, see :class:`BoundPeerCall`. The caller must :meth:`attach
    <BoundPeerCall.attach>` its kernels before the first call.

    Raises:
        TransportNotBound: no class runs the calls of this transport.
    """
    if (bound := BoundPeerCall.classes.get(call.transport)) is None:
        raise TransportNotBound(call.transport, type(call).__qualname__)
    return bound(call, inputs, outputs, buffer, description)


def _peers_in_turn(buffer: SymmetricBuffer) -> list[int]:
    """The other ranks in the order in which this one copies from them. Each rank begins with its successor, so that no
    two ranks read from the same peer at a time."""
    world = buffer.peers.world
    return [(buffer.rank + step) % world for step in range(1, world)]


def _current_stream(device: torch.device) -> int:
    """The address of torch's current CUDA stream; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _arenas(buffer: SymmetricBuffer) -> list[int]:
    """The addresses of the arenas of all ranks, in rank order, as mapped into this process."""
    return [buffer.view(0, (1,), torch.uint8, rank).data_ptr() for rank in range(buffer.peers.world)]


def _common(call: PeerCall, members: Tensors) -> dict[str, Any]:
    """What every kernel takes of a call; a kernel has a number of programs of its own."""
    programs = {"programs": call.programs} if call.programs else {}
    return {"world": call.world, "sizes": tuple(val.numel() for val in members), **programs}


def _reduction(call: PeerCall) -> RankReduction:
    assert isinstance(call, (PeerReduceScatter, PeerAllReduce))
    # Multiplied after the sum and before the only rounding of the result.
    return RankReduction("sum", 1 / call.world) if call.op == "avg" else RankReduction(call.op)
