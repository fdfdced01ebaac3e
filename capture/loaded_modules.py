"""Questions about all loaded modules, whose answers hold until a module is loaded, replaced or removed.

Each attempt at a capture asks several of them, and a process may have thousands of modules.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def remembered(answer: Callable[[], T]) -> Callable[[], T]:
    """The function, called only where ``sys.modules`` has other modules than at its last call."""
    known: tuple[list[Any], list[T]] = ([], [])  # the modules, and the answer

    def asked() -> T:
        nonlocal known
        modules, answers = known
        now = list(sys.modules.values())
        if not answers or len(now) != len(modules) or not all(map(operator.is_, now, modules)):
            answers = [answer()]
            known = now, answers
        return answers[0]

    return asked


names_of_modules = remembered(lambda: frozenset(sys.modules))
"""The names of all loaded modules."""
