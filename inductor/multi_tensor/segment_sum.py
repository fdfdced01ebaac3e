"""Segment sums: add the rows that share an index.

Used for the gradient of an embedding, and to add the outputs of experts to their tokens. A stable sort of the indices
makes the rows of one index a *segment* of the sorted list. No kernel uses atomics:

1. Each row writes its number to the mark of its index. Any row of an index may win.
2. The indices are sorted, unless they come sorted (:mod:`weft.inductor.multi_tensor.packed_sort`).
3. Each program processes a *chunk* of the sorted list. It loads several rows ahead, whatever segments they belong to,
   and writes a segment's sum where the segment ends. If few more rows belong to the chunk's last segment, the chunk
   includes them. Otherwise its sum of that segment is partial: the *head* of a chunk belongs to a segment that began in
   an earlier chunk, its *tail* to one that ends in a later chunk.
4. Heads are added over *groups* of chunks that lie in one segment: one token may be a tenth of a batch, or all of it.
5. A segment over several chunks is joined from a tail, heads, and the sums of whole groups.

Rows of the table without a segment (empty rows) are most of what is written, and the sort needs little bandwidth.
Additional programs in the launches of the sort and of the segment sums therefore write the empty rows.

Every row is read once, and every row of the table is written once. Sums are made in float32, always in the same order,
and rounded once. ATen's atomics round each addition, and add in any order. (ATen's sorting kernels of an embedding's
gradient take the same first step.) Marks need not be cleared: a mark counts only if the row that it names has that
index (Briggs and Torczon, "An efficient representation for sparse sets", 1993).

A kernel with one program for each row of the table mostly waits for memory, as a program has a row or two. Measured on
an H200 (32768 rows of 2048 bfloat16 into 128256): 214 us for uniform indices and 305 us for those of text. The kernels
here take 181 and 176 us. Writing empty rows beside the sort, not after it, saves 6 of 190 us.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.codegen.triton_text import as_pointer, dtype_name, float32_literal, indented, pointer_type
from weft.inductor.graph.serializable import serializable
from weft.inductor.multi_tensor.index_sum import IndexSum
from weft.inductor.multi_tensor.launch_plan import (
    ALIGNMENT,
    Argument,
    CallArgument,
    CallResult,
    Job,
    LaunchPlan,
    Scratch,
    add_jobs,
)
from weft.inductor.multi_tensor.packed_sort import PackedSort

# Positions of the arguments of a call.
ROWS, INDICES_, BASE = range(3)

# Fitted on an H200, to the shapes above.
_MARKED = 256  # rows whose marks a program sets
# Tenths of the empty rows that each launch writes. None in the last two launches took 2 us less than a few: the partial
# sums are then still in the cache when they are joined.
_BESIDE = {"sorted_blocks": 3, "sorted_places": 3, "segment_sums": 4, "group_sums": 0, "joined_sums": 0}
_CHUNK = 64  # rows of the sorted list that a program walks; 32 take 2% longer for text, which has more partial sums
_PAST = 8  # rows after a chunk that it sums too, if its last segment ends within them
_WIDEST = 2048  # the most columns that a program sums: 16 for each thread
_AHEAD = 8  # rows whose loads are in flight together (4 take 3% longer), as far as _IN_FLIGHT allows
_IN_FLIGHT = 32768  # bytes of these rows: half the registers of a program
_EMPTIED = 8192  # elements of empty rows that a program writes
_COPIED = 4096  # the same where a base is read
_JOINED = 16  # partial sums whose loads are in flight together
_JOINED_WIDTH = 512  # the most columns of partial sums that a program adds
_REGISTERS = 128  # limit for a thread: rows ahead, the sum of a segment, and the base


@serializable
@dataclass(frozen=True)
class SegmentSum(IndexSum):
    """``segment_sum([rows], indices, [base])``: one list of one, the table in the dtype of rows.

    ``rows`` (count, columns) and ``base`` (size, columns, or an empty list) are contiguous, of one dtype. ``indices``
    is ``[index]``, int32 or int64, if :func:`fits_packed_sort`. Otherwise it is the result of a stable sort,
    ``[keys, order]``: keys int32, order int32 or int64; ``wraps`` does not apply to these. All are (count,).
    """

    @property
    def __name__(self) -> str:
        return "segment_sum"

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        (rows,), indices, base = arguments
        if len(indices) == 1:
            indices = PackedSort(self.size, self.wraps).sorted(indices[0])
        keys, order = indices
        kept = (keys >= 0) & (keys < self.size) & (keys != self.skipped)
        wide = torch.promote_types(rows.dtype, torch.float32)
        # One more row of the table takes the rows whose index is ignored. Times 0 instead, a NaN of theirs would stay.
        sums = torch.zeros(self.size + 1, rows.shape[1], dtype=wide, device=rows.device)
        sums.index_add_(0, torch.where(kept, keys, self.size), rows[order].to(wide).mul(self.scale))
        sums = sums[:-1]
        return [[(sums + base[0] if base else sums).to(rows.dtype)]]

    def plan(self, arguments: Sequence[Any]) -> LaunchPlan:
        """Two to six launches: marks, the sort if it is done here, segment sums, and the joins of partial sums."""
        (rows,), indices, base = arguments
        count, columns = rows.shape
        layout = _SegmentLayout(count, columns, self.size, rows.dtype, bool(base))
        plan = LaunchPlan.on_device_of(arguments)
        # Neither is cleared: marks are verified when they are read, and only ends that were written are read.
        plan.scratch |= dict.fromkeys(("marks", "ends"), (self.size, torch.int32))
        # A chunk has at most one head and one tail, whatever the indices are.
        for name, sums in (("heads", layout.chunks), ("tails", layout.chunks), ("groups", max(layout.groups, 1))):
            plan.scratch[name] = (sums * layout.columns, torch.float32)
        jobs: dict[str, Job] = {}
        if len(indices) == 1:
            sort = PackedSort(self.size, self.wraps)
            plan.scratch["words"] = (sort.words(count), torch.int32)
            plan.scratch |= dict.fromkeys(("keys", "order"), (count, torch.int32))
            keys, order, order_type = Scratch("keys"), Scratch("order"), "*i32"
            jobs["sorted_blocks"] = sort.blocks(indices[0], CallArgument(INDICES_, 0))
            jobs["sorted_places"] = sort.places(count, keys, order)
        else:
            keys, order, order_type = (
                CallArgument(INDICES_, 0),
                CallArgument(INDICES_, 1),
                pointer_type(indices[1].dtype),
            )
        jobs["segment_sums"] = self._walks(layout, keys, order, order_type)
        # Short lists have no whole group; heads are then joined one by one.
        if layout.groups:
            jobs["group_sums"] = self._groups(layout, keys)
        # A single chunk contains every segment as a whole.
        if layout.chunks > 1:
            jobs["joined_sums"] = self._joined(layout, keys)
        # Before anything else: the launches that follow all look at the marks.
        add_jobs(plan, "segment_marks", [self._marks(indices[0])])
        # Shares of the launches that there are: without a sort the segment sums have all of the empty rows beside
        # them.
        shares = list(itertools.accumulate((_BESIDE[name] for name in jobs), initial=0))
        ends = [layout.emptying * share // shares[-1] for share in shares]
        for (name, job), begin, end in zip(jobs.items(), ends, ends[1:], strict=False):
            add_jobs(plan, name, [job, self._empty_rows(layout, indices[0], begin, end)], _REGISTERS)
        return plan

    def _marks(self, index: torch.Tensor) -> Job:
        lines = [
            "at = job * MARKED + tl.arange(0, MARKED)",
            *self._key("key", "at", "at < COUNT"),
            # A race whose outcome does not matter: every winner is a row of this index.
            "tl.store(marks + key, at, mask=(key >= 0) & (key < SIZE))",
        ]
        arguments = {
            "index": (pointer_type(index.dtype), CallArgument(INDICES_, 0)),
            "marks": ("*i32", Scratch("marks")),
        }
        constants = {"COUNT": len(index), "SIZE": self.size, "MARKED": _MARKED}
        return Job(lines, arguments, constants, -(-len(index) // _MARKED))

    def _key(self, register: str, at: str, mask: str) -> list[str]:
        """Lines for the table row of row ``at``, -1 where ``mask`` does not hold."""
        # Outside the mask the index is one that stays negative after wrapping.
        found = f"{register} = tl.load(index + {at}, mask={mask}, other={-self.size - 1 if self.wraps else -1})"
        return [
            found,
            *([f"{register} = tl.where({register} < 0, {register} + SIZE, {register})"] if self.wraps else ()),
        ]

    def _empty_rows(self, layout: _SegmentLayout, index: torch.Tensor, begin: int, end: int) -> Job:
        """Programs ``begin`` to ``end`` of those that write the empty rows of the table."""
        zeros = f"tl.zeros([EMPTIED, EMPTIED_WIDTH], {dtype_name(layout.dtype)})"
        lines = [
            f"job += {begin}",
            "across = job % EMPTIED_BLOCKS * EMPTIED_WIDTH + tl.arange(0, EMPTIED_WIDTH)",
            "row = job // EMPTIED_BLOCKS * EMPTIED + tl.arange(0, EMPTIED)",
            # Uninitialised memory: any number may stand here, so it is used as a row only if it is one, and believed
            # only if that row has this index.
            "mark = tl.load(marks + row, mask=row < SIZE, other=-1)",
            *self._key("marked", "mark", "(mark >= 0) & (mark < COUNT)"),
            "empty = marked != row",
            # The skipped row has marks, but no walk writes it.
            *([f"empty = empty | (row == {self.skipped})"] if self.skipped >= 0 else ()),
            "cells = row.to(tl.int64)[:, None] * COLUMNS + across[None, :]",
            "inside = (empty & (row < SIZE))[:, None] & (across < COLUMNS)[None, :]",
            f"cell = {'tl.load(base + cells, mask=inside)' if layout.based else zeros}",
            "tl.store(table + cells, cell, mask=inside)",
        ]
        arguments = {
            "index": (pointer_type(index.dtype), CallArgument(INDICES_, 0)),
            "marks": ("*i32", Scratch("marks")),
            "table": (pointer_type(layout.dtype), CallResult(0, 0)),
        }
        if layout.based:
            lines = _reading(("base",), layout.dtype, lines, lines)
            arguments |= _read("base", layout.dtype)
        constants = {"COUNT": layout.count, "SIZE": self.size, "COLUMNS": layout.columns, "EMPTIED": layout.emptied}
        constants |= {"EMPTIED_WIDTH": layout.block, "EMPTIED_BLOCKS": layout.blocks}
        return Job(lines, arguments, constants, end - begin)

    def _walks(self, layout: _SegmentLayout, keys: Argument, order: Argument, order_type: str) -> Job:
        def lines(ahead: int) -> list[str]:
            return ["chunk = job // BLOCKS", _COLUMNS, *self._walk(layout, ahead)]

        arguments: dict[str, tuple[str, Argument]] = {
            **_read("rows", layout.dtype),
            **(_read("base", layout.dtype) if layout.based else {}),
            "keys": ("*i32", keys),
            "order": (order_type, order),
            "ends": ("*i32", Scratch("ends")),
            "heads": ("*fp32", Scratch("heads")),
            "tails": ("*fp32", Scratch("tails")),
            "table": (pointer_type(layout.dtype), CallResult(0, 0)),
        }
        names = ("rows", "base") if layout.based else ("rows",)
        # Unaligned rows are loaded element by element, which fills registers with addresses: one row at a time there.
        either = _reading(names, layout.dtype, lines(layout.ahead), lines(1))
        return Job(either, arguments, layout.constants(layout.block), layout.chunks * layout.blocks)

    def _walk(self, layout: _SegmentLayout, at_once: int) -> list[str]:
        """Lines that sum the rows of ``chunk``, with ``at_once`` loads in flight, and write whole and partial sums."""
        to_head = _store_partial("heads", "chunk")
        loads, adds = [], []
        for ahead in range(at_once):
            row, after = f"at + {ahead}", f"at + {ahead + 1}"
            # Clamped, not masked: the load of the order need not wait for `begin` and `end`.
            place = f"tl.load(order + tl.minimum({row}, COUNT - 1)).to(tl.int64) * COLUMNS"
            mask = f"(column < COLUMNS) & ({row} >= begin) & ({row} < end)"
            loads.append(f"values{ahead} = tl.load(rows + {place} + column, mask={mask}, other=0.0)")
            adds += [
                # Rows outside of the chunk have key -1, which ends the segment. The first row after the chunk keeps
                # its key where the segment goes on, so that the partial sum is written as a tail or head below.
                f"following = tl.load(keys + {after}, mask=({after} >= begin) & ({after} < end + goes_on), other=-1)",
                f"total += values{ahead}.to(tl.float32)",
                "if following != key:",
                "    if is_head:",
                f"        {to_head}",
                # The head ends a segment of earlier chunks, which only this chunk knows the end of.
                f"        tl.store(ends + key, {after}, mask={self._is_kept()})",
                f"    elif {self._is_kept()}:",
                *indented(self._store_sum(layout), 2),
                # A plain False has another type, and the type of a loop variable must not change.
                "    is_head = is_head & False",
                "    total = tl.zeros([BLOCK], tl.float32)",
                "key = following",
            ]
        return [
            "first = chunk * CHUNK",
            "key = tl.load(keys + first)",
            "last = tl.load(keys + tl.minimum(first + CHUNK, COUNT) - 1)",
            # Keys are sorted, so equal ends mean one key. Chunks of a key without a sum are skipped: padding, or the
            # indices of other ranks' shards, may be most of the rows.
            f"if (key != last) | {self._is_kept()}:",
            # The chunks on both sides of a boundary count the same rows, so they agree on where it is: after the
            # segment if that ends within PAST rows, else where the chunk ends.
            "    past = tl.arange(0, 2 * PAST)",
            "    before = tl.load(keys + tl.maximum(first - 1, 0))",
            f"    theirs = {_rows_past('first', 'before')}",
            f"    beyond = {_rows_past('first + CHUNK', 'last')}",
            "    is_head = (first > 0) & (theirs > PAST)",
            "    goes_on = (beyond > PAST).to(tl.int32)",
            "    begin = first + tl.where((first > 0) & (theirs <= PAST), theirs, 0)",
            "    end = tl.minimum(first + CHUNK, COUNT) + tl.where(beyond <= PAST, beyond, 0)",
            # Rows before `begin` belong to the previous chunk: no key until the first row of this one.
            "    key = tl.where(begin > first, -1, key)",
            "    total = tl.zeros([BLOCK], tl.float32)",
            # Where the segment goes on, the chunk ends at a multiple of `at_once`. Rows loaded together then never
            # reach further, where keys are -1 and the segment would seem to have ended.
            f"    for at in range(first, end, {at_once}):",
            *indented([*loads, *adds], 2),
            "    if goes_on > 0:",
            "        if is_head:",
            f"            {to_head}",
            "        else:",
            f"            {_store_partial('tails', 'chunk')}",
        ]

    def _groups(self, layout: _SegmentLayout, keys: Argument) -> Job:
        lines = [
            "group = job // BLOCKS",
            _COLUMNS,
            # A group is summed if its first row continues a segment and its last row is of the same one: sorted, so
            # are all between.
            "first = group * GROUP * CHUNK",
            "before = tl.load(keys + first - 1, mask=first > 0, other=-1)",
            "if before == tl.load(keys + first + GROUP * CHUNK - 1):",
            "    total = tl.zeros([BLOCK], tl.float32)",
            *indented(_add_up("heads", "group * GROUP", "(group + 1) * GROUP")),
            f"    {_store_partial('groups', 'group')}",
        ]
        arguments: dict[str, tuple[str, Argument]] = {
            "keys": ("*i32", keys),
            "heads": ("*fp32", Scratch("heads")),
            "groups": ("*fp32", Scratch("groups")),
        }
        return _adding(lines, arguments, layout, layout.groups)

    def _joined(self, layout: _SegmentLayout, keys: Argument) -> Job:
        lines = [
            "chunk = job // BLOCKS",
            _COLUMNS,
            "first = chunk * CHUNK",
            "key = tl.load(keys + first + CHUNK - 1)",
            "before = tl.load(keys + first - 1, mask=first > 0, other=-1)",
            "beyond = tl.load(keys + first + CHUNK + PAST, mask=first + CHUNK + PAST < COUNT, other=-1)",
            # The chunk in which a segment begins joins it: the segment goes on for more than PAST rows behind the
            # chunk, and the row before the chunk is of another one.
            f"if (key == beyond) & (key != before) & {self._is_kept()}:",
            "    end = tl.load(ends + key)",
            # A chunk has a head only if more than PAST of its rows belong to the segment.
            "    chunks_end = (end - PAST + CHUNK - 1) // CHUNK",
            "    group = (chunk + GROUP) // GROUP",
            "    groups_end = tl.maximum(end // (GROUP * CHUNK), group)",
            # A segment without a whole group is the tail and heads alone.
            "    is_long = groups_end > group",
            "    total = tl.load(tails + chunk.to(tl.int64) * COLUMNS + column, mask=column < COLUMNS, other=0.0)",
            *indented(_add_up("heads", "chunk + 1", "tl.where(is_long, group * GROUP, chunks_end)")),
            *indented(_add_up("groups", "group", "groups_end")),
            *indented(_add_up("heads", "tl.where(is_long, groups_end * GROUP, chunks_end)", "chunks_end")),
            *indented(self._store_sum(layout)),
        ]
        arguments: dict[str, tuple[str, Argument]] = {
            "keys": ("*i32", keys),
            "ends": ("*i32", Scratch("ends")),
            "heads": ("*fp32", Scratch("heads")),
            "tails": ("*fp32", Scratch("tails")),
            "groups": ("*fp32", Scratch("groups")),
            "table": (pointer_type(layout.dtype), CallResult(0, 0)),
        }
        if layout.based:
            lines = _reading(("base",), layout.dtype, lines, lines)
            arguments |= _read("base", layout.dtype)
        # The last chunk has no tail: no segment goes on after it.
        return _adding(lines, arguments, layout, layout.chunks - 1)

    def _is_kept(self) -> str:
        """Whether ``key`` is a row of the table that gets a sum."""
        skipped = f" & (key != {self.skipped})" if self.skipped >= 0 else ""
        return f"((key >= 0) & (key < SIZE){skipped})"

    def _store_sum(self, layout: _SegmentLayout) -> list[str]:
        """Lines that write ``total`` as row ``key`` of the table."""
        # Scaled once, after the sum, and before the base is added.
        scaled = f"total * {float32_literal(self.scale)}" if self.scale != 1 else "total"
        added = " + tl.load(base + to, mask=column < COLUMNS, other=0.0).to(tl.float32)" if layout.based else ""
        return [
            "to = key.to(tl.int64) * COLUMNS + column",
            f"result = {scaled}{added}",
            f"tl.store(table + to, result.to({dtype_name(layout.dtype)}), mask=column < COLUMNS)",
        ]


def _rows_past(place: str, key: str) -> str:
    """How many rows from ``place`` on have ``key``, the key of the row before; at most PAST + 1."""
    # One row more than PAST is asked for, so that "more than PAST" can be told from "exactly".
    inside = f"(past <= PAST) & ({place} + past < COUNT)"
    return f"tl.sum(({inside} & (tl.load(keys + {place} + past, mask={inside}, other=-1) == {key})).to(tl.int32))"


# Which columns a program sums.
_COLUMNS = "column = job % BLOCKS * BLOCK + tl.arange(0, BLOCK)"


def _store_partial(where: str, which: str) -> str:
    return f"tl.store({where} + {which}.to(tl.int64) * COLUMNS + column, total, mask=column < COLUMNS)"


def _add_up(partials: str, first: str, end: str) -> list[str]:
    """Lines that add the partial sums ``first`` to ``end`` to ``total``, in order, with several loads in flight."""
    return [
        f"at, end_at = {first}, {end}",
        # A `while`, because the bounds are computed in the kernel.
        "while at < end_at:",
        f"    for ahead in tl.static_range({_JOINED}):",
        "        which = at + ahead",
        f"        from_ = {partials} + which.to(tl.int64) * COLUMNS + column",
        "        total += tl.load(from_, mask=(column < COLUMNS) & (which < end_at), other=0.0)",
        f"    at += {_JOINED}",
    ]


@dataclass(frozen=True)
class _SegmentLayout:
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
        """Chunks of a group. A long segment is the sum of its whole groups and of fewer chunks than two groups have. A
        power of two near the square root of half the chunks keeps both short."""
        return max((1 << self.chunks.bit_length() // 2) // 2, _JOINED)

    @property
    def groups(self) -> int:
        # Whole groups only.
        return self.count // (self.group * _CHUNK)

    @property
    def block(self) -> int:
        return min(1 << (self.columns - 1).bit_length(), _WIDEST)

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block)

    @property
    def emptied(self) -> int:
        """Rows of the table that a program checks, and writes if they are empty."""
        return max((_COPIED if self.based else _EMPTIED) // self.block, 1)

    @property
    def emptying(self) -> int:
        """Programs that check rows of the table."""
        return -(-self.size // self.emptied) * self.blocks

    @property
    def ahead(self) -> int:
        # The widest block of the widest type still has four: 32768 / (2048 * 4).
        return min(_IN_FLIGHT // (self.block * self.dtype.itemsize), _AHEAD)

    def constants(self, block: int) -> dict[str, Any]:
        """Of a kernel whose programs sum ``block`` columns."""
        sizes = {"COUNT": self.count, "SIZE": self.size, "CHUNK": _CHUNK, "PAST": _PAST, "GROUP": self.group}
        return sizes | {"COLUMNS": self.columns, "BLOCK": block, "BLOCKS": -(-self.columns // block)}


def _read(name: str, dtype: torch.dtype) -> dict[str, tuple[str, Argument]]:
    """The argument from which the lines of :func:`_reading` make the pointer ``name``."""
    return {f"{name}_given": (pointer_type(dtype), CallArgument({"rows": ROWS, "base": BASE}[name], 0))}


def _reading(names: Sequence[str], dtype: torch.dtype, aligned: Sequence[str], otherwise: Sequence[str]) -> list[str]:
    """``aligned`` or ``otherwise``, by whether all of ``names`` are multiples of 16 bytes."""
    # Or-ed, the low bits are 0 only where all addresses are multiples.
    addresses = " | ".join(f"{name}_given.to(tl.int64)" for name in names)
    # `multiple_of` marks a value in all its uses, so the aligned branch needs a pointer of its own. Without the
    # arithmetic the compiler would replace that by the argument.
    multiple = as_pointer(f"// {ALIGNMENT} * {ALIGNMENT})", dtype)
    return [
        f"if ({addresses}) % {ALIGNMENT} == 0:",
        *indented(f"{name} = tl.multiple_of(({name}_given.to(tl.int64) {multiple}, {ALIGNMENT})" for name in names),
        *indented(aligned),
        "else:",
        *indented(f"{name} = {name}_given" for name in names),
        *indented(otherwise),
    ]


def _adding(lines: list[str], arguments: dict[str, tuple[str, Argument]], layout: _SegmentLayout, sums: int) -> Job:
    """A job that adds up partial sums, ``sums`` of them for each block of columns."""
    # Partial sums are few, so narrower programs spread them over more multiprocessors.
    constants = layout.constants(min(layout.block, _JOINED_WIDTH))
    return Job(lines, arguments, constants, sums * constants["BLOCKS"])
