"""Which of several alternatives is the fastest on a GPU: measured once, kept in the cache.

An entry is a file of JSON of its own, so that processes can add entries at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.inductor.runtime import kernel_cache

log = logging.getLogger(__name__)


def fastest(about: Mapping[str, Any], alternatives: Sequence[str], measure: Callable[[], Sequence[float]]) -> str:
    """The fastest of ``alternatives``.

    What an earlier measurement found is taken from the cache. Raises errors.CacheUnusable.

    Args:
        about: what they are alternatives of, and on what: all that may make another one the fastest; JSON.
        alternatives: the one that is taken unless another is faster, then others.
        measure: the milliseconds of each.
    """
    path = _path_of(about, alternatives)
    known = _read(path)
    if known in alternatives:
        return known
    times = list(measure())
    best = alternatives[times.index(min(times))]
    table = ", ".join(f"{name}: {time:.4f} ms" for name, time in zip(alternatives, times, strict=True))
    log.info("%s: %s; taken: %s", about, table, best)
    kernel_cache.write_atomically(path, json.dumps({**about, "choice": best, "milliseconds": times}).encode())
    return best


def _path_of(about: Mapping[str, Any], alternatives: Sequence[str]) -> Path:
    """The file of an entry: named by what it is about and the set of alternatives."""
    key = hashlib.sha256(json.dumps([about, sorted(alternatives)], sort_keys=True).encode()).hexdigest()
    return kernel_cache.directory() / "autotune" / f"{key}.json"


def _read(path: Path) -> Any:
    """The choice kept in ``path``; None where there is none that can be read."""
    content = kernel_cache.read_bytes(path)
    if content is None:
        return None
    try:
        return json.loads(content)["choice"]
    except (ValueError, KeyError, TypeError):
        log.warning("%s is damaged and is not used", path)
        return None
