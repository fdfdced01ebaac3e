"""The checks in a graph of what a capture assumed about numbers that only the data decides."""

from __future__ import annotations

from weft.errors import RuntimeCheckFailed


def check(holds: bool, condition: str, names: str, *values: int) -> None:
    """Target of a node that checks what the graph assumes about numbers that only the data decides.

    Args:
        holds: whether the assumption is true in this call.
        condition: the assumption as text.
        names, values: the numbers in it; the names are separated by line feeds.

    Raises:
        RuntimeCheckFailed: it does not hold; names the condition and the numbers.
    """
    if not holds:
        found = ", ".join(f"{name} = {value}" for name, value in zip(names.split("\n"), values, strict=True))
        raise RuntimeCheckFailed(condition, found)
