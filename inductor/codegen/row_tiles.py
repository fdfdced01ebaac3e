"""Sizes of tiles, which are powers of two in Triton, and the tiles of kernels that reduce short rows or stream rows, as
measured on an H200."""

from __future__ import annotations

import math

LOOP_TILE = 4096  # elements of a loop's tile
_FEW_WARPS = 16  # of a multiprocessor, which then mostly waits for memory


def rows_of_program(r: int) -> int:
    """How many rows of ``r`` elements share a program: 512 elements are a warp's, 1024 those of two.

    Measured: softmax of rows of 49 takes 126 us with 16 rows and 4 warps, 86 with 8 rows and one; RMSNorm of heads of
    128 takes 19.7 us with 4 warps, 18.2 with two.
    """
    return 1 if r >= 512 else 1024 // r if r > 64 else 512 // r


def tile_of_rows(c: int) -> tuple[int, int, bool]:
    """The tile of a kernel that reduces rows of up to ``c`` elements and sums columns in a loop over rows.

    Returns its elements, the fewest warps of a program, and whether loads are in flight in shared memory.

    Measured, with 4096 elements and 4 or 8 warps, and with what is returned (us): backwards of layer norm over rows of
    768 take 46 and 33, 49 and 40; of 384 45 and 26, 22 and 22; of 192 79 and 36, 83 and 51, 41 and 37; of 96 146 and
    91, 113 and 94; of 128 101 and 56. Those of RMSNorm and rope in heads of 128 take 49 and 31, 29 and 20.
    """
    if c <= 128:
        return 2048, 8, True
    if c == 256:
        return LOOP_TILE, 4, False  # a row fits a warp; pipelined loads were slower
    if c == 512:
        return 1024, 2, True
    return (2048, 4, True) if c == 1024 else (LOOP_TILE, 4, True)


def streamed_tile(columns: int, programs: float, pipelined: bool, multiprocessors: int) -> tuple[int, int, int]:
    """The tile of a program that computes, stores and sums ``columns`` of one row after the other.

    Returns its rows, the warps of the program, and how many iterations ahead loads are in flight.

    16 elements a thread, or 32 with more loads in flight where there are few programs. Measured, 256 parts of 784 rows
    of 512: 384 us with 2 rows and 2 warps, 161 with 8 rows, 4 warps and the loads of two iterations. All columns are
    spread over the threads of a program, so that partial sums stay in their threads until the end.
    """
    warps = columns // 256
    if pipelined and programs * warps < multiprocessors * _FEW_WARPS:
        return 8, 2 * warps, 2
    return 2, warps, 1


def next_power_of_two(n: float) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, math.ceil(n) - 1).bit_length()


def previous_power_of_two(n: int) -> int:
    """The largest power of two that is no more; 1 for 0."""
    return 1 << max(0, n.bit_length() - 1)
