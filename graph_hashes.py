"""Hashes of the graphs that this process has captured. Checkpoints record them: a run that goes on from one and
captures another graph is another program."""

from __future__ import annotations

_hashes: dict[str, str] = {}


def record(step: str, digest: str) -> None:
    """Remember the graph that a step was captured as last.

    Args:
        step: its qualified name.
        digest: SHA-256 of the graph's text, in hexadecimal. Equal on all ranks.
    """
    _hashes[step] = digest


def recorded() -> dict[str, str]:
    """The hash of each step's last graph, by its name."""
    return dict(_hashes)
