"""Forecast of the memory that the rest of a step needs, if it is issued in a reference order.

While the forecast is within the limit, the step can always be finished, whatever was issued ahead of its place so far.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from weft.inductor.cost.simulate import LiveMemory, StorageUses
from weft.inductor.cost.task_graph import TaskGraph

# Live bytes at the place of a task that was issued ahead: smaller than any maximum, even after additions. Nothing runs
# at that place any more, so it must not count.
_NOTHING = -(1 << 62)


class MemoryForecast:
    """Bytes held at each place of an order, if all tasks that are not issued yet follow in that order.

    Postponed tasks are ignored: at every place, all tasks before it count as issued.
    """

    def __init__(self, task_graph: TaskGraph, order: Sequence[int]) -> None:
        live_memory, uses = LiveMemory(task_graph), task_graph.derived(StorageUses)
        self._place = [0] * len(order)
        for place, task in enumerate(order):
            self._place[task] = place
        self._sizes = uses.sizes
        # By storage, the places of its users in ascending order; empty if it is live until the end of the step.
        self._users = [sorted(self._place[user] for user in users) for users in uses.users]
        self._used: list[list[int]] = [[] for _ in order]
        for at, places in enumerate(self._users):
            for place in places:
                self._used[order[place]].append(at)
        self._live = torch.tensor([live_memory.issue(task) for task in order], dtype=torch.int64)
        self._ahead = bytearray(len(order))  # by place: its task was issued ahead of it
        # By storage, the number of its users up to the last one that was not issued ahead. That one frees it.
        self._left = array("i", map(len, self._users))

    def copy(self) -> MemoryForecast:
        """An independent copy. Copies 8 bytes per task and 4 per storage."""
        other = object.__new__(MemoryForecast)
        other._place, other._sizes, other._users, other._used = self._place, self._sizes, self._users, self._used
        other._live, other._ahead, other._left = self._live.clone(), self._ahead[:], self._left[:]
        return other

    def most(self, place: int, task: int) -> int:
        """The peak from ``place`` up to, not including, the place of ``task``, in bytes."""
        return int(self._live[place : self._place[task]].max())

    def last_place_of(self, most: int, place: int, task: int) -> int:
        """The last place of the peak ``most`` that :meth:`most` returned for these arguments."""
        return place + int((self._live[place : self._place[task]] == most).nonzero()[-1])

    def issue_ahead(self, task: int, allocated: int, place: int) -> None:
        """Record that ``task``, which allocates ``allocated`` bytes, is issued at ``place``, ahead of its own place."""
        # Example: a task with its place at 90 is issued at 50. What it allocates is live in addition from 50 to 89;
        # from 91 on nothing changes. A storage whose last user it was is freed after the last user that remains in its
        # place, at 50 at the earliest.
        own = self._place[task]
        self._live[own] = _NOTHING
        self._ahead[own] = True
        # Bytes to add from a place up to its own. Most storages that it frees are freed at ``place``: their sizes are
        # summed, because a change of the tensor takes longer than an addition.
        added = {place: allocated}
        # If it was the last user of a storage, the live range now ends at the last user that remains in its place.
        for at in self._used[task]:
            users, left = self._users[at], self._left[at]
            if users[left - 1] != own:
                continue
            # Users that were issued ahead before this one no longer hold the storage at their places either.
            while left and self._ahead[users[left - 1]]:
                left -= 1
            self._left[at] = left
            freed = max(users[left - 1] + 1 if left else 0, place)
            added[freed] = added.get(freed, 0) - self._sizes[at]
        for begin, size in added.items():
            if size:
                self._live[begin:own].add_(size)  # `+=` would copy the slice onto itself as well
