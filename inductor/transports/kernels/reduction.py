"""How the values of all ranks are combined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.inductor.codegen.triton_text import float32_literal
from weft.inductor.transports.kernels.peer_kernel_text import load, peer_names, widened

_COMBINED = {
    "sum": "{} + {}",
    # As torch's max and min: a NaN of any rank is the result.
    "max": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
}


@dataclass(frozen=True)
class RankReduction:
    """Values of all ranks, combined in the order of ranks, in float32 for float32 and narrower types.

    The fixed order gives the same bits on every rank and at every run.

    Attributes:
        op: "sum", "max" or "min"; a NaN stays.
        scale: what the result is multiplied by, such as 1 / world; 1.0 for integers.
    """

    op: str = "sum"
    scale: float = 1.0

    def lines(self, world: int, dtype: torch.dtype, at_a_time: int, mask: str) -> list[str]:
        """Lines that combine the blocks at :func:`peer_names` into ``total``, loading ``at_a_time`` at once.

        A remote load takes microseconds, but the assembler would load from one or two peers at a time, to save
        registers. Loads do not move across a barrier, and the sum starts with the first value. So the first value is
        loaded last, after a barrier: all other loads are then in flight already.
        """
        lines = []
        # As many peers as registers can hold; their sums follow in the order of ranks.
        for first in range(0, world, at_a_time):
            peers = range(first, min(first + at_a_time, world))
            last, *loads = (f"value{k} = {load(peer_names(world)[k], mask)}" for k in peers)
            lines += [*loads, "tl.debug_barrier()", last] if loads else [last]
            values = {k: widened(f"value{k}", dtype) for k in peers}
            lines += [f"total = {_COMBINED[self.op].format('total', values[k]) if k else values[k]}" for k in peers]
        return [*lines, f"total = total * {float32_literal(self.scale)}"] if self.scale != 1.0 else lines
