"""Kernel generation as one pass: lower, inline, fuse, emit."""

from __future__ import annotations

import logging
from collections import Counter

from weft.capture.graph import StepGraph
from weft.inductor.codegen.kernel import supports
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.fusion.emit import emit, generated_kernels
from weft.inductor.fusion.fuse import fuse
from weft.inductor.fusion.inline import inline
from weft.inductor.graph.pass_runner import PassRunner, changes_bits
from weft.inductor.lowering.lower import lower
from weft.inductor.lowering.lowered_step import Lowered

log = logging.getLogger(__name__)


@changes_bits("kernels reduce in their own order and keep intermediate values in float32")
class GenerateKernels:
    """A pass that replaces all operations that have a lowering by calls of generated kernels, not compiled yet.

    Where it is disabled, the graph keeps its ATen operations.

    Args:
        runner: accounts for the time of each step of it and for the operations that it fails on, and says what to
            leave out: kernels of operations, inlining, fusion.
    """

    __name__ = "generate_kernels"
    draws_in_kernels = True  # for the verifier: kernels draw what operations drew

    def __init__(self, runner: PassRunner | None = None) -> None:
        self._runner = runner or PassRunner()

    def __call__(self, step: StepGraph) -> StepGraph:
        """A new graph: kernels, and the calls that have no lowering, in the order in which fusion leaves them."""
        timed, faults, left_out = self._runner.timed, self._runner.faults, self._runner.left_out
        # Each step notes the faults of all operations and goes on. One error is raised for all of them at its end, so
        # that a single further compilation leaves out everything that failed.
        on_aten = left_out.names("operation")
        lowered = timed("lower", lambda: lower(step, list(step.graph.nodes), on_aten, faults.collect))
        faults.raise_first()
        inlined = lowered if "inlining" in left_out else timed("inline", lambda: inline(lowered, faults.collect))
        faults.raise_first()
        join = "fusion" not in left_out
        items = timed("fuse", lambda: fuse(inlined, supports, faults.collect, join=join))
        faults.raise_first()
        # Texts for all items before the graph: a kernel that cannot be generated is known while the nests can still
        # be blamed.
        kernels = timed("generate", lambda: generated_kernels(inlined, items, faults.collect))
        faults.raise_first()
        graph = timed("generate", lambda: emit(inlined, items, kernels, faults.blame_nodes))
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
