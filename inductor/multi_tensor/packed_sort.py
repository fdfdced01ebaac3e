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
from weft.inductor.multi_tensor.plan import Argument, Given, Job, Made, Plan, Scratch, add_jobs
from weft.inductor.multi_tensor.text import INDICES

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
        plan = Plan()
        plan.scratch["words"] = (self.words(len(index)), torch.int32)
        add_jobs(plan, "sorted_blocks", [self.blocks(index, Given(0, 0))])
        add_jobs(plan, "sorted_places", [self.places(len(index), Made(0, 0), Made(1, 0))])
        return plan

    def words(self, count: int) -> int:
        """Elements of the int32 memory ``words`` that both kernels need."""
        return -(-count // _block(count)) * _block(count)

    def blocks(self, index: torch.Tensor, place: Argument) -> Job:
        """The first kernel: sorts blocks of ``index``, which is ``place``."""
        count, block = len(index), _block(len(index))
        lines = [
            "position = tl.arange(0, SORTED)",
            "at = job * SORTED + position",
            "key = tl.load(index + at, mask=at < COUNT, other=0)",
            *(["key = tl.where(key < 0, key + SIZE, key)"] if self.wraps else ()),
            "key = tl.where((key < 0) | (key >= SIZE), SIZE, key).to(tl.int32)",
            f"word = tl.where(at < COUNT, (key << {_POSITION_BITS}) | position, {_LAST})",
            "tl.store(words + at, tl.sort(word))",
        ]
        arguments = {"index": (INDICES[index.dtype], place), "words": ("*i32", Scratch("words"))}
        return Job(lines, arguments, {"COUNT": count, "SIZE": self.size, "SORTED": block}, -(-count // block))

    def places(self, count: int, keys: Argument, order: Argument) -> Job:
        """The second kernel: finds places of ``count`` words, and writes ``keys`` and ``order``."""
        block = _block(count)
        blocks = -(-count // block)
        # From half a block down to one word; as many as the words of a block need another one.
        steps = [*(block >> by for by in range(1, block.bit_length())), 1]
        lines = [
            "at = job * PLACED + tl.arange(0, PLACED)[:, None]",
            "word = tl.load(words + at)",
            f"key = word >> {_POSITION_BITS}",
            "own = at // SORTED",
            "other = tl.arange(0, WIDTH)[None, :]",
            f"end = tl.where(other == own, word, (key + (other < own).to(tl.int32)) << {_POSITION_BITS})",
            "before = tl.zeros([PLACED, WIDTH], tl.int32)",
            "first = words + other * SORTED",
            *(
                f"before += tl.where(tl.load(first + before + {step - 1}, mask=other < BLOCKS_SORTED, other={_LAST})"
                f" < end, {step}, 0)"
                for step in steps
            ),
            "place = tl.sum(before, axis=1)[:, None]",
            "tl.store(keys + place, key, mask=at < COUNT)",
            f"tl.store(order + place, own * SORTED + (word & {_MOST_IN_BLOCK - 1}), mask=at < COUNT)",
        ]
        constants = {"COUNT": count, "SORTED": block, "BLOCKS_SORTED": blocks, "PLACED": _PLACED}
        constants["WIDTH"] = 1 << (blocks - 1).bit_length()
        arguments = {"words": ("*i32", Scratch("words")), "keys": ("*i32", keys), "order": ("*i32", order)}
        return Job(lines, arguments, constants, -(-count // _PLACED))


def _block(count: int) -> int:
    """How many words of ``count`` a program sorts."""
    return min(max(1 << (count - 1).bit_length(), _PLACED), _MOST_IN_BLOCK)
