"""Ranks leave texts for each other in the store of the process group.

Whatever ranks compare or decide together goes this way and never through a collective, which would hang where ranks
differ. Each text is small and each rank makes a handful of requests, whatever the size of the world.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from weft import errors, threads_at_exit, torch_adapter


class StoreRendezvous:
    """One rendezvous of some ranks, as one of them sees it.

    All of them come to a place equally often and in the same order. How often is counted in the store, so a process
    that joins a new process group begins at 1 again, as the other ranks do.

    Args:
        place: what tells it from other rendezvous of the same ranks.
        ranks: those that come, as the world numbers them, in the order of their group.
        rank: this one.
        timeout_s: seconds that this rank waits for what another one posts.
        late: makes the error to raise where something was not posted in time, from the keys of that.
        store: where texts are left (default: the store of the default process group).
        number: which of the rendezvous at this place it is, where all ranks know; they are counted otherwise.

    Attributes:
        number: as given, or how often this rank has come to this place, from 1.
        at: this rank's position in ``ranks``.

    All methods raise errors.StoreLost where the process that holds the store is gone.
    """

    def __init__(
        self,
        place: str,
        ranks: Sequence[int],
        rank: int,
        timeout_s: float,
        late: Callable[[list[str]], Exception] | None = None,
        store: dist.Store | None = None,
        number: int | None = None,
    ) -> None:
        self.place = place
        self.ranks = list(ranks)
        self.rank = rank
        self.at = self.ranks.index(rank)
        self.timeout_s = timeout_s
        self._late = late or (lambda keys: TimeoutError(", ".join(keys)))
        who = hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]
        here = dist.PrefixStore(f"weft/{place}/{who}", store or torch_adapter.default_store())
        with self._reachable():
            self.number = here.add(f"calls/{rank}", 1) if number is None else number
        self._store = dist.PrefixStore(str(self.number), here)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise errors.StoreLost(self.place, self.rank) from error

    # ---- texts

    def post(self, key: str, text: str) -> None:
        """Leave ``text`` under ``key``, over what is there."""
        with self._reachable():
            self._store.set(key, text)

    def post_first(self, key: str, text: str) -> str:
        """Leave ``text`` unless another rank has left one there; returns what is there, the same for all ranks."""
        with self._reachable():
            return self._store.compare_set(key, "", text).decode()

    def count(self, key: str) -> int:
        """How many ranks, with this one, have counted themselves under ``key``."""
        with self._reachable():
            return self._store.add(key, 1)

    def read(self, key: str, timeout_s: float | None = None) -> str | None:
        """The text under ``key`` once a rank has left it; None where that takes longer than ``timeout_s``."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return None if self._wait([key], seconds) else self._get(key)

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """The texts under all ``keys`` once they are there. Raises what ``late`` makes where one is not in time."""
        if absent := self._wait(keys, self.timeout_s):
            raise self._late(absent)
        with self._reachable():
            return [text.decode() for text in self._store.multi_get(list(keys))]

    def _get(self, key: str) -> str:
        with self._reachable():
            return self._store.get(key).decode()

    def _wait(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Those of ``keys`` that are not there after so many seconds."""
        with self._reachable(), threads_at_exit.waiting_for_ranks():
            try:
                self._store.wait(list(keys), timedelta(seconds=max(seconds, 0.01)))
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # stores have several errors for a timeout: what is there tells
                return self.absent(keys)
        return []

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Those of ``keys`` that nobody has left, by halving: few requests where few are absent."""
        with self._reachable():
            if self._store.check(list(keys)):
                return []
        half = len(keys) // 2
        return list(keys) if not half else self.absent(keys[:half]) + self.absent(keys[half:])

    def leave(self, own: Sequence[str], shared: Sequence[str]) -> None:
        """Take away what this rank left under ``own``; the last rank to leave takes what is ``shared``."""
        with self._reachable():
            for key in own:
                self._store.delete_key(key)
            if self.count("left") == len(self.ranks):
                for key in (*shared, "left"):
                    self._store.delete_key(key)

    # ---- what all ranks find out together

    def broadcast(self, text: str) -> str:
        """The ``text`` of the first rank."""
        if self.at == 0:
            self.post("first", text)
            return text
        return self.read_all(["first"])[0]

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, in the order of ``ranks``."""
        self.post(f"text/{self.at}", text)
        return self.read_all([f"text/{at}" for at in range(len(self.ranks))])

    def first_objection(self, objection: str | None) -> str | None:
        """An objection of some rank, the same on all; None where no rank has one. Returns once all have answered."""
        self.answer(objection)
        self.read_all(["all"])
        return None if self.absent(["objection"]) else self._get("objection")

    def answer(self, objection: str | None) -> None:
        """Take part in :meth:`first_objection` without waiting for the answers of the other ranks."""
        if objection is not None:
            self.post("objection", objection)
        if self.count("answered") == len(self.ranks):
            self.post("all", "")
