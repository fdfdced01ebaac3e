"""Sums of rows that have one index: the gradient of an embedding, the outputs of experts given back to their tokens.

The indices are sorted first, which keeps equal ones in their order, so the rows of one index are a *segment* of the
sorted list. Three kernels follow, none with atomics:

1. where the segment of each row of the table begins, by binary search;
2. sums of whole *chunks* of the sorted list that lie in one segment: a token that stands for a tenth of a batch is
   summed by many programs;
3. each row of the table once, zeros included: its segment's rows, or the chunks' sums and the rows beside them.

Work is linear in the rows and in the table, and bytes are the least possible: every row is read once, every row of the
table written once. Sums are made in float32, always in one order, and rounded once, where ATen's atomics round each
addition and come in any order. (ATen's sorting kernels of an embedding's gradient take the same first step.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.plan import Argument, Given, Made, Plan, Pointers, Scratch, add_launch
from weft.inductor.multi_tensor.text import POINTERS, TRITON_DTYPES, function, number

# Positions of the arguments of a call.
ROWS, KEYS, ORDER, BASE = range(4)

_SEARCHED = 1024  # rows of the table a program of the first kernel searches for
_WIDEST = 2048  # most columns a program sums: float32 registers of 4 rows, in 128 threads
_AT_ONCE = 4  # rows whose loads are in flight together
_REGISTERS = 80  # of a thread: 16 sums and the values of as many rows


@dataclass(frozen=True)
class SegmentSum(MultiTensor):
    """``segment_sum([rows], keys, order, [base])``: one list of one, the table (size, columns) in the dtype of rows.

    Row ``k`` of the table is ``base[k]``, or zero, plus ``scale`` times the sum of ``rows[order[i]]`` over all ``i``
    with ``keys[i] == k``. Keys outside the table are left out; a batch that has such is a mistake which ATen's kernels
    stop at.

    ``rows`` (count, columns) and ``base`` (size, columns, or an empty list) are contiguous, of one dtype; ``keys``
    int32 and ``order`` int64 are what a stable sort of the indices gives, both (count,).

    Attributes:
        size: rows of the table.
        skipped: a row of the table that gets no sum (``padding_idx``), -1 for none.
        scale: what sums are multiplied by.
    """

    size: int
    skipped: int = -1
    scale: float = 1.0

    @property
    def __name__(self) -> str:
        return "segment_sum"

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        (rows,), keys, order, base = arguments
        kept = (keys >= 0) & (keys < self.size) & (keys != self.skipped)
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = torch.zeros(self.size, rows.shape[1], dtype=wide, device=rows.device)
        sums.index_add_(0, keys.clamp(0, self.size - 1), rows[order].to(wide).mul(self.scale) * kept[:, None])
        return [[(sums + base[0] if base else sums).to(rows.dtype)]]

    def plan(self, arguments: Sequence[Any], number_type: str = "fp32") -> Plan:
        (rows,), _, _, base = arguments
        count, columns = rows.shape
        layout = _Layout(count, columns, self.size, rows.dtype)
        plan = Plan()
        plan.scratch["starts"] = (self.size + 1, torch.int32)
        plan.scratch["partials"] = (max(layout.chunks, 1) * columns, torch.float32)
        plan.pointers["read"] = [(Given(ROWS, 0), *((Given(BASE, 0),) if base else ()))]
        self._add_starts(plan, layout)
        if layout.chunks:
            self._add_chunks(plan, layout)
        self._add_sums(plan, layout, bool(base))
        return plan

    def _add_starts(self, plan: Plan, layout: _Layout) -> None:
        lines = [
            "row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
            "low = tl.zeros([BLOCK], tl.int32)",
            "high = low + COUNT",
            f"for _ in range({layout.count.bit_length()}):",
            "    middle = (low + high) // 2",
            "    key = tl.load(keys + middle, mask=low < high, other=0)",
            "    low, high = tl.where((low < high) & (key < row), middle + 1, low), "
            "tl.where((low < high) & (key >= row), middle, high)",
            "tl.store(starts + row, low, mask=row <= SIZE)",
        ]
        signature = {"keys": "*i32", "starts": "*i32"}
        constants = {"COUNT": layout.count, "SIZE": self.size, "BLOCK": _SEARCHED}
        grid = -(-(self.size + 1) // _SEARCHED)
        _add(plan, "segment_starts", lines, signature, (Given(KEYS), Scratch("starts")), grid, constants)

    def _add_chunks(self, plan: Plan, layout: _Layout) -> None:
        lines = [
            *layout.place("chunk"),
            "first = chunk * CHUNK",
            "if tl.load(keys + first) == tl.load(keys + first + CHUNK - 1):",
            "    total = tl.zeros([BLOCK], tl.float32)",
            *_indented(_add_up("first", "first + CHUNK", _ROW)),
            "    tl.store(partials + chunk.to(tl.int64) * COLUMNS + column, total, mask=column < COLUMNS)",
        ]
        signature = {"read": "*i64", "keys": "*i32", "order": "*i64", "partials": "*fp32"}
        places = (Pointers("read"), Given(KEYS), Given(ORDER), Scratch("partials"))
        lines = layout.reading(("rows",), lines)
        _add(plan, "chunk_sums", lines, signature, places, layout.chunks * layout.blocks, layout.constants)

    def _add_sums(self, plan: Plan, layout: _Layout, based: bool) -> None:
        lines = [
            *layout.place("row"),
            "start = tl.load(starts + row)",
            "end = tl.load(starts + row + 1)",
            *([f"end = tl.where(row == {self.skipped}, start, end)"] if self.skipped >= 0 else ()),
            # A segment without a whole chunk is all head.
            "chunk = (start + CHUNK - 1) // CHUNK",
            "chunks_end = tl.maximum(end // CHUNK, chunk)",
            "is_long = chunks_end > chunk",
            "total = tl.zeros([BLOCK], tl.float32)",
            *_add_up("start", "tl.where(is_long, chunk * CHUNK, end)", _ROW),
            *_add_up("chunk", "chunks_end", _PARTIAL),
            *_add_up("tl.where(is_long, chunks_end * CHUNK, end)", "end", _ROW),
            *([f"total = total * {number(self.scale)}"] if self.scale != 1 else ()),
            "at = row.to(tl.int64) * COLUMNS + column",
            *(["total += tl.load(base + at, mask=column < COLUMNS, other=0.0).to(tl.float32)"] if based else ()),
            f"tl.store(table + at, total.to({TRITON_DTYPES[layout.dtype]}), mask=column < COLUMNS)",
        ]
        signature = {"read": "*i64", "starts": "*i32", "order": "*i64", "partials": "*fp32"}
        signature["table"] = POINTERS[layout.dtype]
        places = (Pointers("read"), Scratch("starts"), Given(ORDER), Scratch("partials"), Made(0, 0))
        lines = layout.reading(("rows", "base") if based else ("rows",), lines)
        _add(plan, "segment_sums", lines, signature, places, self.size * layout.blocks, layout.constants)


# Where the values of row ``which`` of a sum begin.
_ROW = "rows + tl.load(order + which, mask=which < end_at, other=0) * COLUMNS"
_PARTIAL = "partials + which.to(tl.int64) * COLUMNS"


def _add_up(first: str, end: str, row: str) -> list[str]:
    """Lines that add rows number ``first`` to ``end`` to ``total``, in order; the loads of a few are in flight."""
    return [
        f"at, end_at = {first}, {end}",
        "while at < end_at:",
        f"    for ahead in tl.static_range({_AT_ONCE}):",
        "        which = at + ahead",
        f"        values = tl.load({row} + column, mask=(column < COLUMNS) & (which < end_at), other=0.0)",
        "        total += values.to(tl.float32)",
        f"    at += {_AT_ONCE}",
    ]


@dataclass(frozen=True)
class _Layout:
    """How rows are cut into chunks, and columns into blocks."""

    count: int
    columns: int
    size: int
    dtype: torch.dtype

    @property
    def chunk(self) -> int:
        """Rows of a chunk. A long segment is summed over its chunks, between fewer rows than two chunks have: a power
        of two near the square root of the rows keeps both short."""
        return max(1 << (self.count.bit_length() // 2), 32)

    @property
    def chunks(self) -> int:
        return self.count // self.chunk

    @property
    def block(self) -> int:
        return min(1 << (self.columns - 1).bit_length(), _WIDEST)

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block)

    @property
    def constants(self) -> dict[str, Any]:
        return {"CHUNK": self.chunk, "COLUMNS": self.columns, "BLOCK": self.block, "BLOCKS": self.blocks}

    def reading(self, names: Sequence[str], lines: Sequence[str]) -> list[str]:
        """``lines``, which read the tensors called ``names``: 16 bytes at a time where all are aligned, else not."""
        type_ = f"tl.pointer_type({TRITON_DTYPES[self.dtype]})"
        return [
            *(f"{name} = tl.load(read + {at}).to({type_})" for at, name in enumerate(names)),
            f"if tl.load(read + {len(names)}) != 0:",
            *_indented([f"{name} = tl.multiple_of({name}, 16)" for name in names]),
            *_indented(lines),
            "else:",
            *_indented(lines),
        ]

    def place(self, what: str) -> list[str]:
        """Lines that say which row or chunk, and which columns, a program sums."""
        return [
            f"{what} = tl.program_id(0) // BLOCKS",
            "column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)",
        ]


def _add(
    plan: Plan,
    name: str,
    lines: list[str],
    signature: dict[str, str],
    places: tuple[Argument, ...],
    grid: int,
    constants: dict[str, Any],
) -> None:
    text = function(name, [*signature, *(f"{constant}: tl.constexpr" for constant in constants)], lines)
    add_launch(plan, name, text, signature, places, grid, constants, _REGISTERS)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
