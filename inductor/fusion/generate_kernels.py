"""Kernel generation as one pass: lower, inline, fuse, emit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from weft.capture.graph import StepGraph
from weft.inductor.codegen.kernel import supports
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.fusion.emit import emit
from weft.inductor.fusion.fuse import fuse
from weft.inductor.fusion.inline import inline
from weft.inductor.graph.pass_runner import changes_bits
from weft.inductor.lowering.lower import lower
from weft.inductor.lowering.lowered_step import Lowered

log = logging.getLogger(__name__)


@changes_bits("kernels reduce in their own order and keep intermediate values in float32")
class GenerateKernels:
    """A pass that replaces all operations that have a lowering by calls of generated kernels, not compiled yet.

    Where it is disabled, the graph keeps its ATen operations.

    Args:
        timed: called with the name of a step and what runs it; returns what that returns.
    """

    __name__ = "generate_kernels"
    draws_in_kernels = True  # for the verifier: kernels draw what operations drew

    def __init__(self, timed: Callable[[str, Callable[[], Any]], Any] = lambda name, run: run()) -> None:
        self._timed = timed

    def __call__(self, step: StepGraph) -> StepGraph:
        """A new graph: kernels, and the calls that have no lowering, in the order in which fusion leaves them."""
        lowered = self._timed("lower", lambda: lower(step, list(step.graph.nodes)))
        inlined = self._timed("inline", lambda: inline(lowered))
        items = self._timed("fuse", lambda: fuse(inlined, supports))
        graph = self._timed("generate", lambda: emit(inlined, items))
        if log.isEnabledFor(logging.DEBUG):
            _log_kernels(lowered, graph)
        return graph


def _log_kernels(lowered: Lowered, graph: StepGraph) -> None:
    for name, count in lowered.reasons.most_common():
        log.debug("not lowered: %d x %s", count, name)
    calls = [node.target for node in graph.graph.nodes if isinstance(node.target, KernelCall)]
    counts = Counter(call.generated.source for call in calls)
    for source, call in {call.generated.source: call for call in reversed(calls)}.items():
        origins = "\n".join(map(str, call.origins))
        log.debug("kernel %s, %d x, from\n%s\n%s", source.name, counts[source], origins, source.text)
