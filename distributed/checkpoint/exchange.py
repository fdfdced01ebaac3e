"""Texts between ranks, over a gloo group of their own, and waits that end where a rank is gone.

A thread passes on what the processes that write checkpoints agree on, so they must not share a group with the step: two
threads that use one group issue their collectives in an order that differs between ranks.

Collectives are called on the group itself. Those of ``torch.distributed`` refuse a group that
``destroy_process_group()`` has unregistered, and programs call that while their last save is under way.

Storage may be slow for minutes, so a long wait does not mean that a rank is gone. A rank is gone when its process is
dead or stopped, which :mod:`weft.rank_watch` finds.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft import rank_watch, torch_adapter
from weft.distributed.checkpoint.tensor_bytes import bytes_of
from weft.rank_watch import CannotEnd, RankFailure, RankWatch

_TIMEOUT = datetime.timedelta(minutes=30)


class Ranks:
    """All ranks of the default process group, or this process alone where there is none.

    Making one is collective. Raises StoreLost where the process that holds the store is dead or stopped.

    Attributes:
        rank, world_size: of this process.
        group: the gloo group; None where this process is alone.
        lost: why the ranks can no longer wait for each other; None while they can.
    """

    def __init__(self) -> None:
        self.world_size = torch_adapter.world_size()
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.group: dist.ProcessGroup | None = None
        self._watch: RankWatch | None = None
        self.lost: CannotEnd | None = None
        if self.world_size > 1:
            connect = functools.partial(_watch, self.rank, self.world_size)
            self._watch = rank_watch.answered("weft.TrainState", self.rank, connect)
            self.group = self.call(lambda: dist.new_group(backend="gloo", timeout=_TIMEOUT))

    def call(self, action: Callable[[], Any]) -> Any:
        """What ``action()``, which waits for other ranks, returns or raises. Raises CannotEnd, see :meth:`wait`."""
        outcome: list[Any] = [None, None]

        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:  # each thread has its own current one
                    torch.cuda.set_device(device)
                outcome[0] = action()
            except BaseException as error:  # noqa: BLE001 - raised below
                outcome[1] = error

        if self._watch is None:
            return action()
        thread = threading.Thread(target=run, name="weft waiting for ranks", daemon=True)
        thread.start()
        self.wait(thread)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def wait(self, thread: threading.Thread) -> None:
        """Wait for a thread that uses the group.

        Raises:
            CannotEnd: a rank is gone, which the text names. Nothing can be done with this object any more.
        """
        if self.lost is not None:
            raise self.lost
        if self._watch is None:
            thread.join()
            return
        with self._watch.waiting(range(self.world_size)) as wait:
            thread.join(rank_watch.SLICE_S)
            while thread.is_alive():
                try:
                    wait.check(self._watch)
                except CannotEnd as error:
                    raise self._lose(str(error)) from None
                thread.join(rank_watch.SLICE_S)

    def why(self, error: BaseException) -> str:
        """Why a collective has failed: the ranks that are gone, or the library's words."""
        if self._watch is not None:
            with self._watch.waiting(range(self.world_size), silent_s=rank_watch.EXPLAIN_S) as wait:
                while not wait.why and not self._watch.lost and wait.clock.look() < wait.silent_s + 2:
                    time.sleep(rank_watch.SLICE_S)
            return str(self._lose(wait.why or f"{type(error).__name__}: {error}"))
        return f"{type(error).__name__}: {error}"

    def _lose(self, why: str) -> CannotEnd:
        """Give up waiting for other ranks, and have them know: a process that ends after this is not the reason."""
        self.lost = CannotEnd(why)
        if self._watch is not None:
            self._watch.tell(RankFailure(0, 0, False, why))
        return self.lost

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        if self.group is None:
            return [text]
        sizes = self._sizes(len(text.encode()))
        texts = [torch.zeros(max(1, *sizes), dtype=torch.uint8) for _ in sizes]
        self.group.allgather([texts], [_padded(text.encode(), max(sizes))]).wait()
        return [_cut(got, size).decode() for got, size in zip(texts, sizes, strict=True)]

    def to_first(self, data: bytes) -> list[bytes] | None:
        """The bytes of all ranks, by rank, on rank 0; None on the others."""
        if self.group is None:
            return [data]
        sizes = self._sizes(len(data))
        found = [torch.zeros(max(1, *sizes), dtype=torch.uint8) for _ in sizes] if self.rank == 0 else []
        self.group.gather(found, _padded(data, max(sizes)), 0).wait()
        return [_cut(got, size) for got, size in zip(found, sizes, strict=True)] if found else None

    def from_first(self, data: list[bytes] | None) -> bytes:
        """What rank 0 has for this rank in ``data``, by rank; None on the others."""
        if self.group is None:
            assert data is not None
            return data[0]
        sizes = torch.tensor([len(each) for each in data] if data else [0] * self.world_size)
        self.group.broadcast(sizes, 0).wait()
        longest = int(sizes.max())
        parts = [_padded(each, longest) for each in data] if data else []
        mine = torch.zeros(longest, dtype=torch.uint8)
        self.group.scatter(mine, parts, 0).wait()
        return _cut(mine, int(sizes[self.rank]))

    def _sizes(self, mine: int) -> list[int]:
        assert self.group is not None
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self.group.allgather([sizes], [torch.tensor([mine])]).wait()
        return [int(size) for size in sizes]

    def first(self, text: str) -> str:
        """The text of rank 0."""
        return self.gather(text if self.rank == 0 else "")[0]


def _padded(data: bytes, size: int) -> torch.Tensor:
    """``data`` as a tensor of ``size`` bytes, one at least."""
    return torch.frombuffer(bytearray(data).ljust(max(size, 1), b"\0"), dtype=torch.uint8)


def _cut(data: torch.Tensor, size: int) -> bytes:
    return bytes_of(data[:size])


def _watch(rank: int, world: int) -> RankWatch:
    """A watch of its own: that of compiled steps serves one wait at a time."""
    base: Any = torch_adapter.default_store()
    generation = dist.PrefixStore("weft/checkpoints", base).add(f"started/{rank}", 1)
    store = dist.PrefixStore(f"weft/checkpoints {generation}", base.clone())
    group = weakref.ref(dist.group.WORLD)
    watch = RankWatch(rank, world, store, lambda: dist.group.WORLD is group(), lambda _: None)
    atexit.register(watch.stop)
    return watch
