"""Every log line of weft carries the rank that wrote it.

Messages of the logger `weft` and those below it begin with "[rank 3]" where there is a rank: in a process
group, or where torchrun has set RANK. Handlers, formatters and levels are whoever's they were; the one thing
that is changed is the record. The formatter of TORCH_LOGS writes a rank of its own once a process group
exists, and then gets the message without.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any


class RankedRecord(logging.LogRecord):
    """A log record of weft."""

    def getMessage(self) -> str:
        """The message, with the rank in front where torch's own formatter does not print it."""
        message = super().getMessage()
        rank, in_group = _rank()
        asked_by_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        return message if rank is None or (in_group and asked_by_torch) else f"[rank {rank}] {message}"


def install() -> None:
    """Let records of weft's loggers be RankedRecords from now on. A record that another library's factory has
    already made a class of its own is left alone. Installing twice does nothing."""
    before = logging.getLogRecordFactory()
    if getattr(before, "makes_ranked_records", False):
        return

    def factory(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(name, *args, **kwargs)
        if type(record) is logging.LogRecord and (name == "weft" or str(name).startswith("weft.")):
            record.__class__ = RankedRecord
        return record

    factory.makes_ranked_records = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(factory)


def _rank() -> tuple[int | None, bool]:
    """This process's rank, where it has one, and whether a process group says so. Does not import torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), True
    told = os.environ.get("RANK", "")
    return (int(told) if told.isdigit() else None), False
