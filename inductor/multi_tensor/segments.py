"""Sums of rows that have one index: the gradient of an embedding, the outputs of experts given back to their tokens.

The indices are sorted first, which keeps equal ones in their order, so the rows of one index are a *segment* of the
sorted list. Four kernels follow, none with atomics:

1. where the segment of each row of the table begins, by binary search;
2. rows of the table without a segment, and the sums of every other: programs walk *chunks* of the sorted list, loading
   rows ahead whichever segments they are in, and write a segment's sum where it ends. What a chunk has of a segment
   that goes on in another is a partial sum: its *head* belongs to a segment that began before, its *tail* to one that
   ends after;
3. sums of the heads of *groups* of chunks in one segment: a token may stand for a tenth of a batch, or for all of it;
4. segments over several chunks: a tail, then heads and whole groups.

Work is linear in the rows and in the table, and bytes are the least possible: every row is read once, every row of the
table written once. Sums are made in float32, always in one order, and rounded once, where ATen's atomics round each
addition and come in any order. (ATen's sorting kernels of an embedding's gradient take the same first step.)

A program for each row of the table waits most of the time, for a row or two of its own: measured on an H200 (32768
rows of 2048 bfloat16 into 128256), 214 us for uniform indices and 305 us for those of text, where walks of 32 take 167
and 198 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.plan import Argument, Given, Made, Plan, Pointers, Scratch, add_launch
from weft.inductor.multi_tensor.text import INDICES, POINTERS, TRITON_DTYPES, function, number

# Positions of the arguments of a call.
ROWS, KEYS, ORDER, BASE = range(4)

_SEARCHED = 256  # rows of the table a program of the first kernel searches for
_CHUNK = 32  # rows of the sorted list that a program walks; 16 take 25% longer for text, which has more partial sums
_WIDEST = 2048  # most columns a program sums, 16 a thread
_AHEAD = 8  # rows whose loads are in flight together (4: 3% longer), where they fit:
_IN_FLIGHT = 32768  # bytes of them, half the registers that a program has
_EMPTIED = 16384  # elements of rows without a segment that a program writes
_COPIED = 4096  # the same where a base is read
_JOINED = 16  # partial sums whose loads are in flight together
_JOINED_WIDTH = 512  # most columns of them a program sums
_REGISTERS = 128  # of a thread: rows ahead, sums of a segment, and base


@dataclass(frozen=True)
class SegmentSum(MultiTensor):
    """``segment_sum([rows], keys, order, [base])``: one list of one, the table (size, columns) in the dtype of rows.

    Row ``k`` of the table is ``base[k]``, or zero, plus ``scale`` times the sum of ``rows[order[i]]`` over all ``i``
    with ``keys[i] == k``. Keys outside the table are left out; a batch that has such is a mistake which ATen's kernels
    stop at.

    ``rows`` (count, columns) and ``base`` (size, columns, or an empty list) are contiguous, of one dtype; ``keys``
    int32 and ``order`` int32 or int64 are what a stable sort of the indices gives, both (count,).

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
        (rows,), _, order, base = arguments
        count, columns = rows.shape
        layout = _Layout(count, columns, self.size, rows.dtype, bool(base))
        plan = Plan()
        plan.scratch["starts"] = (self.size + 1, torch.int32)
        for name, sums in (("heads", layout.chunks), ("tails", layout.chunks), ("groups", max(layout.groups, 1))):
            plan.scratch[name] = (sums * layout.columns, torch.float32)
        plan.pointers["read"] = [(Given(ROWS, 0), *((Given(BASE, 0),) if base else ()))]
        self._add_starts(plan, layout)
        self._add_walks(plan, layout, INDICES[order.dtype])
        if layout.groups:
            self._add_groups(plan, layout)
        if layout.chunks > 1:
            self._add_joined(plan, layout)
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

    def _add_walks(self, plan: Plan, layout: _Layout, order_type: str) -> None:
        """Rows without a segment come first: partial sums are still in the cache when they are joined."""
        block = layout.block
        emptied = max((_COPIED if layout.based else _EMPTIED) // block, 1)
        programs = -(-self.size // emptied)

        def lines(ahead: int) -> list[str]:
            return [
                "job = tl.program_id(0) // BLOCKS",
                _COLUMNS,
                f"if job < {programs}:",
                *_indented(self._empty_rows(layout)),
                "else:",
                *_indented([f"chunk = job - {programs}", *self._walk(layout, ahead)]),
            ]

        signature = {"read": "*i64", "keys": "*i32", "order": order_type, "starts": "*i32"}
        signature |= {"heads": "*fp32", "tails": "*fp32", "table": POINTERS[layout.dtype]}
        partials = Scratch("heads"), Scratch("tails")
        places = (Pointers("read"), Given(KEYS), Given(ORDER), Scratch("starts"), *partials, Made(0, 0))
        grid = (programs + layout.chunks) * layout.blocks
        constants = layout.constants(block) | {"ROWS": emptied}
        _add(plan, "segment_sums", layout.reading(lines(layout.ahead), lines(1)), signature, places, grid, constants)

    def _empty_rows(self, layout: _Layout) -> list[str]:
        """Lines that write the rows without a segment among ``ROWS`` of the table."""
        zeros = f"tl.zeros([ROWS, BLOCK], {TRITON_DTYPES[layout.dtype]})"
        return [
            "row = job * ROWS + tl.arange(0, ROWS)",
            "start = tl.load(starts + row, mask=row < SIZE, other=-1)",
            "empty = start == tl.load(starts + row + 1, mask=row < SIZE, other=0)",
            *([f"empty = empty | (row == {self.skipped})"] if self.skipped >= 0 else ()),
            "to = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]",
            "inside = empty[:, None] & (column < COLUMNS)[None, :]",
            f"value = {'tl.load(base + to, mask=inside)' if layout.based else zeros}",
            "tl.store(table + to, value, mask=inside)",
        ]

    def _walk(self, layout: _Layout, at_once: int) -> list[str]:
        """Lines that sum the rows of ``chunk``, loading some at once, and write what they are of each segment."""
        to_head = _store_partial("heads", "chunk")
        loads, adds = [], []
        for ahead in range(at_once):
            # Rows after the last one are it once more: they belong to no segment.
            place = f"tl.load(order + tl.minimum(at + {ahead}, COUNT - 1)).to(tl.int64) * COLUMNS"
            loads.append(f"values{ahead} = tl.load(rows + {place} + column, mask=column < COLUMNS, other=0.0)")
            adds += [
                f"following = tl.load(keys + at + {ahead + 1}, mask=at + {ahead + 1} < COUNT, other=-1)",
                f"total += values{ahead}.to(tl.float32)",
                "if following != key:",
                "    if is_head:",
                f"        {to_head}",
                f"    elif {self._is_kept()}:",
                *_indented(self._store_sum(layout), 2),
                "    is_head = is_head & False",
                "    total = tl.zeros([BLOCK], tl.float32)",
                "key = following",
            ]
        return [
            "first = chunk * CHUNK",
            "key = tl.load(keys + first)",
            "last = tl.load(keys + tl.minimum(first + CHUNK, COUNT) - 1)",
            # Padding, or what belongs to another part of a table in parts, may be most of the rows.
            f"if (key != last) | {self._is_kept()}:",
            "    is_head = (first > 0) & (tl.load(keys + tl.maximum(first - 1, 0)) == key)",
            "    total = tl.zeros([BLOCK], tl.float32)",
            f"    for at in range(first, first + CHUNK, {at_once}):",
            *_indented([*loads, *adds], 2),
            "    if key == last:",
            "        if is_head:",
            f"            {to_head}",
            "        else:",
            f"            {_store_partial('tails', 'chunk')}",
        ]

    def _add_groups(self, plan: Plan, layout: _Layout) -> None:
        lines = [
            "group = tl.program_id(0) // BLOCKS",
            _COLUMNS,
            "first = group * GROUP * CHUNK",
            "before = tl.load(keys + first - 1, mask=first > 0, other=-1)",
            "if before == tl.load(keys + first + GROUP * CHUNK - 1):",
            "    total = tl.zeros([BLOCK], tl.float32)",
            *_indented(_add_up("heads", "group * GROUP", "(group + 1) * GROUP")),
            f"    {_store_partial('groups', 'group')}",
        ]
        signature = {"keys": "*i32", "heads": "*fp32", "groups": "*fp32"}
        places = (Given(KEYS), Scratch("heads"), Scratch("groups"))
        _add_partials(plan, "group_sums", lines, signature, places, layout, layout.groups)

    def _add_joined(self, plan: Plan, layout: _Layout) -> None:
        lines = [
            "chunk = tl.program_id(0) // BLOCKS",
            _COLUMNS,
            "first = chunk * CHUNK",
            "key = tl.load(keys + first + CHUNK - 1)",
            "before = tl.load(keys + first - 1, mask=first > 0, other=-1)",
            f"if (key == tl.load(keys + first + CHUNK)) & (key != before) & {self._is_kept()}:",
            "    end = tl.load(starts + key + 1)",
            # A segment without a whole group is all heads.
            "    chunks_end = (end + CHUNK - 1) // CHUNK",
            "    group = (chunk + GROUP) // GROUP",
            "    groups_end = tl.maximum(end // (GROUP * CHUNK), group)",
            "    is_long = groups_end > group",
            "    total = tl.load(tails + chunk.to(tl.int64) * COLUMNS + column, mask=column < COLUMNS, other=0.0)",
            *_indented(_add_up("heads", "chunk + 1", "tl.where(is_long, group * GROUP, chunks_end)")),
            *_indented(_add_up("groups", "group", "groups_end")),
            *_indented(_add_up("heads", "tl.where(is_long, groups_end * GROUP, chunks_end)", "chunks_end")),
            *_indented(self._store_sum(layout)),
        ]
        if layout.based:
            lines = layout.reading(lines, lines)
        signature = {"read": "*i64", "keys": "*i32", "starts": "*i32", "heads": "*fp32", "tails": "*fp32"}
        signature |= {"groups": "*fp32", "table": POINTERS[layout.dtype]}
        partials = Scratch("heads"), Scratch("tails"), Scratch("groups")
        places = (Pointers("read"), Given(KEYS), Scratch("starts"), *partials, Made(0, 0))
        # The last chunk's segments end in it.
        _add_partials(plan, "joined_sums", lines, signature, places, layout, layout.chunks - 1)

    def _is_kept(self) -> str:
        """Whether ``key`` is a row of the table that gets a sum."""
        skipped = f" & (key != {self.skipped})" if self.skipped >= 0 else ""
        return f"((key >= 0) & (key < SIZE){skipped})"

    def _store_sum(self, layout: _Layout) -> list[str]:
        """Lines that write ``total`` as row ``key`` of the table."""
        scaled = f"total * {number(self.scale)}" if self.scale != 1 else "total"
        added = " + tl.load(base + to, mask=column < COLUMNS, other=0.0).to(tl.float32)" if layout.based else ""
        return [
            "to = key.to(tl.int64) * COLUMNS + column",
            f"result = {scaled}{added}",
            f"tl.store(table + to, result.to({TRITON_DTYPES[layout.dtype]}), mask=column < COLUMNS)",
        ]


# Which columns a program sums.
_COLUMNS = "column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)"


def _store_partial(where: str, which: str) -> str:
    return f"tl.store({where} + {which}.to(tl.int64) * COLUMNS + column, total, mask=column < COLUMNS)"


def _add_up(partials: str, first: str, end: str) -> list[str]:
    """Lines that add partial sums number ``first`` to ``end`` to ``total``, in order; loads of some are in flight."""
    return [
        f"at, end_at = {first}, {end}",
        "while at < end_at:",
        f"    for ahead in tl.static_range({_JOINED}):",
        "        which = at + ahead",
        f"        from_ = {partials} + which.to(tl.int64) * COLUMNS + column",
        "        total += tl.load(from_, mask=(column < COLUMNS) & (which < end_at), other=0.0)",
        f"    at += {_JOINED}",
    ]


@dataclass(frozen=True)
class _Layout:
    """How rows are cut into chunks, and columns into blocks."""

    count: int
    columns: int
    size: int
    dtype: torch.dtype
    based: bool

    @property
    def chunks(self) -> int:
        return -(-self.count // _CHUNK)

    @property
    def group(self) -> int:
        """Chunks of a group. A long segment is summed over its groups, between fewer chunks than two groups have: a
        power of two near the square root of half the chunks keeps both short."""
        return max((1 << self.chunks.bit_length() // 2) // 2, _JOINED)

    @property
    def groups(self) -> int:
        return self.count // (self.group * _CHUNK)

    @property
    def block(self) -> int:
        return min(1 << (self.columns - 1).bit_length(), _WIDEST)

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block)

    @property
    def ahead(self) -> int:
        return min(_IN_FLIGHT // (self.block * self.dtype.itemsize), _AHEAD)

    def constants(self, block: int) -> dict[str, Any]:
        """Of a kernel whose programs sum ``block`` columns."""
        sizes = {"COUNT": self.count, "SIZE": self.size, "CHUNK": _CHUNK, "GROUP": self.group}
        return sizes | {"COLUMNS": self.columns, "BLOCK": block, "BLOCKS": -(-self.columns // block)}

    def reading(self, aligned: Sequence[str], otherwise: Sequence[str]) -> list[str]:
        """Lines that read ``rows`` and ``base``: 16 bytes at a time where all are aligned, else one element."""
        names = ("rows", "base") if self.based else ("rows",)
        type_ = f"tl.pointer_type({TRITON_DTYPES[self.dtype]})"
        # What is said of a pointer holds wherever it is used, so each branch makes its own.
        found = {name: f"tl.load(read + {at}).to({type_})" for at, name in enumerate(names)}
        return [
            f"if tl.load(read + {len(names)}) != 0:",
            *_indented([f"{name} = tl.multiple_of({pointer}, 16)" for name, pointer in found.items()]),
            *_indented(aligned),
            "else:",
            *_indented([f"{name} = {pointer}" for name, pointer in found.items()]),
            *_indented(otherwise),
        ]


def _add_partials(
    plan: Plan,
    name: str,
    lines: list[str],
    signature: dict[str, str],
    places: tuple[Argument, ...],
    layout: _Layout,
    jobs: int,
) -> None:
    """Add a kernel that adds up partial sums: ``jobs`` programs for each block of columns."""
    constants = layout.constants(min(layout.block, _JOINED_WIDTH))
    _add(plan, name, lines, signature, places, jobs * constants["BLOCKS"], constants)


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


def _indented(lines: Sequence[str], by: int = 1) -> list[str]:
    return ["    " * by + line for line in lines]
