"""What a case of ``coverage.py`` is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CALLS = 3


@dataclass(frozen=True)
class Trained:
    """A training step with what it works on.

    Attributes:
        step: called with one batch.
        batches: the batches of the calls.
        state: what the step trains, as a tree of tensors and plain values, read after the last call.
    """

    step: Callable[..., Any]
    batches: list[Any]
    state: Callable[[], Any]


Case = Callable[[], Trained]
