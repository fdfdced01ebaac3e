"""Floats that stand for symbolic numbers while a function of torch's in C++ runs.

A tag is a float next to the number's present value that nothing else in the program equals.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.ended_runs import RunEnded


class UnknownFloat(RunEnded):
    """A function in C++ has computed a float of which nobody knows how it depends on a symbolic number."""


class FloatTags:
    """The tags of one capture, and what they stand for.

    Attributes:
        used: whether functions get tags where torch would fix symbols to their values.
    """

    def __init__(self) -> None:
        self.used = True
        self._symbols: dict[float, Any] = {}
        self._tags: dict[Any, float] = {}
        self._known: set[float] | None = None
        self._backwards: dict[int, set[float]] = {}

    def tag(self, number: torch.SymFloat) -> float:
        """The tag of a symbolic number."""
        expression = torch_adapter.expression(number)
        if expression not in self._tags:
            value = number.node.hint if number.node.has_hint() else 0.0
            self._tags[expression] = tag = _next_to(value, len(self._tags) + 1)
            self._symbols[tag] = number
        return self._tags[expression]

    def define(self, tag: float, number: Any) -> None:
        """What was computed from a tag, and the symbolic number that was computed alike.

        Raises:
            UnknownFloat: the result is not seen to be computed from a tag: ``1 - p`` of a tiny p is 1.
        """
        if _is_small_constant(tag):
            raise UnknownFloat(f"what a function computes from {number} is {tag!r}, which may be any constant")
        self._symbols.setdefault(tag, number)

    def symbol(self, number: float) -> Any:
        """The symbolic number that a float stands for; None where it stands for itself.

        Raises:
            UnknownFloat: it is none of the floats that may arrive now, in such a function or in its backward.
        """
        if not self._symbols:
            return None
        found, known = self._symbols.get(number), self._known
        if known is None and (running := torch_adapter.running_autograd_node()) is not None:
            known = self._backwards.get(torch_adapter.sequence_number(running))
        if found is not None:
            # Autograd has made the node of the operation that takes the number.
            self._backwards[torch_adapter.last_sequence_number()] = known or set()
        elif known is not None and number not in known and not _is_small_constant(number):
            raise UnknownFloat(f"{number!r} is computed from a number that changes")
        return found

    @contextlib.contextmanager
    def only(self, known: set[float]) -> Iterator[None]:
        """Inside, no floats may arrive but these, tags, and small constants."""
        before, self._known = self._known, known
        try:
            yield
        finally:
            self._known = before

    def clear(self) -> None:
        """Let go of the numbers."""
        self._symbols.clear()
        self._tags.clear()
        self._backwards.clear()


def _next_to(value: float, count: int) -> float:
    """The ``count``-th tag next to a value: of the same sign, away from zero by about 2**-15 of it."""
    if not 0 < abs(value) < 1e300:
        return count * 5e-324  # the smallest denormal numbers, which no program uses as settings
    bits = struct.unpack("<q", struct.pack("<d", value))[0]
    # The change is seen in float32 as well, as C++ may round to it.
    return struct.unpack("<d", struct.pack("<q", (bits & ~0xFFFFFFFFF) + 0x1A31C9B35B + 2 * count))[0]


def _is_small_constant(number: float) -> bool:
    """Whether a float looks like a constant of C++ code, such as -1 or 0.5, and not like a result."""
    return not math.isfinite(number) or (abs(number) < 1000 and number * 8 == int(number * 8))
