"""Device functions of transfer kernels. The text of every transfer kernel starts with this whole file.

A rank's *signal pad* is memory that its peers write to: 32-bit words, initially 0. Each program of a kernel has one row
of slots in it, with one slot for each rank. Slot ``r`` counts the barriers at which the same program of rank ``r`` has
arrived: the *epoch*. Epochs exist in signal pads only, so a replayed CUDA graph continues from the epochs of the last
replay. They wrap around at 2**32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def barrier(pads, slots, rank, failure, what, collective, max_polls, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Wait until the same program of every rank is here. Whether all came.

    What a program of any rank wrote before it, and all that earlier kernels there wrote, can be read after it. A rank
    is waited for during ``max_polls`` readings of the slots. Then its absence is recorded, and no barrier that finds a
    record waits: all programs of this rank run to their end, and go on signalling, so that no other rank takes this
    one for the missing one. LANES is WORLD or the next power of two.
    """
    peer = tl.arange(0, LANES)
    there = peer < WORLD
    row = slots + tl.program_id(0) * WORLD
    # This rank's slot in every pad, its own included. Nobody else writes it, so a plain exchange is enough.
    theirs = tl.load(pads + peer, mask=there, other=0).to(tl.pointer_type(tl.uint32)) + row + rank
    own = tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + row
    # Volatile: this multiprocessor's cache does not see what the last barrier wrote.
    # The own slot says how often this program has arrived: no counter on the host, which a graph's replay would not
    # advance.
    epoch = tl.load(own + rank, volatile=True) + 1
    # A release covers what its own thread wrote or knows of: by this, all that the other threads did.
    tl.debug_barrier()
    tl.atomic_xchg(theirs, tl.full([LANES], 0, tl.uint32) + epoch, mask=there, sem="release", scope="sys")
    missing = first_missing(own, epoch, WORLD, LANES)
    left = max_polls
    while (missing < WORLD) & (left > 0):
        missing = first_missing(own, epoch, WORLD, LANES)
        left -= 1
        # The record is in the host's memory, microseconds away: a step that works does not look at it.
        if left % 64 == 0:
            left = tl.where(tl.load(failure, volatile=True) == 0, left, 0)
    if missing < WORLD:
        record(failure, what, collective, missing, epoch)
    # A few threads read the slots: the others go on from here.
    tl.debug_barrier()
    return missing == WORLD


@triton.jit
def first_missing(own, epoch, WORLD: tl.constexpr, LANES: tl.constexpr):
    """The first rank that has not come to the barrier of that epoch, WORLD if all have: the slots read once."""
    peer = tl.arange(0, LANES)
    there = peer < WORLD
    # The language has no load with acquire order of many words at a time.
    seen = tl.atomic_add(own + peer, tl.full([LANES], 0, tl.uint32), mask=there, sem="acquire", scope="sys")
    # A peer may be one epoch ahead, and epochs wrap around: the sign of the difference tells.
    late = (seen - epoch).to(tl.int32, bitcast=True) < 0
    return tl.min(tl.where(there & late, peer, WORLD), 0)


@triton.jit
def record(failure, what, collective, missing, epoch):
    """Write a failure down, unless there has been one. failure.py says what the words mean."""
    if tl.atomic_cas(failure + 1, 0, 1, sem="relaxed", scope="sys") == 0:
        tl.store(failure + 2, collective)
        tl.store(failure + 3, missing)
        tl.store(failure + 4, epoch.to(tl.int32, bitcast=True))
        # Whoever sees the first word written finds the others written too.
        tl.debug_barrier()
        tl.atomic_xchg(failure, what, sem="release", scope="sys")
