"""Run captured steps after passes, on copies of what the capture was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.capture.graph import StepGraph
from weft.capture.record.tracer import capture_step
from weft.inductor.graph.pass_runner import Pass
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.passes.schedule_waits import schedule_waits
from weft.inductor.runtime.aten import compile_aten

# In the order of the pipeline.
BIT_KEEPING: list[Pass] = [pass_ for pass_ in (*KERNEL_PASSES, schedule_waits) if not pass_.numeric_effect]


class Run:
    """A step captured once, its graph after passes, and what it computes on the ATen executor.

    Attributes:
        graph: after the passes.
        source: of the program.
        outcome: what the step returned and what it left in its inputs, in the order of the captured graph: an object
            that is returned in several places once, see :func:`distinct`.
    """

    def __init__(
        self, step: Callable[..., Any], args: Sequence[Any], passes: list[Pass], again: Sequence[Any] | None = None
    ) -> None:
        """Run with ``args``, or where given with ``again`` in their place (other sizes of dynamic dimensions)."""
        captured = capture_step(step, tuple(args))
        self.before = captured.graph
        self.graph = run_passes(captured.graph, passes)
        program = compile_aten(self.graph)
        self.source = program.source
        if again is not None:
            captured.arguments.bind(list(again))
        values = [_copied(place.get()) for place in captured.places]
        returned = program(*values)
        self.outcome = [value for value in (*returned, *values) if isinstance(value, torch.Tensor)]


def distinct(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each object once, as the outputs of a graph."""
    return list({id(value): value for value in values}.values())


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def targets(step: StepGraph) -> Counter[str]:
    """How often each operation occurs, as ``aten.add.Tensor``."""
    return Counter(str(node.target) for node in step.graph.nodes if node.op == "call_function")


def same_bits(one: Run, other: Run) -> bool:
    return len(one.outcome) == len(other.outcome) and all(
        torch.equal(a, b) for a, b in zip(one.outcome, other.outcome, strict=True)
    )


def close(one: Run, other: Run, **tolerances: float) -> None:
    torch.testing.assert_close(one.outcome, other.outcome, **tolerances)
