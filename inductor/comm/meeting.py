"""Ranks of a group tell each other something over the store, before they share memory.

Never through a collective, which is what would hang where they differ. Every rank of the group must make the same
meetings in the same order, each from its own place in the program.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from weft import errors, knobs, torch_adapter

_held: Counter[str] = Counter()


class Meeting:
    """One meeting, as one rank sees it.

    Args:
        axis: the group's name in graphs, for messages.
        group: as torch registered it.
        about: what tells the meetings of a group apart.

    All methods raise errors.PeersUnreachable where a rank does not come within ``knobs.peer_timeout_s``.
    """

    def __init__(self, axis: str, group: str, about: str) -> None:
        self.axis = axis
        self.about = about
        self.ranks = torch_adapter.group_ranks(group)
        self.rank = self.ranks.index(dist.get_rank())
        place = f"weft/peers/{hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]}/{about}"
        _held[place] += 1
        self.store = dist.PrefixStore(f"{place}/{_held[place]}", torch_adapter.default_store())

    def lead(self, text: str) -> str:
        """The ``text`` of the group's first rank."""
        if self.rank == 0:
            self.store.set("first", text)
            return text
        return self._get("first")

    def exchange(self, text: str) -> list[str]:
        """The texts of all ranks, in the group's order."""
        self.store.set(f"text/{self.rank}", text)
        return [self._get(f"text/{rank}") for rank in range(len(self.ranks))]

    def verdict(self, objection: str | None) -> str | None:
        """An objection of some rank, the same on all; None where no rank has one. Returns once all have spoken."""
        if objection is not None:
            self.store.set("objection", objection)
        if self.store.add("spoken", 1) == len(self.ranks):
            self.store.set("all", "")
        self._get("all")
        return self._get("objection") if self.store.check(["objection"]) else None

    def _get(self, key: str) -> str:
        try:
            self.store.wait([key], timedelta(seconds=knobs.peer_timeout_s))
            return self.store.get(key).decode()
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            why = f"not all of {len(self.ranks)} ranks came to say so ({self.about}: {str(error).splitlines()[0]})"
            raise errors.PeersUnreachable(self.axis, why) from error
