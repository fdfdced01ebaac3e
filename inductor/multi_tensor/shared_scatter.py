"""Scattered sums whose index many lines share: the gradient of ``torch.gather`` along rows of attention scores.

DeBERTa looks up the score of each pair of positions by their distance, with one index for all heads and samples. ATen
scatters with an atomic addition for every element, and pairs far apart all add to one place. With one index for many
lines the sums are a GEMM for each row of the index: the lines that share the row times the one-hot matrix of the row. A
*line* is what has values of its own for each row (a head of a sample); a *place* is where a row's sums go. A program
multiplies a block of lines by a block of places. It begins at the first position whose index is one of its
places and ends at the last, so that an index that grows along its row, as distances do, costs little more than to read
and write.

There is no atomic, so every run gives the same bits. Sums are made in float32 and rounded once. As in
:mod:`weft.inductor.multi_tensor.one_hot`, float32 values count with 22 bits, and non-finite values are summed apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.codegen.triton_text import dtype_name, pointer_type
from weft.inductor.graph.serializable import serializable
from weft.inductor.multi_tensor.launch_plan import CallArgument, CallResult, LaunchPlan, add_launch
from weft.inductor.multi_tensor.operation import MultiTensor

MAX_COUNT = 4096  # positions of a row, whose indices a program loads at once, into registers
# Positions of the arguments of a call.
VALUES, INDEX = range(2)

# The tile of a program. Measured on an H200, 96 lines of 512 rows of 512 values for 512 places, by distance and in
# random order: 114 and 478 us with these, 148 and 428 with 128 places and 4 warps, 163 and 440 with 32 positions too;
# ATen takes 197 and 298, and has to clear the sums before.
_LINES = 32
_PLACES = 64
_AT_ONCE = 16  # positions of a row whose indices are compared at a time
_WARPS = 2


@serializable
@dataclass(frozen=True)
class SharedScatter(MultiTensor):
    """``shared_scatter([values], index)``: one list of one, the sums (lines, rows, size) in the dtype of values.

    Sum ``[l, r, k]`` is that of ``values[l, r, i]`` over all ``i`` with ``index[r, i] == k``. ``values`` (lines, rows,
    count) have any strides; ``index`` (rows, count), int32 or int64, is contiguous, with a ``count`` of at most
    ``MAX_COUNT``. Indices outside of ``size`` are ignored; ATen's kernels stop with an assertion there.
    """

    size: int

    @property
    def __name__(self) -> str:
        return "shared_scatter"

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        (values,), index = arguments
        kept = (index >= 0) & (index < self.size)
        wide = torch.promote_types(values.dtype, torch.float32)
        # One more place, for the values whose index is ignored.
        sums = torch.zeros(*values.shape[:2], self.size + 1, dtype=wide, device=values.device)
        sums.scatter_add_(2, torch.where(kept, index, self.size).expand(values.shape), values.to(wide))
        return [[sums[..., :-1].to(values.dtype).contiguous()]]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """One launch."""
        (values,), index = arguments
        lines, rows, count = values.shape
        plan = LaunchPlan.on_device_of(arguments)
        # Values of half types fit the numbers of 11 bits of a tensor core.
        precision = "tf32" if values.dtype.itemsize == 2 else "tf32x3"
        each_part = (
            "    which = first + tl.arange(0, AT_ONCE)",
            "    key = tl.load(index + row * COUNT + which, mask=which < COUNT, other=-1)",
            "    inside = (line < COUNT_OF_LINES)[:, None] & (which < COUNT)[None, :]",
            "    read = start + which.to(tl.int64)[None, :] * COLUMN",
            "    value = tl.load(read, mask=inside, other=0.0).to(tl.float32)",
            "    hot = (key[:, None] == place[None, :]).to(tl.float32)",
        )
        text = [
            # Programs of one row of the index are neighbours: they read it, and the blocks of places read the same
            # values, from the L2 cache.
            "block = tl.program_id(0) % BLOCKS",
            "stack = tl.program_id(0) // BLOCKS % STACKS",
            "row = (tl.program_id(0) // BLOCKS // STACKS).to(tl.int64)",
            "place = block * PLACES + tl.arange(0, PLACES)",
            "line = stack * LINES + tl.arange(0, LINES)",
            "start = values + line.to(tl.int64)[:, None] * LINE + row * ROW",
            "total = tl.zeros([LINES, PLACES], tl.float32)",
            # All indices of the row at once: a loop would wait for each part of them.
            "at = tl.arange(0, WHOLE)",
            "keys = tl.load(index + row * COUNT + at, mask=at < COUNT, other=-1)",
            "here = (keys >= block * PLACES) & (keys < (block + 1) * PLACES)",
            "begin = tl.min(tl.where(here, at, WHOLE), 0) // AT_ONCE * AT_ONCE",
            "end = tl.max(tl.where(here, at + 1, 0), 0)",
            "lost = tl.zeros([LINES, AT_ONCE], tl.int1)",
            "for first in range(begin, end, AT_ONCE):",
            *each_part,
            # False for NaN too. Zero times infinity is NaN, which a product would spread to every place.
            "    finite = tl.abs(value) < float('inf')",
            "    lost |= ~finite",
            f"    total = tl.dot(tl.where(finite, value, 0.0), hot, total, input_precision='{precision}')",
            # Rare, and asked once: the answer of each iteration would have to cross threads.
            "if tl.sum(tl.sum(lost.to(tl.int32), 1), 0) > 0:",
            "    for first in range(begin, end, AT_ONCE):",
            *(f"    {line}" for line in each_part),
            "        finite = tl.abs(value) < float('inf')",
            # A NaN is neither below nor above zero: it counts as both infinities, whose sum is NaN.
            "        up = tl.dot((~finite & ~(value < 0)).to(tl.float32), hot, input_precision='tf32')",
            "        down = tl.dot((~finite & ~(value > 0)).to(tl.float32), hot, input_precision='tf32')",
            "        total += tl.where(up > 0, float('inf'), 0.0) + tl.where(down > 0, float('-inf'), 0.0)",
            "to = (line.to(tl.int64)[:, None] * ROWS + row) * SIZE + place[None, :]",
            "written = (line < COUNT_OF_LINES)[:, None] & (place < SIZE)[None, :]",
            f"tl.store(sums + to, total.to({dtype_name(values.dtype)}), mask=written)",
        ]
        blocks, stacks = -(-self.size // _PLACES), -(-lines // _LINES)
        constants = {
            "COUNT_OF_LINES": lines,
            "ROWS": rows,
            "COUNT": count,
            "WHOLE": max(1 << (count - 1).bit_length(), _AT_ONCE),
            "LINE": values.stride(0),
            "ROW": values.stride(1),
            "COLUMN": values.stride(2),
            "SIZE": self.size,
            "BLOCKS": blocks,
            "STACKS": stacks,
            "LINES": _LINES,
            "PLACES": _PLACES,
            "AT_ONCE": _AT_ONCE,
        }
        dtype = pointer_type(values.dtype)
        signature = {"values": dtype, "index": pointer_type(index.dtype), "sums": dtype}
        places = (CallArgument(VALUES, 0), CallArgument(INDEX), CallResult(0, 0))
        add_launch(plan, "shared_scatter", text, signature, places, rows * blocks * stacks, constants, warps=_WARPS)
        return plan
