"""How long the buffers of a lowered step are held, and what computing a value later would hold longer.

Little that is made of much (a row's logit at its label) is computed while much is there: computed where it is read,
or in one kernel with its reader, it would keep all of it past calls that need memory too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch

from weft.capture.graph import is_collective, is_wait
from weft.inductor.lower import Extern, Lowered, Operation

# Bytes that a value may keep in memory for each one of its own.
_MOST_HELD = 8


class Lifetimes:
    """Positions are those of the operations of ``lowered``.

    Attributes:
        kept: the buffers that hold results of the step.
    """

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        results = (node for node in lowered.step.results if isinstance(node, torch.fx.Node))
        self.kept = frozenset(lowered.operands[node].buffer for node in results if node in lowered.operands)
        self._freed = {name for operation in lowered.operations for name in operation.writes} - self.kept
        self._last = {name: at for at, operation in enumerate(lowered.operations) for name in operation.reads}
        self._calls = list(accumulate(map(_is_call, lowered.operations)))

    def too_long(self, reads: Iterable[str], writes: Iterable[str], at: int) -> bool:
        """Whether operation number ``at`` would hold much for long that is done with by then, if it read ``reads``
        instead of ``writes``, which are made of them."""
        most = _MOST_HELD * sum(map(self._lowered.bytes, writes))
        return any(self._lowered.bytes(name) > most for name in self._outlived(reads, at))

    def read(self, reads: Iterable[str], at: int) -> None:
        """Operation number ``at`` reads these."""
        for name in reads:
            self._last[name] = max(self._last[name], at)

    def _outlived(self, reads: Iterable[str], at: int) -> Iterator[str]:
        """Those of ``reads`` behind whose last reader a call comes before ``at``."""
        return (name for name in reads if name in self._freed and self._calls[self._last[name]] < self._calls[at])


def _is_call(operation: Operation) -> bool:
    return isinstance(operation, Extern) and not (is_collective(operation.node) or is_wait(operation.node))
