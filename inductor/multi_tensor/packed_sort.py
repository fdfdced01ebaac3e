"""A stable sort of row numbers: the order in which rows of one index come together.

A sort for any keys passes over them many times, each a few kernels: of 32768 indices ``torch.sort`` takes 45 us (int32)
or 67 us (int64), of which hardly anything is work. Two kernels of 7.1 and 5.6 us do the same (measured on an H200):

1. a program sorts a block of keys in its registers, each packed into one word with its position in the block, so that
   words differ and their order is the stable one;
2. each key's place is how many come before it, by binary search in every block: in blocks before its own equal keys
   count too, in those after it only smaller ones.

The second kernel's work grows with the square of the keys, so longer lists are left to ``torch.sort``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.multi_tensor.operation import MultiTensor
from weft.inductor.multi_tensor.plan import Given, Made, Plan, Scratch, add_launch
from weft.inductor.multi_tensor.text import INDICES, function

_POSITION_BITS = 10  # of a word of 31 bits, which is above zero
_MOST_IN_BLOCK = 1 << _POSITION_BITS
_LAST = 2**31 - 1  # a word after those of all keys
_PLACED = 32  # keys whose places a program finds, which is the smallest block too
_MOST = 2**16  # keys: four times the searches of 32768, some 20 us
_LARGEST = 2 ** (31 - _POSITION_BITS) - 2  # table: a key outside it, and the one after, are words before the last


def packs(count: int, size: int) -> bool:
    """Whether ``count`` keys of a table of ``size`` rows can be sorted in this way, in less time than in another."""
    return count <= _MOST and size <= _LARGEST


@dataclass(frozen=True)
class PackedSort(MultiTensor):
    """``packed_sort([index])``: two lists of one, ``keys`` and ``order``, both int32 (count,).

    ``keys`` are the indices in order, equal ones in the order they came in, and ``keys[i]`` is ``index[order[i]]``;
    those outside the table are ``size``. ``index`` (count,) is contiguous, int32 or int64; :func:`packs` says how long.

    Attributes:
        size: rows of the table.
        wraps: whether an index below zero counts from the end.
    """

    size: int
    wraps: bool = False

    @property
    def __name__(self) -> str:
        return "packed_sort"

    def __call__(self, *arguments: Any) -> list[list[torch.Tensor]]:
        ((index,),) = arguments
        at = torch.where(index < 0, index + self.size, index) if self.wraps else index
        keys, order = torch.sort(torch.where((at < 0) | (at >= self.size), self.size, at), stable=True)
        return [[keys.int()], [order.int()]]

    def plan(self, arguments: Sequence[Any], number_type: str = "fp32") -> Plan:
        ((index,),) = arguments
        count = len(index)
        block = min(max(1 << (count - 1).bit_length(), _PLACED), _MOST_IN_BLOCK)
        blocks = -(-count // block)
        plan = Plan()
        plan.scratch["words"] = (blocks * block, torch.int32)
        self._add_blocks(plan, index, block, blocks)
        self._add_places(plan, count, block, blocks)
        return plan

    def _add_blocks(self, plan: Plan, index: torch.Tensor, block: int, blocks: int) -> None:
        lines = [
            "position = tl.arange(0, BLOCK)",
            "at = tl.program_id(0) * BLOCK + position",
            "key = tl.load(index + at, mask=at < COUNT, other=0)",
            *(["key = tl.where(key < 0, key + SIZE, key)"] if self.wraps else ()),
            "key = tl.where((key < 0) | (key >= SIZE), SIZE, key).to(tl.int32)",
            f"word = tl.where(at < COUNT, (key << {_POSITION_BITS}) | position, {_LAST})",
            "tl.store(words + at, tl.sort(word))",
        ]
        constants = {"COUNT": len(index), "SIZE": self.size, "BLOCK": block}
        signature = {"index": INDICES[index.dtype], "words": "*i32"}
        text = function("sorted_blocks", [*signature, *(f"{name}: tl.constexpr" for name in constants)], lines)
        add_launch(plan, "sorted_blocks", text, signature, (Given(0, 0), Scratch("words")), blocks, constants)

    def _add_places(self, plan: Plan, count: int, block: int, blocks: int) -> None:
        # From half a block down to one word; as many as the words of a block need another one.
        steps = [*(block >> by for by in range(1, block.bit_length())), 1]
        lines = [
            "at = tl.program_id(0) * PLACED + tl.arange(0, PLACED)[:, None]",
            "word = tl.load(words + at)",
            f"key = word >> {_POSITION_BITS}",
            "own = at // BLOCK",
            "other = tl.arange(0, WIDTH)[None, :]",
            f"end = tl.where(other == own, word, (key + (other < own).to(tl.int32)) << {_POSITION_BITS})",
            "before = tl.zeros([PLACED, WIDTH], tl.int32)",
            "first = words + other * BLOCK",
            *(
                f"before += tl.where(tl.load(first + before + {step - 1}, mask=other < BLOCKS, other={_LAST}) < end,"
                f" {step}, 0)"
                for step in steps
            ),
            "place = tl.sum(before, axis=1)[:, None]",
            "tl.store(keys + place, key, mask=at < COUNT)",
            f"tl.store(order + place, own * BLOCK + (word & {_MOST_IN_BLOCK - 1}), mask=at < COUNT)",
        ]
        constants = {"COUNT": count, "BLOCK": block, "BLOCKS": blocks, "PLACED": _PLACED}
        constants["WIDTH"] = 1 << (blocks - 1).bit_length()
        signature = {"words": "*i32", "keys": "*i32", "order": "*i32"}
        text = function("sorted_places", [*signature, *(f"{name}: tl.constexpr" for name in constants)], lines)
        places = (Scratch("words"), Made(0, 0), Made(1, 0))
        add_launch(plan, "sorted_places", text, signature, places, -(-count // _PLACED), constants)
