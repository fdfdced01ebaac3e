"""The attempts at the capture of one path of a step: when another one is needed, and what it does otherwise."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from weft.capture.record.array_sources import ArrayDrawn
from weft.capture.record.held_references import users_modules
from weft.capture.state.code_names import opaque_code
from weft.errors import UnrecordedDraw

Captured = TypeVar("Captured")


def captured_in_attempts(attempt: Callable[..., Captured]) -> Captured:
    """Capture a path; again, where the step defined opaque functions or imported modules of the user's.

    What only opaque functions use must not be guarded, which the walk of the state knows now. Modules see the types of
    eager (:mod:`weft.capture.record.eager_types`) where they were there before.

    Args:
        attempt: runs the step once. Its options: ``watched``, to look for the line that moves a generator; ``arrays``,
            to follow the arrays that numpy draws.
    """
    known = len(opaque_code), len(users_modules())
    grew = lambda: known != (len(opaque_code), len(users_modules()))
    try:
        captured = _with_what_it_draws(attempt, {})
    except Exception:
        if not grew():
            raise
    else:
        if not grew():
            return captured
    return _with_what_it_draws(attempt, {})


def _with_what_it_draws(attempt: Callable[..., Captured], how: dict[str, bool]) -> Captured:
    gc.collect()  # wrappers of modules look whether what autograd made of their tensors is alive
    try:
        return attempt(**how)
    except ArrayDrawn:
        needed = "arrays"
    except UnrecordedDraw:  # by the step, or by a module that was imported meanwhile
        needed = "watched"
        if needed in how:
            raise
    return _with_what_it_draws(attempt, {**how, needed: True})
