"""Walks of objects that hold each other in long chains, as the nodes of a linked list do.

A walk visits what an object holds from inside the visit of the object. Python refuses to go on at about a thousand
calls inside each other. So a visit that is too deep waits until the outermost one has ended.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

# A choice: each visit takes up to four calls, and the program may have used hundreds.
_DEEPEST = 60


class WaitingVisits:
    """The visits of one walk that wait.

    Attributes:
        arguments: of each visit.
        depth: how many visits are inside each other now.
    """

    def __init__(self) -> None:
        self.arguments: deque[tuple[Any, ...]] = deque()
        self.depth = 0


def waits_when_deep(visit: Callable[..., None]) -> Callable[..., None]:
    """Have a method that visits an object wait where it is called too deep. Its owner has ``waiting_visits``."""

    @functools.wraps(visit)
    def visit_or_wait(self: Any, *arguments: Any) -> None:
        waiting: WaitingVisits = self.waiting_visits
        if waiting.depth >= _DEEPEST:
            waiting.arguments.append(arguments)
            return
        waiting.depth += 1
        try:
            visit(self, *arguments)
            while waiting.depth == 1 and waiting.arguments:
                visit(self, *waiting.arguments.popleft())
        finally:
            waiting.depth -= 1

    return visit_or_wait
