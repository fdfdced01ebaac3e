"""Collectives are numbered in the order in which the step was captured.

The captured order is the same on every rank. Where ranks cannot agree on a schedule, collectives are issued by these
numbers (:func:`weft.inductor.schedule.agree_on_schedule.in_captured_order`).
"""

from __future__ import annotations

from weft.capture.graph import StepGraph
from weft.inductor.graph.pass_runner import keeps_bits, required


@required
@keeps_bits
def number_collectives(step: StepGraph) -> StepGraph:
    """Write the position of each collective among the collectives into ``meta["capture_order"]``, and as the one member
    of ``meta["members"]``. Changes ``step``."""
    for at, start in enumerate(step.collectives()):
        start.meta["capture_order"], start.meta["members"] = at, (at,)
    return step
