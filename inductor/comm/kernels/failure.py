"""What kernels leave behind when a rank did not come: a record of int32 words that the host can read at any time.

On a GPU it lies in page-locked memory of the host, where kernels write to it. All 0: nothing failed.

====  ====================================================================================
word  meaning
====  ====================================================================================
0     what happened (:class:`What`), written last
1     1 once somebody has taken the record: it is the first failure that is told
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


class What(enum.IntEnum):
    """What was waited for in vain, or why nobody waits any more."""

    TO_BEGIN = 1  # that a rank comes to the collective
    TO_END = 2  # that a rank, which came, finishes
    STOPPED = 3  # nothing: the host ended all waiting


@dataclass(frozen=True)
class Failure:
    """A rank was waited for in vain.

    Attributes:
        what: for what.
        collective: where, by the number that its launch was given.
        rank: the first one missing, by its number in the group.
        epoch: how many barriers this program had come to.
    """

    what: What
    collective: int
    rank: int
    epoch: int


def read(record: torch.Tensor) -> Failure | None:
    """The failure in a record (int32[WORDS], in the host's memory); None where there was none."""
    what, _, collective, rank, epoch = record[:5].tolist()
    return Failure(What(what), collective, rank, epoch % 2**32) if what else None


def stop(record: torch.Tensor) -> None:
    """Let every kernel that waits end soon, and none wait from here on: for a host that knows of a rank's end.

    A failure that is recorded already stays.
    """
    if not record[1]:
        record[1] = 1
        record[0] = int(What.STOPPED)
