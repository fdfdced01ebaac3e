"""Guards on what functions with ``functools.lru_cache`` remember.

A step goes by remembered results, which a call of ``cache_clear`` takes away: eager then computes them anew, and may
get others. Other code may call such a function meanwhile, so that it remembers more, and forgets what was used
longest ago. Only where it has forgotten everything is the step captured again.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import islice
from typing import Any

from weft import torch_adapter
from weft.capture.user_code import REMEMBERING

# Results that are kept of each function, to see whether it has forgotten them. The latest ones, which it forgets last.
_KEPT = 4


class ResultCacheGuard:
    """Guards on the results of functions.

    Args:
        objects: among them the functions.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        functions = [each for each in objects if isinstance(each, REMEMBERING)]
        found = [(function, cache) for function in functions if (cache := _cache_of(function))]
        self._names = [function.__qualname__ for function, _ in found]
        self._caches = [cache for _, cache in found]
        self._versions = list(map(torch_adapter.dict_version, self._caches))
        self._kept = list(map(_latest, self._caches))

    def listed(self) -> list[str]:
        """The conditions as text."""
        return [f"{name} remembers results" for name in self._names]

    def holds(self) -> bool:
        """Whether no function has forgotten everything."""
        versions = list(map(torch_adapter.dict_version, self._caches))
        if versions == self._versions:
            return True
        if self.failure() is not None:
            return False
        self._versions, self._kept = versions, list(map(_latest, self._caches))
        return True

    def failure(self) -> str | None:
        """Which function has forgotten its results, as text; None where none has."""
        for name, cache, kept in zip(self._names, self._caches, self._kept, strict=True):
            known = set(map(id, kept))
            if not any(id(value) in known for value in list(cache.values())):
                return f"{name} has forgotten its results"
        return None


def _cache_of(function: Any) -> dict[Any, Any] | None:
    """The dictionary from arguments to results; None where nothing is remembered."""
    attributes = vars(function)
    dictionaries = [each for each in gc.get_referents(function) if type(each) is dict and each is not attributes]
    return dictionaries[0] if dictionaries and dictionaries[0] else None


def _latest(cache: dict[Any, Any]) -> list[Any]:
    return list(islice(reversed(cache.values()), _KEPT))
