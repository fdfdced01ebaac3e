"""What becomes of the values of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.inductor.comm.kernels.text import load, places, widened
from weft.inductor.multi_tensor.text import number

_COMBINED = {
    "sum": "{} + {}",
    "max": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
}


@dataclass(frozen=True)
class Reduction:
    """Values combined in the order of the ranks, in float32 for float32 and smaller types.

    So whichever rank computes it gets the same bits, every time.

    Attributes:
        op: "sum", "max" or "min"; a NaN stays.
        scale: what the result is multiplied by, such as 1 / world; 1.0 for integers.
    """

    op: str = "sum"
    scale: float = 1.0

    def lines(self, world: int, dtype: torch.dtype, at_a_time: int, mask: str) -> list[str]:
        """Lines that leave in ``total`` what the blocks at :func:`places` combine to, loading ``at_a_time`` at once.

        The assembler would load from a peer or two at once, to save registers, and a remote load takes microseconds.
        But loads do not pass a barrier, and nothing can be combined before the first value is there: it is loaded
        last, behind a barrier.
        """
        lines = []
        for first in range(0, world, at_a_time):
            peers = range(first, min(first + at_a_time, world))
            last, *loads = (f"value{k} = {load(places(world)[k], mask)}" for k in peers)
            lines += [*loads, "tl.debug_barrier()", last] if loads else [last]
            values = {k: widened(f"value{k}", dtype) for k in peers}
            lines += [f"total = {_COMBINED[self.op].format('total', values[k]) if k else values[k]}" for k in peers]
        return [*lines, f"total = total * {number(self.scale)}"] if self.scale != 1.0 else lines
