"""What a case of ``model_coverage.py`` is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CALLS = 3


@dataclass(frozen=True)
class Trained:
    """A training step with what it works on.

    Attributes:
        step: called with one batch.
        batches: the batches of the calls.
        state: what the step trains, as a tree of tensors and plain values, read after the last call.
        model: what the step trains, where that is one module.
        loss: of one batch, by ``model``: what the step computes before its backward.
    """

    step: Callable[..., Any]
    batches: list[Any]
    state: Callable[[], Any]
    model: torch.nn.Module | None = None
    loss: Callable[[Any], torch.Tensor] | None = None


Case = Callable[[], Trained]


def shown(error: BaseException) -> str:
    """The type and text of an error, for a row of results."""
    return f"{type(error).__name__}: {error}"[:1500]
