"""Compiled graphs on disk: a second process that compiles the same step reads the graph of kernels that the first one
made, and runs no pass, no lowering, no fusion and no code generation.

An entry is found by everything that it depends on: the captured graph with its fakes, the versions of Python, torch,
triton and weft (by the content of its files), the knobs, the GPU. Where the user's lines stand is no part of that: an
entry gets those of the graph that it is read for. It is data, see :mod:`weft.inductor.portable`. Many processes may
read and write the same entry: it appears whole.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft import knobs, torch_adapter, triton_adapter
from weft.capture.graph import StepGraph
from weft.inductor import portable
from weft.inductor.passes.split_all_reduce import ranks_on_a_host
from weft.inductor.portable import NotPortable
from weft.inductor.runtime import kernel_cache

log = logging.getLogger(__name__)

# Knobs that say nothing about what is compiled.
_ELSEWHERE = frozenset(
    {"cache_dir", "cluster", "dump_dir", "agreement_timeout_s", "peer_timeout_s", "schedule_timeout_s"}
    | {"autotune", "recapture_limit", "verify"}
)
# What reading an entry raises that passed its checksum and means nothing to this weft.
_MEANINGLESS = (ValueError, LookupError, TypeError, AttributeError, ImportError)


def cached(step: StepGraph, make: Callable[[StepGraph], StepGraph], variant: str = "") -> StepGraph:
    """``make(step)``, or the same graph as an earlier call made, in this process or in another.

    Args:
        make: must not change ``step``.
        variant: what tells this ``make`` from others.

    Raises errors.CacheUnusable.
    """
    started = time.process_time()
    try:
        path = _path(step, variant)
    except NotPortable as reason:
        log.info("compiled in this process only: the graph holds %s", reason)
        return make(step)
    made = _read(path, step)
    if made is not None:
        log.info("compiled before: read in %.2f s (CPU) from %s", time.process_time() - started, path)
    else:
        made = make(step)
        try:
            kernel_cache.write_checked(path, portable.dump(made, step).encode())
        except NotPortable as reason:
            log.info("compiled in this process only: the graph of kernels holds %s", reason)
    _names[made.graph] = path.name
    return made


# Of graphs that :func:`cached` returned.
_names: weakref.WeakKeyDictionary[torch.fx.Graph, str] = weakref.WeakKeyDictionary()


def remembered(made: StepGraph, about: str, make: Callable[[], str]) -> str:
    """``make()``, which says something of a graph that :func:`cached` returned, or what an earlier call said.

    Args:
        about: all that it depends on beside the captured graph and the knobs.

    Raises errors.CacheUnusable.
    """
    if made.graph not in _names:
        return make()
    name = hashlib.sha256(json.dumps([_names[made.graph], about]).encode()).hexdigest()
    path = kernel_cache.directory() / "schedules" / name[:2] / name
    known = kernel_cache.read_checked(path)
    if known is not None:
        return known.decode()
    said = make()
    kernel_cache.write_checked(path, said.encode())
    return said


def _read(path: Path, step: StepGraph) -> StepGraph | None:
    content = kernel_cache.read_checked(path)
    if content is None:
        return None
    try:
        return portable.load(content.decode(), step).check()
    except _MEANINGLESS as error:
        log.warning("%s cannot be read (%s: %s); it will be made again", path, type(error).__name__, error)
        return None


def _path(step: StepGraph, variant: str = "") -> Path:
    """The file of a captured step."""
    entries = [repr(entry) for entry in (*step.inputs, *step.outputs)]
    key = [variant, _environment(), _devices(step), _symbols(step), entries, _groups(step), portable.dump(step)]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return kernel_cache.directory() / "graphs" / name[:2] / name


def _environment() -> list[Any]:
    versions = [platform.python_version(), torch.__version__, triton_adapter.version(), _own_version()]
    return [*versions, {name: getattr(knobs, name) for name in knobs.KNOBS if name not in _ELSEWHERE}]


@functools.cache
def _own_version() -> str:
    """What tells this weft from others: a hash of its source files."""
    content = hashlib.sha256()
    home = Path(__file__).parents[1]
    for room in ("capture", "distributed", "inductor"):
        for file in sorted((home / room).rglob("*.py")):
            content.update(f"{file.relative_to(home)}\n".encode() + file.read_bytes())
    for file in sorted(home.glob("*.py")):
        content.update(f"{file.name}\n".encode() + file.read_bytes())
    return content.hexdigest()


def _devices(step: StepGraph) -> list[str]:
    """The GPUs of a graph, with what they are."""
    vals = (node.meta.get("val") for node in step.graph.nodes)
    devices = {val.device for val in vals if isinstance(val, torch.Tensor) and val.device.type == "cuda"}
    return [f"{device}: {torch.cuda.get_device_properties(device)}" for device in sorted(devices, key=str)]


def _groups(step: StepGraph) -> list[tuple[Any, ...]]:
    """The process groups of a graph, with what passes write into it: how many ranks are on one host, and where passes
    go by batches of one size on all ranks, how many there are and this rank's place."""
    written = {
        name: (len(torch_adapter.group_ranks(group)), torch_adapter.group_rank(group))
        for name, group in step.groups.items()
        if knobs.even_batches
    }
    return [(name, group, ranks_on_a_host(group), written.get(name)) for name, group in sorted(step.groups.items())]


def _symbols(step: StepGraph) -> list[str]:
    """What is known of the symbols of a graph: it decides how kernels index, and which sizes are taken for equal."""
    symbols = portable.symbols_of(node.meta.get("val") for node in step.graph.nodes)
    if not symbols:
        return []
    shape_env = torch_adapter.shape_env_of(torch_adapter.fake_mode_of(step.graph))
    known = [f"{symbol}: {torch_adapter.known_of(shape_env, symbol)}" for symbol in symbols]
    return sorted([*known, *map(str, torch_adapter.assumptions(shape_env))])
