"""``torch.cond`` in a step: the branch that its predicate chooses, as Python's ``if`` would.

Tracers that see no Python are given both branches. A capture sees Python, and branches on values
(:mod:`weft.capture.record.branches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.capture.record.recorder import recording
from weft.thread_patches import present


def cond_replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement)."""
    original = present(torch, "cond")

    def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
        if recording() is None:
            return original(pred, true_fn, false_fn, operands)
        return (true_fn if pred else false_fn)(*operands)

    return [(torch, "cond", cond)]
