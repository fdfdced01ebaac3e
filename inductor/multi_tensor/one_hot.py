"""Sums of narrow rows by index, for tables of moderate size: the gradient of a table of position biases.

Such a sum is a product: row ``k`` of the table is ``sum over i of (index[i] == k) * rows[i]``, the transposed one-hot
matrix of the indices times the rows. Where rows have a few columns, sorting the indices takes longer than comparing
each with every place, and a thread that adds up all rows of an index waits for memory most of the time. Two kernels:

1. a program compares a stretch of the indices with a block of places, in registers, and multiplies what it finds by the
   rows on tensor cores; it writes sums of its stretch;
2. the sums of all stretches are added, in their order.

No sort, no atomics: the same bits at every run. Values are split into two numbers of 11 bits each for the tensor cores
(``tf32x3``), so they count with 22 bits, and are added in float32. A product would carry what is not finite into every
place, as zero times infinity; such values are counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.plan import Given, Made, Plan, Scratch, add_launch
from weft.inductor.multi_tensor.text import INDICES, POINTERS, TRITON_DTYPES, function, number

# Positions of the arguments of a call.
ROWS, INDEX, BASE = range(3)

WIDEST = 32  # columns whose sums a program keeps in its registers
_PLACES = 64  # of a program
_AT_ONCE = 32  # indices compared at a time: with 64 half as many programs fit on a multiprocessor
_NARROWEST = 16  # columns of the smallest product of tensor cores
_PROGRAMS = 132 * 4
_ADDED = 8  # stretches whose sums are loaded at a time
_BLOCK = 128  # elements of the table a program of the second kernel adds up


@dataclass(frozen=True)
class OneHotSum(MultiTensor):
    """``one_hot_sum([rows], index, [base])``: one list of one, the table (size, columns) in the dtype of rows.

    Row ``k`` of the table is ``base[k]``, or zero, plus ``scale`` times the sum of ``rows[i]`` over all ``i`` with
    ``index[i] == k``. An index below zero counts from the end of the table where it ``wraps``; those outside the table
    are left out, as in :class:`weft.inductor.multi_tensor.segments.SegmentSum`.

    ``rows`` (count, columns) have at most ``WIDEST`` columns and any strides; ``index`` (count,), int32 or int64, and
    ``base`` (size, columns, or an empty list), in the dtype of rows, are contiguous.

    Attributes:
        size: rows of the table.
        skipped: a row of the table that gets no sum (``padding_idx``), -1 for none.
        scale: what sums are multiplied by.
        wraps: whether an index below zero counts from the end.
    """

    size: int
    skipped: int = -1
    scale: float = 1.0
    wraps: bool = False

    @property
    def __name__(self) -> str:
        return "one_hot_sum"

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        (rows,), index, base = arguments
        at = torch.where(index < 0, index + self.size, index) if self.wraps else index
        kept = (at >= 0) & (at < self.size) & (at != self.skipped)
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = torch.zeros(self.size + 1, rows.shape[1], dtype=wide, device=rows.device)
        sums.index_add_(0, torch.where(kept, at, self.size), rows.to(wide))
        sums = sums[:-1] * self.scale
        return [[(sums + base[0] if base else sums).to(rows.dtype)]]

    def plan(self, arguments: Sequence[Any], number_type: str = "fp32") -> Plan:
        (rows,), index, base = arguments
        count, columns = rows.shape
        blocks = -(-self.size // _PLACES)
        stretch = _AT_ONCE * max(-(-count * blocks // (_PROGRAMS * _AT_ONCE)), 1)
        stretches = -(-count // stretch)
        plan = Plan()
        plan.scratch["partials"] = (stretches * self.size * columns, torch.float32)
        self._add_partials(plan, rows, index, stretch, blocks * stretches)
        self._add_sums(plan, rows, stretches, bool(base))
        return plan

    def _add_partials(self, plan: Plan, rows: torch.Tensor, index: torch.Tensor, stretch: int, grid: int) -> None:
        count, columns = rows.shape
        lines = [
            "stretch = tl.program_id(0) // BLOCKS",
            "place = tl.program_id(0) % BLOCKS * PLACES + tl.arange(0, PLACES)",
            "column = tl.arange(0, WIDTH)",
            "total = tl.zeros([PLACES, WIDTH], tl.float32)",
            "for first in range(stretch * STRETCH, tl.minimum((stretch + 1) * STRETCH, COUNT), AT_ONCE):",
            "    which = first + tl.arange(0, AT_ONCE)",
            "    key = tl.load(index + which, mask=which < COUNT, other=SIZE)",
            *(["    key = tl.where(key < 0, key + SIZE, key)"] if self.wraps else ()),
            *([f"    key = tl.where(key == {self.skipped}, SIZE, key)"] if self.skipped >= 0 else ()),
            "    inside = (which < COUNT)[:, None] & (column < COLUMNS)[None, :]",
            "    at = which.to(tl.int64)[:, None] * ROW + column.to(tl.int64)[None, :] * COLUMN",
            "    values = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)",
            "    hot = (place[:, None] == key[None, :]).to(tl.float32)",
            "    finite = tl.abs(values) < float('inf')",
            "    total = tl.dot(hot, tl.where(finite, values, 0.0), total, input_precision='tf32x3')",
            "    if tl.sum(tl.sum((~finite).to(tl.int32), 1), 0) > 0:",
            # What is no number counts as both infinities, whose sum is none.
            "        up = tl.dot(hot, (~finite & ~(values < 0)).to(tl.float32), input_precision='tf32x3')",
            "        down = tl.dot(hot, (~finite & ~(values > 0)).to(tl.float32), input_precision='tf32x3')",
            "        total += tl.where(up > 0, float('inf'), 0.0) + tl.where(down > 0, float('-inf'), 0.0)",
            "to = (stretch * SIZE + place).to(tl.int64)[:, None] * COLUMNS + column[None, :]",
            "tl.store(partials + to, total, mask=(place < SIZE)[:, None] & (column < COLUMNS)[None, :])",
        ]
        constants = {
            "COUNT": count,
            "COLUMNS": columns,
            "ROW": rows.stride(0),
            "COLUMN": rows.stride(1),
            "WIDTH": max(1 << (columns - 1).bit_length(), _NARROWEST),
            "SIZE": self.size,
            "PLACES": _PLACES,
            "BLOCKS": -(-self.size // _PLACES),
            "STRETCH": stretch,
            "AT_ONCE": _AT_ONCE,
        }
        signature = {"rows": POINTERS[rows.dtype], "index": INDICES[index.dtype], "partials": "*fp32"}
        places = (Given(ROWS, 0), Given(INDEX), Scratch("partials"))
        text = function("one_hot_products", [*signature, *(f"{name}: tl.constexpr" for name in constants)], lines)
        add_launch(plan, "one_hot_products", text, signature, places, grid, constants)

    def _add_sums(self, plan: Plan, rows: torch.Tensor, stretches: int, based: bool) -> None:
        elements = self.size * rows.shape[1]
        lines = [
            "at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "total = tl.zeros([ADDED, BLOCK], tl.float32)",
            "for first in range(0, STRETCHES, ADDED):",
            "    stretch = first + tl.arange(0, ADDED)",
            "    inside = (stretch < STRETCHES)[:, None] & (at < ELEMENTS)[None, :]",
            "    read = partials + stretch.to(tl.int64)[:, None] * ELEMENTS + at[None, :]",
            "    total += tl.load(read, mask=inside, other=0.0)",
            f"result = tl.sum(total, 0) * {number(self.scale)}",
            *(["result += tl.load(base + at, mask=at < ELEMENTS, other=0.0).to(tl.float32)"] if based else ()),
            f"tl.store(table + at, result.to({TRITON_DTYPES[rows.dtype]}), mask=at < ELEMENTS)",
        ]
        constants = {"ELEMENTS": elements, "STRETCHES": stretches, "ADDED": _ADDED, "BLOCK": _BLOCK}
        signature = {"partials": "*fp32", **({"base": POINTERS[rows.dtype]} if based else {})}
        signature["table"] = POINTERS[rows.dtype]
        places = (Scratch("partials"), *((Given(BASE, 0),) if based else ()), Made(0, 0))
        text = function("one_hot_sums", [*signature, *(f"{name}: tl.constexpr" for name in constants)], lines)
        add_launch(plan, "one_hot_sums", text, signature, places, -(-elements // _BLOCK), constants)
