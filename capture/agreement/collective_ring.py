"""The last collectives of this process, for a look after a failure: which were issued, and which of them have ended.

Written as JSON to ``knobs.ring_dir`` when a compiled step that communicates raises, one file a process. Beside NCCL's
flight recorder, which sees NCCL only, it has the collectives over gloo and the calls over symmetric memory. `weft
launch` sets the folder, beside the logs. Files of two ranks that stop at different entries say who came too late.
Replays of CUDA graphs run no Python, so their collectives are not in it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from pathlib import Path

from weft import knobs

log = logging.getLogger(__name__)

_KEPT = 1000


class RingEntry:
    """One collective.

    Attributes:
        number: how many this process issued before it.
        what: the operation.
        group: name of its process group.
        bytes: that this rank gives.
        call, index: the number of the compiled call, and of the collective in it; -1 where nobody counts.
        issued, ended: seconds since 1970; ``ended`` is 0.0 until the host has seen the end.
    """

    __slots__ = ("bytes", "call", "ended", "group", "index", "issued", "number", "what")

    def __init__(self, number: int, what: str, group: str, size: int, call: int, index: int) -> None:
        self.number, self.what, self.group, self.bytes, self.call, self.index = number, what, group, size, call, index
        self.issued, self.ended = time.time(), 0.0

    def end(self) -> None:
        """The host has seen the end."""
        self.ended = time.time()


_ring: deque[RingEntry] = deque(maxlen=_KEPT)
_count = 0


def record(what: str, group: str, size: int, call: int = -1, index: int = -1) -> RingEntry:
    """Remember a collective that is issued now."""
    global _count
    entry = RingEntry(_count, what, group, size, call, index)
    _count += 1
    _ring.append(entry)
    return entry


def write(rank: int, why: str) -> Path | None:
    """Write the ring, oldest first, with the reason. Returns the file; None where no folder is set or it cannot be."""
    if not knobs.ring_dir:
        return None
    names = RingEntry.__slots__
    entries = [{name: getattr(entry, name) for name in sorted(names)} for entry in _ring]
    for entry in entries:
        entry["state"] = "ended" if entry["ended"] else "issued"
    path = Path(knobs.ring_dir) / f"collectives_rank{rank}_{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rank": rank, "why": why, "collectives": entries}, indent=1) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)
        return None
    log.warning("the last %d collectives of rank %d are in %s", len(entries), rank, path)
    return path
