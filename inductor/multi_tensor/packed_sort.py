"""A stable sort of row numbers by index, for up to 65,536 of them.

A radix sort passes over its keys many times, with a few kernels each time: of 32768 indices ``torch.sort`` takes 45 us
(int32) or 67 us (int64), most of it launches. Two kernels of 7.1 and 5.6 us do the same (measured on an H200):

1. A program sorts a block of keys in its registers. Each key is packed into one word with its position in the block, so
   all words differ, and their order is that of a stable sort.
2. The final position of a key is the number of keys before it, which a binary search in every block finds. Equal keys
   count in blocks before its own, not in those after it.

The work of the second kernel grows with the square of the number of keys, so longer lists use ``torch.sort``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.inductor.codegen.triton_text import pointer_type
from weft.inductor.multi_tensor.launch_plan import Argument, Job, Scratch

_POSITION_BITS = 10  # of a packed word; 21 bits of a positive int32 are left for the key
_MOST_IN_BLOCK = 1 << _POSITION_BITS  # keys that a program sorts
_LAST = 2**31 - 1  # pads a block: sorts after the words of all keys
_PLACED = 32  # keys whose places a program finds; the smallest block too
_MOST = 2**16  # keys: four times the searches of 32768, some 20 us on an H200
_LARGEST = 2 ** (31 - _POSITION_BITS) - 2  # rows of a table: the keys ``size`` and ``size + 1`` stay below ``_LAST``


def fits_packed_sort(count: int, size: int) -> bool:
    """Whether ``count`` keys of a table of ``size`` rows can be sorted so, and faster than by ``torch.sort``."""
    return count <= _MOST and size <= _LARGEST


@dataclass(frozen=True)
class PackedSort:
    """The kernels that sort the row numbers of one index tensor, as jobs for a launch that has others too.

    They write ``keys`` and ``order``, both int32 (count,): ``keys`` are the indices in order, equal ones in the order
    of their rows, and ``keys[i]`` is ``index[order[i]]``. Indices outside the table become ``size``. ``index`` (count,)
    is contiguous, int32 or int64, and short enough for :func:`fits_packed_sort`.

    Attributes:
        size: rows of the table.
        wraps: whether an index below zero counts from the end.
    """

    size: int
    wraps: bool = False

    def sorted(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``keys`` and ``order`` by ``torch.sort``: what the kernels have to give."""
        at = torch.where(index < 0, index + self.size, index) if self.wraps else index
        # Stable, as the order of equal rows decides the order of their sum.
        keys, order = torch.sort(torch.where((at < 0) | (at >= self.size), self.size, at), stable=True)
        return keys.int(), order.int()

    def words(self, count: int) -> int:
        """Elements of the int32 memory ``words`` that both kernels need."""
        # Whole blocks: the padding sorts to the end of the last one.
        return -(-count // _block(count)) * _block(count)

    def blocks(self, index: torch.Tensor, place: Argument) -> Job:
        """The first kernel: sorts blocks of ``index``, which is ``place``."""
        count, block = len(index), _block(len(index))
        lines = [
            "position = tl.arange(0, SORTED)",
            "at = job * SORTED + position",
            "key = tl.load(index + at, mask=at < COUNT, other=0)",
            *(["key = tl.where(key < 0, key + SIZE, key)"] if self.wraps else ()),
            # Checked with the index's own width; a key fits 21 bits afterwards.
            "key = tl.where((key < 0) | (key >= SIZE), SIZE, key).to(tl.int32)",
            # The key in the upper bits decides; among equal keys the position does, which makes the sort stable.
            f"word = tl.where(at < COUNT, (key << {_POSITION_BITS}) | position, {_LAST})",
            "tl.store(words + at, tl.sort(word))",
        ]
        arguments = {"index": (pointer_type(index.dtype), place), "words": ("*i32", Scratch("words"))}
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
            # Words before this one: in its own block the smaller ones, in earlier blocks those of its key too, in
            # later blocks only those of smaller keys.
            f"end = tl.where(other == own, word, (key + (other < own).to(tl.int32)) << {_POSITION_BITS})",
            "before = tl.zeros([PLACED, WIDTH], tl.int32)",
            # One search for each pair of a key and a block, all in step: no thread waits for another's branch.
            "first = words + other * SORTED",
            *(
                # Invariant: the first `before` words of the block are below `end`.
                f"before += tl.where(tl.load(first + before + {step - 1}, mask=other < BLOCKS_SORTED, other={_LAST})"
                f" < end, {step}, 0)"
                for step in steps
            ),
            # Places are a permutation, so every element of `keys` and `order` is stored once.
            "place = tl.sum(before, axis=1)[:, None]",
            "tl.store(keys + place, key, mask=at < COUNT)",
            f"tl.store(order + place, own * SORTED + (word & {_MOST_IN_BLOCK - 1}), mask=at < COUNT)",
        ]
        constants = {"COUNT": count, "SORTED": block, "BLOCKS_SORTED": blocks, "PLACED": _PLACED}
        # Tiles have powers of two columns; blocks that do not exist load `_LAST`, which is below no `end`.
        constants["WIDTH"] = 1 << (blocks - 1).bit_length()
        arguments = {"words": ("*i32", Scratch("words")), "keys": ("*i32", keys), "order": ("*i32", order)}
        return Job(lines, arguments, constants, -(-count // _PLACED))


def _block(count: int) -> int:
    """How many words of ``count`` a program sorts."""
    return min(max(1 << (count - 1).bit_length(), _PLACED), _MOST_IN_BLOCK)
