"""What guards accept at places where a call need not find the same object."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass(frozen=True)
class Pattern:
    """What a tuple, list or dictionary must be made of.

    Attributes:
        kind: its type.
        items: a pattern or a value for each position or key.
        factory: what makes the missing values of a ``defaultdict``; None of another type.
    """

    kind: type
    items: dict[Any, Any]
    factory: Any = None


@dataclass(frozen=True)
class Growing:
    """Any list of a type, but for those that the step knows otherwise.

    Attributes:
        kind: the type.
        others: ids of the objects that guards compare.
        maxlen: the most entries that it can have, None for any number.
        is_asked: whether the step asks anything of it.
        numbers: the type of the numbers that the step reads together; None where it reads none.
        last: how many of them it reads, from the end; None for all.
    """

    kind: type
    others: frozenset[int]
    maxlen: int | None = None
    is_asked: bool = False
    numbers: type | None = None
    last: int | None = None

    def matches(self, value: Any) -> bool:
        """Whether a value is such a list."""
        if type(value) is not self.kind or id(value) in self.others:
            return False
        if isinstance(value, deque) and value.maxlen != self.maxlen:
            return False
        return self.numbers is None or set(map(type, last_of(value, self.last))) <= {self.numbers}


@dataclass(frozen=True)
class OfType:
    """Any value of a type."""

    kind: type

    def matches(self, value: Any) -> bool:
        """Whether a value is of the type."""
        return type(value) is self.kind


def last_of(values: Any, count: int | None) -> Any:
    """The last entries of a list or deque, all of them where there are no more; None counts all."""
    return values if count is None else [*islice(reversed(values), count)][::-1]
