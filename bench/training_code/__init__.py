"""Pieces of training code in the style of public repositories: what ``model_coverage.py`` calls the family ``code``.

Each piece is one ordinary training loop's step with the things that people write into it: counters, meters, clipping,
schedules, gradient scaling, several optimizers, logging. Models are tiny; what counts is the code around them.
"""

from __future__ import annotations

from coverage_case import Case

from . import loops, losses, models, optimizers, recipes, research, state
from .pieces import PIECES

__all__ = ["code_cases", "loops", "losses", "models", "optimizers", "recipes", "research", "state"]


def code_cases() -> dict[str, Case]:
    """All pieces by name, as ``file/function``."""
    return dict(PIECES)
