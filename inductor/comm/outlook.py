"""What memory the rest of a step needs, if it is issued in a known order.

While that is within the limit there is always a way on, whatever was issued ahead of its place so far.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from weft.inductor.comm.problem import Problem
from weft.inductor.comm.simulate import Holding, users_of

# Held at the place of a task that was issued ahead of it.
_NOTHING = -(1 << 62)


class Outlook:
    """Bytes held at each place of an order, if what has not been issued follows in it.

    Tasks that are late are not seen: at every place, all that come before it count as issued.
    """

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        holding = Holding(problem)
        waits = problem.waits_of()
        self._order = order
        self._place = [0] * len(order)
        for place, task in enumerate(order):
            self._place[task] = place
        self._sizes = [storage.size for storage in problem.storages]
        # By storage, the places of the tasks that it is held for, in order; none where it is held to the end.
        self._users = [sorted(self._place[user] for user in users_of(storage, waits)) for storage in problem.storages]
        self._used: list[list[int]] = [[] for _ in order]
        for at, places in enumerate(self._users):
            for place in places:
                self._used[order[place]].append(at)
        self._held = torch.tensor([holding.issue(task) for task in order], dtype=torch.int64)
        self._ahead = bytearray(len(order))  # by place: its task was issued ahead of it
        # By storage, how many of its users come no later than the last that was not issued ahead.
        self._left = array("i", map(len, self._users))

    def copy(self) -> Outlook:
        """One that goes on from here by itself: 8 bytes copied a task, 4 a storage."""
        other = object.__new__(Outlook)
        other._order, other._place = self._order, self._place
        other._sizes, other._users, other._used = self._sizes, self._users, self._used
        other._held, other._ahead, other._left = self._held.clone(), self._ahead[:], self._left[:]
        return other

    def most(self, place: int, task: int) -> tuple[int, int]:
        """The most bytes held from ``place`` on until ``task`` is issued at its own, and the last place where they
        are."""
        held = self._held[place : self._place[task]]
        most = int(held.max())
        return most, place + int((held == most).nonzero()[-1])

    def freed(self, tasks: Sequence[int], issued: bytearray) -> int:
        """Bytes that are held for none but ``tasks`` and what is issued (by task, whether it is)."""
        storages = dict.fromkeys(at for task in tasks for at in self._used[task])
        order = self._order

        def is_last(at: int) -> bool:
            return all(issued[order[place]] or order[place] in tasks for place in self._users[at])

        return sum(self._sizes[at] for at in storages if is_last(at))

    def issue_ahead(self, task: int, made: int, place: int) -> None:
        """Issue a task, which makes ``made`` bytes, when the order has come to ``place``, before its own."""
        own = self._place[task]
        self._held[place:own] += made
        self._held[own] = _NOTHING
        self._ahead[own] = True
        for at in self._used[task]:
            users, left = self._users[at], self._left[at]
            if users[left - 1] != own:
                continue
            while left and self._ahead[users[left - 1]]:
                left -= 1
            self._left[at] = left
            freed = max(users[left - 1] + 1 if left else 0, place)
            self._held[freed:own] -= self._sizes[at]
