"""Guards on what functions with ``functools.lru_cache`` remember.

A step goes by remembered results, which a call of ``cache_clear`` takes away: eager then computes them anew, and may
get others. Other code may call such a function meanwhile, so that it remembers more, and forgets what was used
longest ago. Only where it has forgotten everything is the step captured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from weft import torch_adapter
from weft.capture.user_code import REMEMBERING, cache_of

# Results that are kept of each function, to see whether it has forgotten them. The latest ones, which it forgets last.
_KEPT = 4


class _Results:
    """What a function remembered when the guard last looked. The search for values that leak out of a capture skips
    instances of weft's classes, so it does not take this reference for a leak."""

    __slots__ = ("cache", "kept", "name", "version")

    def __init__(self, name: str, cache: dict[Any, Any]) -> None:
        self.name = name
        self.cache = cache
        self.look()

    def look(self) -> None:
        """Note what is remembered now."""
        self.version = torch_adapter.dict_version(self.cache)
        self.kept = tuple(islice(reversed(self.cache.values()), _KEPT))

    def are_forgotten(self) -> bool:
        """Whether none of what was noted is remembered."""
        known = set(map(id, self.kept))
        return not any(id(value) in known for value in list(self.cache.values()))


class ResultCacheGuard:
    """Guards on the results of functions.

    Args:
        objects: among them the functions.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        functions = [each for each in objects if isinstance(each, REMEMBERING)]
        found = [(function, cache_of(function)) for function in functions]
        self._results = [_Results(function.__qualname__, cache) for function, cache in found if cache]

    def listed(self) -> list[str]:
        """The conditions as text."""
        return [f"{each.name} remembers results" for each in self._results]

    def holds(self) -> bool:
        """Whether no function has forgotten everything."""
        changed = [each for each in self._results if torch_adapter.dict_version(each.cache) != each.version]
        if any(each.are_forgotten() for each in changed):
            return False
        for each in changed:
            each.look()
        return True

    def failure(self) -> str | None:
        """Which function has forgotten its results, as text; None where none has."""
        forgotten = next((each for each in self._results if each.are_forgotten()), None)
        return None if forgotten is None else f"{forgotten.name} has forgotten its results"
