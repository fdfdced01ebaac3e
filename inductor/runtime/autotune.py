"""Which of several alternatives of a kernel is the fastest on a GPU: measured once, kept in the cache.

An entry is a file of JSON of its own, so that processes can add entries at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft import knobs
from weft.inductor.runtime import kernel_cache
from weft.inductor.runtime.kernel_source import KernelSource

log = logging.getLogger(__name__)


def tune(
    alternatives: Sequence[KernelSource],
    gpu: str,
    run: Callable[[KernelSource], None],
    measure: Callable[[Callable[[], None]], float],
) -> KernelSource:
    """The fastest of `alternatives` on the GPU called `gpu`, as far as is known.

    The alternatives, best guess first, have one text and differ in constants, warps or stages. What an earlier
    measurement of the same alternatives found is taken from the cache. Where there is none, they are measured if
    knobs.autotune asks for it, and otherwise the first is taken: `run` launches an alternative on arguments of the
    sizes in question, `measure` says how many milliseconds a call takes. Raises errors.CacheUnusable.
    """
    assert len({source.text for source in alternatives}) == 1, "alternatives are of one text"
    if len(alternatives) == 1:
        return alternatives[0]
    path = _path_of(alternatives, gpu)
    choices = [_choice(source) for source in alternatives]
    known = _read(path)
    if known in choices:
        return alternatives[choices.index(known)]
    if not knobs.autotune:
        return alternatives[0]
    times = [measure(lambda source=source: run(source)) for source in alternatives]
    best = times.index(min(times))
    table = ", ".join(f"{choice}: {time:.4f} ms" for choice, time in zip(choices, times, strict=True))
    log.info("kernel %s on %s: %s; taken: %s", alternatives[0].name, gpu, table, choices[best])
    entry = {"kernel": alternatives[0].name, "gpu": gpu, "choice": choices[best], "milliseconds": times}
    kernel_cache.write_atomically(path, json.dumps(entry).encode())
    return alternatives[best]


def _choice(source: KernelSource) -> dict[str, Any]:
    """What may differ between alternatives."""
    return {"constants": source.constants, "num_warps": source.num_warps, "num_stages": source.num_stages}


def _path_of(alternatives: Sequence[KernelSource], gpu: str) -> Path:
    """The file of an entry: named by the kernel, the set of alternatives and the GPU."""
    contents = sorted(source.content for source in alternatives)
    key = hashlib.sha256(json.dumps([kernel_cache.FORMAT, contents, gpu]).encode()).hexdigest()
    return kernel_cache.directory() / "autotune" / f"{key}.json"


def _read(path: Path) -> Any:
    """The choice kept in `path`; None where there is none that can be read."""
    content = kernel_cache.read_bytes(path)
    if content is None:
        return None
    try:
        return json.loads(content)["choice"]
    except (ValueError, KeyError, TypeError):
        log.warning("%s is damaged and is not used", path)
        return None
