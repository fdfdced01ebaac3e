"""The passes from a captured graph to the one that is compiled, in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from weft.capture.graph import StepGraph
from weft.inductor.passes.coalesce import coalesce
from weft.inductor.passes.noops import drop_noops
from weft.inductor.passes.pack import pack
from weft.inductor.passes.unused_gathers import drop_unused_gathers

log = logging.getLogger(__name__)

Pass = Callable[[StepGraph], StepGraph]

# Passes that keep every bit of every result. Passes that may change the order of sums will be a list of their own.
BIT_KEEPING: list[Pass] = [drop_noops, drop_unused_gathers, pack, coalesce]


def run_passes(step: StepGraph, passes: list[Pass] | None = None) -> StepGraph:
    """Run ``passes`` (the bit-keeping ones by default) over a copy of ``step``, checking the graph after each.

    Raises:
        MalformedGraph: a pass broke the graph.
    """
    step = step.copy()
    for pass_ in BIT_KEEPING if passes is None else passes:
        before, started = len(step), time.perf_counter()
        step = pass_(step).check()
        log.debug("%s: %d -> %d nodes in %.3f s", pass_.__name__, before, len(step), time.perf_counter() - started)
    return step
