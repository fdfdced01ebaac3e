"""Collectives over peers with all that they need on this rank: memory, a lane, kernels, tables of addresses.

:func:`bind` puts them in the place of the calls of a graph. A call starts its collective on its lane and returns at
once, with results that can be read after a wait. What it reads is held until then.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft import torch_adapter
from weft.inductor.comm import streams
from weft.inductor.comm.kernels.all_reduce import OneShotAllReduce, TwoShotAllReduce
from weft.inductor.comm.kernels.barrier import Barrier
from weft.inductor.comm.kernels.deposit import Deposit
from weft.inductor.comm.kernels.failure import What
from weft.inductor.comm.kernels.gather import PushGather
from weft.inductor.comm.kernels.reduction import Reduction
from weft.inductor.comm.kernels.transport import Peers, Transport
from weft.inductor.comm.symmetric import PROGRAMS, SymmetricBuffer
from weft.inductor.comm.transports import (
    CopyEngineGather,
    CopySumReduceScatter,
    PeerAllReduce,
    PeerCall,
    PeerGather,
    PeerReduceScatter,
    bytes_of,
)
from weft.inductor.multi_tensor.bound import AddressTable
from weft.inductor.runtime.copies import Copy, copies_on
from weft.inductor.runtime.kernel_source import KernelSource
from weft.inductor.runtime.kernels import Kernel

Tensors = Sequence[torch.Tensor]

# Casts too, and is one kernel on a GPU where a copy of each would be one each.
_copy_each = torch_adapter.kernel(torch.ops.aten._foreach_copy_.default)


class Bound(ABC):
    """A collective over peers on this rank, called like the :class:`PeerCall` that it is made from.

    Args:
        given, made: tensors like its inputs and its results (fakes).
        told: what it is, for messages.

    A call raises errors.PeerLost or errors.PeerTimeout once a rank did not come to a collective over this memory: at
    once on the CPU, on a GPU when one that was issued before has found out.
    """

    collective = True
    shares_as_fakes = True

    def __init__(self, call: PeerCall, given: Tensors, made: Tensors, buffer: SymmetricBuffer, told: str) -> None:
        self.__name__ = self.__qualname__ = call.__name__
        self.group = call.group
        self.kind = call.kind
        self.in_arena = call.in_arena
        self.call = call
        self.buffer = buffer
        self.device = buffer.device
        self._made = [(tuple(val.shape), val.stride(), val.dtype) for val in made]
        self._members = list(zip(call.offsets, call.members(given, made), strict=True))
        self._slots = [buffer.view(offset, *member) for offset, member in self._members]
        self._filled = [slot.data_ptr() for slot in self._slots]
        self._told = told
        self._number = buffer.tell(told)
        self._words = buffer.slots(call.lane)
        self._lane = streams.lane(self.device, call.lane)
        self._done = self._lane.event()
        self._held: Tensors | None = None  # what is read until somebody has waited

    @property
    def takes_out(self) -> bool:
        """Whether a call may be told where its results are to lie."""
        return not self.in_arena

    def __call__(self, inputs: Tensors, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        self.buffer.check()
        inputs = [tensor.contiguous() for tensor in inputs]
        results = self._results(out or [None] * len(self._made))
        self._aim(inputs, results)
        with self._lane.carry(self._done) as stream:
            self._run(inputs, results, stream)
        self._held = inputs
        if self.device.type == "cpu":
            self.buffer.check()
        return results

    def wait(self) -> None:
        """Hold the compute stream until the results are there; all members of a collective end together."""
        if self._held is not None:
            self._lane.wait(self._done)
            self._held = None

    def check(self) -> None:
        """See whether a rank was missing so far, and let what the lane carries end first: before each replay of a CUDA
        graph that has recorded a call.

        Raises:
            PeerLost, PeerTimeout: a rank was.
        """
        self.buffer.check()
        self._lane.settle()

    def _results(self, out: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """What the results will be in."""
        if self.in_arena:
            return [*self._slots]
        return [
            torch.empty_strided(sizes, strides, dtype=dtype, device=self.device) if place is None else place
            for place, (sizes, strides, dtype) in zip(out, self._made, strict=True)
        ]

    def _copy_in(self, inputs: Tensors) -> None:
        """Bring into the arena what was not made there, cast where the arena holds another dtype."""
        moved = [at for at, value in enumerate(inputs) if value.data_ptr() != self._filled[at]]
        if moved:
            _copy_each([self._slots[at] for at in moved], [inputs[at] for at in moved])

    @abstractmethod
    def sources(self) -> list[KernelSource]:
        """The kernels that it launches."""

    @abstractmethod
    def attach(self, kernels: Sequence[Kernel]) -> None:
        """Take the kernels compiled from :meth:`sources`."""

    @abstractmethod
    def _aim(self, inputs: Tensors, results: Tensors) -> None:
        """Let kernels know where tensors lie; on the compute stream."""

    @abstractmethod
    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        """Start everything, on the lane's stream."""


class _ByKernel(Bound):
    """One kernel makes the results. Ranks meet in another, of one program: what waits for a late rank in a kernel of
    many keeps the multiprocessors that it holds from computation."""

    transport: Transport

    def __init__(self, call: PeerCall, given: Tensors, made: Tensors, buffer: SymmetricBuffer, told: str) -> None:
        super().__init__(call, given, made, buffer, told)
        self.transport = self._transport(given, made)
        assert self.transport.slots <= PROGRAMS * call.world, f"{self.transport.grid} programs"
        self._chunks = self.transport.chunks.to(self.device)
        row = self._rows([0] * len(given), [0] * len(made))[0]
        self._table = AddressTable(len(given) * (len(row) + 1), self.device)

    @abstractmethod
    def _transport(self, given: Tensors, made: Tensors) -> Transport:
        """The kernel for such tensors."""

    @abstractmethod
    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        """The kernel's rows of members, by the addresses of inputs and results."""

    def sources(self) -> list[KernelSource]:
        return [self.transport.kernel, *(barrier.kernel for barrier in self._barriers())]

    def attach(self, kernels: Sequence[Kernel]) -> None:
        kernel, *barriers = kernels
        peers = self._peers()
        tables = self._chunks, self._table.start
        arguments = self.transport.arguments(peers, self._words, self._number, *tables, *self._others())
        self._launch = kernel.prepare(self.transport.grid, *arguments)
        self._meet, self._part = (
            compiled.prepare(barrier.grid, *barrier.arguments(peers, self._words, self._number))
            for compiled, barrier in zip(barriers, self._barriers(), strict=True)
        )

    def _peers(self) -> Peers:
        """Where the kernel finds what it reads of each rank."""
        return self.buffer.peers

    def _others(self) -> list[torch.Tensor]:
        """What the kernel is given that not all are, see :attr:`Transport.others`."""
        return []

    def _barriers(self) -> list[Barrier]:
        """Those before and after."""
        return [Barrier(self.call.world, what) for what in (What.TO_BEGIN, What.TO_END)]

    def _aim(self, inputs: Tensors, results: Tensors) -> None:
        rows = self._rows(*([tensor.data_ptr() for tensor in of] for of in (inputs, results)))
        self._table.fill(rows, _current_stream(self.device))

    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        if self.call.opens:
            self._meet(stream)
        self._launch(stream)


class _Push(_ByKernel):
    def _transport(self, given: Tensors, made: Tensors) -> Transport:
        return PushGather(
            world=self.call.world,
            sizes=tuple(val.numel() for val in given),
            before=False,
            after=False,
            source=given[0].dtype,
            wire=made[0].dtype,
            **_programs(self.call),
        )

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(inputs, self.call.offsets)  # type: ignore[attr-defined]

    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        super()._run(inputs, results, stream)
        self._part(stream)


class _Pull(_ByKernel):
    """
    Attributes:
        squares: where sums of squares lie, see :class:`PeerSquares`; empty where nobody wants them.
    """

    def __init__(self, call: PeerCall, given: Tensors, made: Tensors, buffer: SymmetricBuffer, told: str) -> None:
        super().__init__(call, given, made, buffer, told)
        self.squares = torch.zeros(self._reduces.sums if self._reduces.squares else 0, device=self.device)

    @property
    def _reduces(self) -> PeerReduceScatter:
        assert isinstance(self.call, PeerReduceScatter)
        return self.call

    def _others(self) -> list[torch.Tensor]:
        return [self.squares] if self._reduces.squares else []

    def _transport(self, given: Tensors, made: Tensors) -> Transport:
        return self._reduces.kernel(
            world=self.call.world,
            sizes=tuple(val.numel() for val in made),
            before=False,
            after=False,
            wire=given[0].dtype,
            result=made[0].dtype,
            reduction=_reduction(self.call),
            squares=self._reduces.squares,
            **_programs(self.call),
        )

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(results, self.call.offsets)  # type: ignore[attr-defined]

    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        if self.call.opens:
            self._meet(stream)
        self._copy_in(inputs)
        self._meet(stream)
        self._fetch(stream)
        self._launch(stream)

    def _fetch(self, stream: int) -> None:
        """Bring what the kernel reads to this rank: nothing, it reads peers' memory."""


class _Staging:
    """Memory of this rank's own that the collectives of one lane of a device use in turn, each until its kernel has
    read it. There is as much as the largest of them needs."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._wanted = 0

    def want(self, size: int) -> None:
        """Ask for ``size`` bytes, before any collective of the program takes them: then they take the same."""
        self._wanted = max(self._wanted, size)

    def take(self, size: int) -> torch.Tensor:
        """``size`` bytes, uint8; a program that was there before keeps what it has taken."""
        if len(self._memory) < self._wanted:
            self._memory = torch.empty(self._wanted, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:size]


# By device and lane, as long as a program uses it.
_stagings: weakref.WeakValueDictionary[tuple[torch.device, str], _Staging] = weakref.WeakValueDictionary()


class _CopySum(_Pull):
    """Pulls from this rank's own memory: its parts of all members where they were made, those of peers from slots, one
    a peer, which copies fill.

    Peers' arenas are read before the kernel runs, all of it on the lane: as in :class:`_Pull`, they have been read when
    this rank comes to the lane's next barrier. The next collective of the lane overwrites the slots behind the kernel.
    """

    def __init__(
        self, call: CopySumReduceScatter, given: Tensors, made: Tensors, buffer: SymmetricBuffer, told: str
    ) -> None:
        members = call.members(given, made)
        *self._landed, self._slot = call.landing(members)
        # Where this rank's part of each member lies in the arena of any rank, and its size, in bytes.
        self._sizes = [bytes_of(member) // call.world for member in members]
        self._parts = [at + buffer.rank * size for at, size in zip(call.offsets, self._sizes, strict=True)]
        super().__init__(call, given, made, buffer, told)
        self._staging = _stagings.setdefault((self.device, call.lane), _Staging(self.device))
        self._staging.want(call.landed_bytes(members))

    def attach(self, kernels: Sequence[Kernel]) -> None:
        peers = _peers_in_turn(self.buffer)
        self._landing = self._staging.take(len(peers) * self._slot)
        slots = [self._landing.data_ptr() + at * self._slot for at in range(len(peers))]
        arenas = _arenas(self.buffer)
        bases = dict(zip(peers, slots, strict=True)) | {self.buffer.rank: arenas[self.buffer.rank]}
        self._bases = torch.tensor([bases[rank] for rank in range(self.call.world)], dtype=torch.int64).to(self.device)
        members = [*zip(self._landed, self._parts, self._sizes, strict=True)]
        turns = [
            [Copy(arenas[peer] + part, at, landed, size) for landed, part, size in members]
            for at, peer in enumerate(peers)
        ]
        self._copies = copies_on(self.device, turns, self._told)
        self._copies.aim(slots)
        super().attach(kernels)

    def _peers(self) -> Peers:
        return replace(self.buffer.peers, bases=self._bases)

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(results, self._landed, self._parts)  # type: ignore[attr-defined]

    def _fetch(self, stream: int) -> None:
        self._copies.issue(stream)


class _OneShot(_ByKernel):
    def _transport(self, given: Tensors, made: Tensors) -> Transport:
        return OneShotAllReduce(
            world=self.call.world,
            sizes=tuple(val.numel() for val in given),
            after=False,
            wire=given[0].dtype,
            source=given[0].dtype,
            result=made[0].dtype,
            reduction=_reduction(self.call),
            **_programs(self.call),
        )

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(results, self.call.offsets, inputs)  # type: ignore[attr-defined]


class _TwoShot(_ByKernel):
    def _transport(self, given: Tensors, made: Tensors) -> Transport:
        return TwoShotAllReduce(
            world=self.call.world,
            sizes=tuple(val.numel() for val in given),
            wire=given[0].dtype,
            source=given[0].dtype,
            reduction=_reduction(self.call),
            **_programs(self.call),
        )

    def _rows(self, inputs: list[int], results: list[int]) -> list[list[int]]:
        return self.transport.rows(self.call.offsets, inputs)  # type: ignore[attr-defined]


class _CopyEngine(Bound):
    """Copies from one peer after the other: several at a time are slower (measured on 8 H200: half as fast), and so are
    those of ranks that have not met just before, which read from the same peer (measured on 4: a third slower).

    This rank's own shards are brought to their places by a kernel, cast on the way, on the compute stream if that may:
    beside a large product a kernel of the lane waits for a multiprocessor, and persistent products leave none before
    they end. With a kernel and two barriers on the lane, it stood for half of an 8B step's forward on 8 H200.
    """

    def __init__(self, call: PeerCall, given: Tensors, made: Tensors, buffer: SymmetricBuffer, told: str) -> None:
        super().__init__(call, given, made, buffer, told)
        self._deposit = Deposit(tuple(val.numel() for val in given), given[0].dtype, made[0].dtype)
        self._chunks = self._deposit.chunks.to(self.device)
        self._table = AddressTable(len(given) * (len(self._deposit.rows([0], [0], [0])[0]) + 1), self.device)
        self._sizes = [bytes_of(member) for _, member in self._members]
        arenas = _arenas(buffer)
        turns = [
            [
                Copy(arenas[rank] + offset, at, rank * size, size)
                for at, (offset, size) in enumerate(zip(call.offsets, self._sizes, strict=True))
            ]
            for rank in _peers_in_turn(buffer)
        ]
        self._copies = copies_on(self.device, turns, told)

    def sources(self) -> list[KernelSource]:
        return [Barrier(self.call.world).kernel, self._deposit.kernel]

    def attach(self, kernels: Sequence[Kernel]) -> None:
        meet, deposit = kernels
        barrier = Barrier(self.call.world)
        arguments = barrier.arguments(self.buffer.peers, self._words, self._number)
        self._meet = meet.prepare(barrier.grid, *arguments)
        self._launch = deposit.prepare(self._deposit.grid, self._chunks, self._table.start)

    def _aim(self, inputs: Tensors, results: Tensors) -> None:
        starts = [result.data_ptr() for result in results]
        self._copies.aim(starts)
        owns = [start + self.buffer.rank * size for start, size in zip(starts, self._sizes, strict=True)]
        rows = self._deposit.rows([shard.data_ptr() for shard in inputs], self._filled, owns)
        self._table.fill(rows, _current_stream(self.device))
        if self._ahead:
            self._launch(_current_stream(self.device))

    @property
    def _ahead(self) -> bool:
        assert isinstance(self.call, CopyEngineGather)
        return self.call.ahead

    def _run(self, inputs: Tensors, results: Tensors, stream: int) -> None:
        if not self._ahead:
            if self.call.opens:
                self._meet(stream)
            self._launch(stream)
        self._meet(stream)
        self._copies.issue(stream)


class BoundWait:
    """The wait for a :class:`Bound` collective; returns what it is given."""

    waits = True
    shares_as_fakes = True

    def __init__(self, start: Bound) -> None:
        self.__name__ = self.__qualname__ = "peer_wait"
        self.start = start

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        self.start.wait()
        return result


class BoundSquares:
    """The sums of squares of a bound reduce-scatter: memory that stays where it is, and holds the last call's."""

    shares_as_fakes = True
    free = True

    def __init__(self, start: Bound) -> None:
        assert isinstance(start, _Pull)
        self.__name__ = self.__qualname__ = "peer_squares"
        self.start = start

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        return self.start.squares


def bound(call: PeerCall, given: Tensors, made: Tensors, buffer: SymmetricBuffer, told: str) -> Bound:
    """``call`` on this rank; see :class:`Bound`. Its kernels have to be attached."""
    if isinstance(call, PeerAllReduce):
        return (_TwoShot if call.shots == 2 else _OneShot)(call, given, made, buffer, told)
    return _KINDS[type(call)](call, given, made, buffer, told)


_KINDS: dict[type[PeerCall], type[Bound]] = {
    PeerGather: _Push,
    CopyEngineGather: _CopyEngine,
    PeerReduceScatter: _Pull,
    CopySumReduceScatter: _CopySum,
}


def _peers_in_turn(buffer: SymmetricBuffer) -> list[int]:
    """The other ranks in the order in which this one copies from them: from those behind it, so that they do not all
    read from the same peer at a time."""
    world = buffer.peers.world
    return [(buffer.rank + step) % world for step in range(1, world)]


def _current_stream(device: torch.device) -> int:
    """The address of the compute stream."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _arenas(buffer: SymmetricBuffer) -> list[int]:
    """Where the arenas of all ranks lie."""
    return [buffer.view(0, (1,), torch.uint8, rank).data_ptr() for rank in range(buffer.peers.world)]


def _programs(call: PeerCall) -> dict[str, Any]:
    return {"programs": call.programs} if call.programs else {}


def _reduction(call: PeerCall) -> Reduction:
    assert isinstance(call, (PeerReduceScatter, PeerAllReduce))
    return Reduction("sum", 1 / call.world) if call.op == "avg" else Reduction(call.op)
