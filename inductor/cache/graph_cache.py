"""Compiled graphs on disk. A second process that compiles the same step reads the compiled graph from the cache and
runs no pass, lowering, fusion or code generation. Which stage of compilation made the graph is a part of the key.

The key of an entry is a hash of everything that it depends on: the captured graph with its fake values, the versions of
Python, torch, Triton and weft (by the content of its files), the knobs and the GPU. The user's line numbers are not in
the key: a graph that is read gets those of the graph that it is read for. An entry is data and is never executed by the
host, see :mod:`weft.inductor.graph.serialize`. Writes are atomic, so many processes may use the same entry.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft import cache_folder, knobs, torch_adapter, triton_adapter
from weft.capture.graph import StepGraph
from weft.errors import TritonMissing
from weft.inductor.cache.kernel_text import check_kernel
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.graph import serialize
from weft.inductor.graph.collectives import ranks_on_a_host
from weft.inductor.graph.serialize import NotPortable
from weft.inductor.graph.sizes import symbols_of

log = logging.getLogger(__name__)

# Knobs that do not change the compiled graph.
_ELSEWHERE = frozenset(
    {"cache_dir", "cluster", "dump_dir", "agreement_timeout_s", "peer_timeout_s"}
    | {"form_limit", "recapture_limit", "strict", "verify", "verify_graphs"}
)


def cached(step: StepGraph, make: Callable[[StepGraph], StepGraph], variant: str = "") -> StepGraph:
    """``make(step)``, or the graph that an earlier call returned, in this process or in another.

    A graph that cannot be serialized is compiled in each process.

    Args:
        make: compiles the graph. It must not change ``step``, which is a part of the key.
        variant: a part of the key that tells this ``make`` from others.

    """
    path = entry_of(step, variant)
    if path is not None and (found := read(path, step)) is not None:
        return found[0]
    compiled = make(step)
    if path is not None:
        write(path, compiled, step)
    return compiled


def entry_of(step: StepGraph, variant: str = "") -> Path | None:
    """The file of what is compiled of a captured step: everything that it depends on, hashed. A missing part would let
    a step run a graph that was compiled for another one. None where nothing can be kept: there is no folder, or the
    step holds what only this process knows.

    Args:
        variant: a part of the key that tells what is compiled from other graphs of the same step.
    """
    if not cache_folder.usable():
        return None
    entries = [repr(entry) for entry in (*step.inputs, *step.outputs)]
    # True division of integers gives the default dtype, also inside decompositions.
    dtype = str(torch.get_default_dtype())
    key: list[Any] = [variant, environment(), dtype, _devices(step), _symbols(step), entries, _groups(step)]
    try:
        key.append(serialize.dump(step))
    except NotPortable as reason:
        log.info("compiled in this process only: the graph holds %s", reason)
        return None
    return cache_folder.entry_path("graphs", hashlib.sha256(json.dumps(key).encode()).hexdigest())


def write(path: Path, compiled: StepGraph, step: StepGraph, note: str = "") -> None:
    """Keep a compiled graph of ``step`` in ``path``, with a ``note`` of one line. A graph that only this process knows
    is not kept."""
    try:
        text = serialize.dump(compiled, step)
    except NotPortable as reason:
        log.info("compiled in this process only: the compiled graph holds %s", reason)
        return
    cache_folder.write_checked(path, f"{text}\n{note}".encode() if note else text.encode())


def read(path: Path, step: StepGraph) -> tuple[StepGraph, str] | None:
    """The verified graph in ``path`` with the line numbers of ``step``, and its note; None if it is missing or
    invalid."""
    started = time.process_time()
    content = cache_folder.read_checked(path)
    if content is None:
        return None
    try:
        text, _, note = content.decode().partition("\n")
        found = serialize.load(text, step).check()
        # Triton's interpreter executes kernel text as Python, so text from a file must not do anything but compute.
        for source in {n.target.generated.source for n in found.graph.nodes if isinstance(n.target, KernelCall)}:
            check_kernel(source)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a checksum that holds says nothing about who computed it
        tell_of_damage(path, error)
        return None
    log.info("compiled before: read in %.2f s (CPU) from %s", time.process_time() - started, path)
    return found, note


def tell_of_damage(path: Path, error: Exception) -> None:
    """Log that an entry is not what was written."""
    log.warning("%s cannot be read (%s: %s); it will be made again", path, type(error).__name__, error)


def environment(rooms: tuple[str, ...] = ()) -> list[Any]:
    """Versions and knobs that change the compiled graph. Of weft's own files those up to the compiler count, and those
    of ``rooms``."""
    try:
        triton = triton_adapter.version()
    except TritonMissing:
        triton = ""  # schedules are predicted without it
    versions = [platform.python_version(), torch.__version__, triton, _own_version(rooms)]
    return [*versions, {name: getattr(knobs, name) for name in knobs.KNOBS if name not in _ELSEWHERE}]


@functools.cache
def _own_version(rooms: tuple[str, ...]) -> str:
    """A hash of weft's source files. A version number would stay the same between two edits of a checkout."""
    content = hashlib.sha256()
    home = Path(__file__).parents[2]
    for room in ("capture", "distributed", "inductor", *rooms):
        for file in sorted((home / room).rglob("*.py")):
            content.update(f"{file.relative_to(home)}\n".encode() + file.read_bytes())
    for file in sorted(home.glob("*.py")):
        content.update(f"{file.name}\n".encode() + file.read_bytes())
    return content.hexdigest()


# Properties of a GPU that passes and kernels depend on. Not those that identify one GPU (uuid, PCI address): all ranks
# share an entry, also when a job is restarted on another host.
_PROPERTIES = ("name", "major", "minor", "total_memory", "multi_processor_count")


def _devices(step: StepGraph) -> list[str]:
    """The GPUs of a graph, with their properties."""
    vals = (node.meta.get("val") for node in step.graph.nodes)
    devices = {val.device for val in vals if isinstance(val, torch.Tensor) and val.device.type == "cuda"}
    # A step that was captured on a CPU and moved to GPUs for a prediction has devices that this machine may lack.
    if not torch.cuda.is_available():
        return [f"{device}: not here" for device in sorted(devices, key=str)]
    found = {device: torch.cuda.get_device_properties(device) for device in sorted(devices, key=str)}
    return [f"{device}: {[getattr(gpu, name) for name in _PROPERTIES]}" for device, gpu in found.items()]


def _groups(step: StepGraph) -> list[tuple[Any, ...]]:
    """The process groups of a graph with the facts that passes write into it: the ranks per host and, with the knob
    ``even_batches``, the group's size and this rank."""
    written = {
        name: (len(torch_adapter.group_ranks(group)), torch_adapter.group_rank(group))
        for name, group in step.groups.items()
        if knobs.even_batches
    }
    return [(name, group, ranks_on_a_host(group), written.get(name)) for name, group in sorted(step.groups.items())]


def _symbols(step: StepGraph) -> list[str]:
    """Ranges and assumptions of the symbolic sizes of a graph. They decide how kernels index and which sizes are
    treated as equal."""
    symbols = symbols_of(node.meta.get("val") for node in step.graph.nodes)
    if not symbols:
        return []
    shape_env = torch_adapter.shape_env_of(torch_adapter.fake_mode_of(step.graph))
    known = [f"{symbol}: {torch_adapter.known_of(shape_env, symbol)}" for symbol in symbols]
    return sorted([*known, *map(str, torch_adapter.assumptions(shape_env))])
