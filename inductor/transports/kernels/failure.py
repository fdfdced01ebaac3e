"""The failure record: int32 words that kernels write if a rank does not arrive, and that the host can read any time.

For a GPU it is in page-locked host memory, which kernels can write. All words are 0 if nothing failed.

====  ====================================================================================
word  meaning
====  ====================================================================================
0     what happened (:class:`FailureKind`), written last
1     1 once a writer has taken the record: only the first failure is reported
2     the collective, by the number that its launch was given
3     the first rank that was missing, by its number in the group
4     the epoch of the barrier, modulo 2**32
====  ====================================================================================
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

WORDS = 8  # of a record; the last are not used


class FailureKind(enum.IntEnum):
    """The barrier at which a rank was missing, or that the host stopped all waiting."""

    ENTRY_BARRIER = 1  # a rank did not arrive at the collective
    EXIT_BARRIER = 2  # a rank arrived and did not finish
    STOPPED = 3  # the host ended all waiting


@dataclass(frozen=True)
class Failure:
    """A rank did not arrive at a barrier within the time limit.

    Attributes:
        what: which barrier.
        collective: where, by the number that its launch was given.
        rank: the first one missing, by its number in the group.
        epoch: at how many barriers this program had arrived.
    """

    what: FailureKind
    collective: int
    rank: int
    epoch: int


def read(record: torch.Tensor) -> Failure | None:
    """The failure in a record (int32[WORDS], in the host's memory); None where there was none."""
    # Word 1 only decides between writers.
    what, _, collective, rank, epoch = record[:5].tolist()
    return Failure(FailureKind(what), collective, rank, epoch % 2**32) if what else None


def end_waiting(record: torch.Tensor) -> None:
    """Make waiting kernels end soon, and later ones not wait at all. For a host that knows that a rank has ended.

    A kernel that waited then records what it waited for, as after a timeout. A failure that is already recorded stays.
    """
    if not record[1]:
        # Word 1 stays 0: the first kernel that waited takes the record, and completes it.
        record[0] = int(FailureKind.STOPPED)
