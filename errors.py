"""Every mistake weft can name, one class each.

A message says what happened, where (rank, mesh axis, the user's file and line) and what to do about it.
"""

from __future__ import annotations


class WeftError(RuntimeError):
    """Base of all errors raised by weft."""
