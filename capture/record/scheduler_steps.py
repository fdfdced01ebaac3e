"""``scheduler.step()`` without the question whether it is the first call.

``LRScheduler.step`` of torch asks ``self._step_count == 1``, only to warn where the optimizer has not stepped before or
its ``step`` was replaced. A step that steps its scheduler would be captured twice for that: once for the first call,
and once for all others. Where neither warning is due, both outcomes do the same, so the counter answers no.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_STEP = LRScheduler.step.__code__


def count_for(scheduler: Any, count: Any, reader: types.FrameType) -> Any:
    """What the frame ``reader`` gets for ``scheduler._step_count``, whose value is ``count``."""
    asks = reader.f_code is _STEP and type(count) is torch.SymInt
    return _Count(count) if asks and not _warns(scheduler) else count


def _warns(scheduler: Any) -> bool:
    """Whether the first call of ``scheduler.step()`` warns, by the questions of torch's."""
    optimizer = getattr(scheduler, "optimizer", None)
    stepped = getattr(optimizer, "_opt_called", False)
    return not (stepped and hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"))


class _Count:
    """The number of calls before this one, for torch to compare and to count up."""

    def __init__(self, before: torch.SymInt) -> None:
        self._before = before

    def __eq__(self, other: object) -> bool:
        return False

    def __add__(self, calls: int) -> Any:
        return self._before + calls
