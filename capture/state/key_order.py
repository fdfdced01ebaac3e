"""The order of the keys of a dictionary, which a step changes where it removes entries and adds them again."""

from __future__ import annotations

from operator import is_
from typing import Any


def moved_keys(before: list[Any], now: list[Any]) -> list[Any]:
    """The keys from the first one on that is not in the order of ``before``. New ones keep theirs at the end."""
    if len(now) == len(before) and all(map(is_, now, before)):
        return []
    place = {id(key): at for at, key in enumerate(before)}
    order = [place.get(id(key), len(place) + at) for at, key in enumerate(now)]
    in_order = next((at for at in range(1, len(order)) if order[at] < order[at - 1]), len(order))
    return now[in_order:]


def assigned_keys(before: list[str], now: list[str]) -> tuple[list[str], frozenset[str]]:
    """The keys that other code may have removed or added since, in the order in which the step leaves them: those that
    it removed and added again, and new ones, which stay where they are if they are there already."""
    moved, new = moved_keys(before, now), frozenset(now).difference(before)
    return [key for key in now if key in moved or key in new] if moved or len(new) > 1 else [], new
