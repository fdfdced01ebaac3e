"""Sums of narrow rows by index, for tables of moderate size: the gradient of a table of position biases.

Such a sum is a GEMM: row ``k`` of the table is ``sum over i of (index[i] == k) * rows[i]``, the transposed one-hot
matrix of the indices times the rows. If rows have few columns, comparing each index with every row of the table is
faster than sorting the indices. Threads that add up all rows of one index would mostly wait for memory. Two kernels:

1. A program compares a range of the indices with a block of table rows, in registers, and multiplies the one-hot block
   by the rows on tensor cores. It writes the sums of its range.
2. The sums of all ranges are added, in order.

There is no sort and no atomic, so every run gives the same bits. For the tensor cores, each value is split into two
numbers of 11 bits (``tf32x3``), so 22 bits count; sums are made in float32. A GEMM would spread a non-finite value to
every row of the table, as zero times infinity is NaN. Non-finite values are therefore taken out and summed separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.codegen.triton_text import dtype_name, float32_literal, pointer_type
from weft.inductor.graph.serializable import serializable
from weft.inductor.multi_tensor.index_sum import IndexSum
from weft.inductor.multi_tensor.launch_plan import CallArgument, CallResult, LaunchPlan, Scratch, add_launch

# Positions of the arguments of a call.
ROWS, INDEX, BASE = range(3)

MAX_COLUMNS = 32  # columns whose sums a program keeps in its registers
_PLACES = 64  # rows of the table in a program
_AT_ONCE = 32  # indices compared at a time; with 64 half as many programs fit on a multiprocessor
_NARROWEST = 16  # columns of the smallest tile of a tensor core
_PROGRAMS_PER_MULTIPROCESSOR = 4  # wanted by the first launch, which cuts the rows into as many ranges. A choice.
_ADDED = 8  # ranges whose sums are loaded at a time
_BLOCK = 128  # elements of the table in a program of the second kernel


@serializable
@dataclass(frozen=True)
class OneHotSum(IndexSum):
    """``one_hot_sum([rows], index, [base])``: one list of one, the table in the dtype of rows.

    ``rows`` (count, columns) have at most ``MAX_COLUMNS`` columns and any strides; ``index`` (count,), int32 or int64,
    and ``base`` (size, columns, or an empty list), in the dtype of rows, are contiguous.
    """

    @property
    def __name__(self) -> str:
        return "one_hot_sum"

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        (rows,), index, base = arguments
        at = torch.where(index < 0, index + self.size, index) if self.wraps else index
        kept = (at >= 0) & (at < self.size) & (at != self.skipped)
        # float64 rows are summed in float64 by the reference; kernels are for narrower types only.
        wide = torch.promote_types(rows.dtype, torch.float32)
        # One more row, for the rows whose index is ignored.
        sums = torch.zeros(self.size + 1, rows.shape[1], dtype=wide, device=rows.device)
        sums.index_add_(0, torch.where(kept, at, self.size), rows.to(wide))
        sums = sums[:-1] * self.scale
        return [[(sums + base[0] if base else sums).to(rows.dtype)]]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """Two launches: partial sums by range of rows, then their sums."""
        (rows,), index, base = arguments
        count, columns = rows.shape
        blocks = -(-self.size // _PLACES)
        plan = LaunchPlan.on_device_of(arguments)
        programs = plan.multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
        # A fixed number of programs: more ranges mean more partial sums to write and to read again.
        stretch = _AT_ONCE * max(-(-count * blocks // (programs * _AT_ONCE)), 1)
        stretches = -(-count // stretch)
        # Every element is written, also where a range has no row of an index, so the memory needs no clearing.
        plan.scratch["partials"] = (stretches * self.size * columns, torch.float32)
        self._add_partials(plan, rows, index, stretch, blocks * stretches)
        self._add_sums(plan, rows, stretches, bool(base))
        return plan

    def _add_partials(self, plan: LaunchPlan, rows: torch.Tensor, index: torch.Tensor, stretch: int, grid: int) -> None:
        count, columns = rows.shape
        lines = [
            # Programs of one range of rows are neighbours: they read the same rows at about the same time, from the
            # L2 cache.
            "stretch = tl.program_id(0) // BLOCKS",
            "place = tl.program_id(0) % BLOCKS * PLACES + tl.arange(0, PLACES)",
            "column = tl.arange(0, WIDTH)",
            "total = tl.zeros([PLACES, WIDTH], tl.float32)",
            "for first in range(stretch * STRETCH, tl.minimum((stretch + 1) * STRETCH, COUNT), AT_ONCE):",
            "    which = first + tl.arange(0, AT_ONCE)",
            # SIZE is no row of the table; a place of that number in the last block is masked at the store.
            "    key = tl.load(index + which, mask=which < COUNT, other=SIZE)",
            *(["    key = tl.where(key < 0, key + SIZE, key)"] if self.wraps else ()),
            *([f"    key = tl.where(key == {self.skipped}, SIZE, key)"] if self.skipped >= 0 else ()),
            "    inside = (which < COUNT)[:, None] & (column < COLUMNS)[None, :]",
            # Any strides: rows may come transposed, and a copy would read everything once more.
            "    at = which.to(tl.int64)[:, None] * ROW + column.to(tl.int64)[None, :] * COLUMN",
            "    values = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)",
            "    hot = (place[:, None] == key[None, :]).to(tl.float32)",
            # False for NaN too.
            "    finite = tl.abs(values) < float('inf')",
            "    total = tl.dot(hot, tl.where(finite, values, 0.0), total, input_precision='tf32x3')",
            # Rare, so it is a branch: every tile would have two more products otherwise.
            "    if tl.sum(tl.sum((~finite).to(tl.int32), 1), 0) > 0:",
            # A NaN is neither below nor above zero: it counts as both infinities, whose sum is NaN.
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
        signature = {"rows": pointer_type(rows.dtype), "index": pointer_type(index.dtype), "partials": "*fp32"}
        places = (CallArgument(ROWS, 0), CallArgument(INDEX), Scratch("partials"))
        add_launch(plan, "one_hot_products", lines, signature, places, grid, constants)

    def _add_sums(self, plan: LaunchPlan, rows: torch.Tensor, stretches: int, based: bool) -> None:
        elements = self.size * rows.shape[1]
        lines = [
            "at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            # Range k goes to row k % ADDED: the order of additions is fixed, and several loads are in flight.
            "total = tl.zeros([ADDED, BLOCK], tl.float32)",
            "for first in range(0, STRETCHES, ADDED):",
            "    stretch = first + tl.arange(0, ADDED)",
            "    inside = (stretch < STRETCHES)[:, None] & (at < ELEMENTS)[None, :]",
            "    read = partials + stretch.to(tl.int64)[:, None] * ELEMENTS + at[None, :]",
            "    total += tl.load(read, mask=inside, other=0.0)",
            f"result = tl.sum(total, 0) * {float32_literal(self.scale)}",
            # In float32, before the one rounding.
            *(["result += tl.load(base + at, mask=at < ELEMENTS, other=0.0).to(tl.float32)"] if based else ()),
            f"tl.store(table + at, result.to({dtype_name(rows.dtype)}), mask=at < ELEMENTS)",
        ]
        constants = {"ELEMENTS": elements, "STRETCHES": stretches, "ADDED": _ADDED, "BLOCK": _BLOCK}
        signature = {"partials": "*fp32", **({"base": pointer_type(rows.dtype)} if based else {})}
        signature["table"] = pointer_type(rows.dtype)
        places = (Scratch("partials"), *((CallArgument(BASE, 0),) if based else ()), CallResult(0, 0))
        add_launch(plan, "one_hot_sums", lines, signature, places, -(-elements // _BLOCK), constants)
