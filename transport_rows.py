"""The table of transports: what can carry collectives.

It imports nothing of the compiler, so that the knob ``transports`` takes its names and words from it.
:mod:`weft.inductor.graph.collectives` says what else a new transport needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TransportRow:
    """What can carry collectives.

    Attributes:
        name: as in ``knobs.transports`` and in the files that describe clusters.
        kinds: the kinds of collectives that it carries; empty for a library, which carries all.
        reductions: the reductions that it can make.
        sums_in_float32: it reduces in float32 whatever narrower dtype it sends. Others reduce in the dtype they send.
        reads_all: every rank reads the whole tensors of all others, instead of a ring. Of collectives that have none
            (:class:`weft.inductor.graph.collectives.Traffic`) it says nothing.
    """

    name: str
    kinds: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ()
    sums_in_float32: bool = False
    reads_all: bool = False


_GATHERS, _SUMS, _ANY = ("all_gather",), ("sum", "avg"), ("sum", "avg", "max", "min")

TRANSPORTS: dict[str, TransportRow] = {
    row.name: row
    for row in (
        TransportRow("nccl"),
        TransportRow("gloo"),
        TransportRow("copy_engine", _GATHERS),
        TransportRow("push", _GATHERS),
        TransportRow("copy_sum", ("reduce_scatter",), _SUMS, sums_in_float32=True),
        TransportRow("pull", ("reduce_scatter",), _SUMS, sums_in_float32=True),
        TransportRow("one_shot", ("all_reduce",), _ANY, sums_in_float32=True, reads_all=True),
        TransportRow("two_shot", ("all_reduce",), _ANY, sums_in_float32=True),
    )
}

LIBRARIES = tuple(row.name for row in TRANSPORTS.values() if not row.kinds)
"""Transports that carry every collective, by its ``library`` form: the backends of torch's process groups."""
LIBRARY = LIBRARIES[0]
"""What carries a collective that no transport was chosen for."""


def parse_transport(name: str) -> tuple[str, int]:
    """A transport's name and its number of thread blocks ("pull_16"), 0 where none is given."""
    found = re.fullmatch(r"(.+)_(\d+)", name)
    return (name, 0) if name in TRANSPORTS or found is None else (found[1], int(found[2]))


def transport_row(name: str) -> TransportRow | None:
    """The row of a transport with any number of programs; None for one that is not known. A library has no programs."""
    base, _ = parse_transport(name)
    row = TRANSPORTS.get(base)
    return row if row is not None and (row.kinds or base == name) else None


def peer_transports() -> list[str]:
    """Names of the transports over symmetric memory: all but the libraries."""
    return [row.name for row in TRANSPORTS.values() if row.kinds]


def peer_stream(transport: str, stream: str) -> str:
    """Name of the communication stream that a transport over symmetric memory uses on a GPU, for collectives of a kind
    whose ``stream`` is given. Costs and launches both ask here, so a prediction serialises what the GPU does.

    One stream runs all reductions, of every group and transport. Others have one per transport; its variants with other
    numbers of programs ("push", "push_32") share it.
    """
    return f"peers:{stream}" if stream == "reduce" else f"{parse_transport(transport)[0]}:{stream}"
