"""Live ranges of the buffers of a lowered step, and which of them a later computation would extend.

A small result of a large operand (a row's logit at its label) is computed while the operand is alive. If it were
computed where it is read, or in one kernel with its reader, the operand would stay in memory past calls that need
memory themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch

from weft.capture.node_kinds import is_collective, is_wait
from weft.inductor.lowering.lowered_step import Extern, Lowered, Operation

# Bytes of operands that may be kept alive for each byte of a result. Not fitted: a cast from float64 to a byte passes.
_MAX_HELD_RATIO = 8


class Lifetimes:
    """Last uses of buffers, by position in ``lowered.operations``.

    Attributes:
        results: names of the buffers that hold results of the step; they are never freed.
    """

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        results = (node for node in lowered.step.results if isinstance(node, torch.fx.Node))
        self.results = frozenset(lowered.operands[node].buffer for node in results if node in lowered.operands)
        # Inputs of the step are not freed in it, so reading one of them later costs nothing.
        self._freed = {name for operation in lowered.operations for name in operation.writes} - self.results
        # Operations come in order, so the last reader's position is the one that stays.
        self._last = {name: at for at, operation in enumerate(lowered.operations) for name in operation.reads}
        # A running count: calls between two positions are one subtraction.
        self._calls = list(accumulate(map(_is_call, lowered.operations)))

    def would_extend(self, reads: Iterable[str], writes: Iterable[str], at: int) -> bool:
        """Whether operation ``at`` would keep a buffer alive that is much larger than ``writes`` and otherwise freed
        before a call, if it read ``reads`` in place of ``writes``, which are computed from them."""
        most = _MAX_HELD_RATIO * sum(map(self._lowered.bytes, writes))
        return any(self._lowered.bytes(name) > most for name in self._outlived(reads, at))

    def read(self, reads: Iterable[str], at: int) -> None:
        """Record that operation ``at`` reads these buffers."""
        for name in reads:
            self._last[name] = max(self._last[name], at)

    def _outlived(self, reads: Iterable[str], at: int) -> Iterator[str]:
        """Those of ``reads`` that are freed before a call that runs before operation ``at``."""
        # Only past a call, such as the GEMM of a loss's next chunk: if each row's logit were picked after all chunks,
        # the logits of all of them would be alive at once (1 GiB in a model of 1B parameters).
        return (name for name in reads if name in self._freed and self._calls[self._last[name]] < self._calls[at])


def _is_call(operation: Operation) -> bool:
    return isinstance(operation, Extern) and not (is_collective(operation.node) or is_wait(operation.node))
