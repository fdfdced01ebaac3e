"""Compiled graphs on disk. A second process that compiles the same step reads the graph of kernels from the cache and
runs no pass, lowering, fusion or code generation.

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
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft import cache_folder, knobs, torch_adapter, triton_adapter
from weft.capture.graph import StepGraph
from weft.errors import MemoryLimitUnreachable, TritonMissing
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
T = TypeVar("T")


def cached(step: StepGraph, make: Callable[[StepGraph], StepGraph], variant: str = "") -> StepGraph:
    """``make(step)``, or the graph that an earlier call returned, in this process or in another.

    A graph that cannot be serialized is compiled in each process.

    Args:
        make: compiles the graph. It must not change ``step``, which is a part of the key.
        variant: a part of the key that tells this ``make`` from others.

    """
    started = time.process_time()
    if not cache_folder.usable():
        return make(step)
    try:
        path = _path(step, variant)
    except NotPortable as reason:
        log.info("compiled in this process only: the graph holds %s", reason)
        return make(step)
    compiled = _read(path, step)
    if compiled is not None:
        log.info("compiled before: read in %.2f s (CPU) from %s", time.process_time() - started, path)
    else:
        compiled = make(step)
        try:
            cache_folder.write_checked(path, serialize.dump(compiled, step).encode())
        except NotPortable as reason:
            log.info("compiled in this process only: the graph of kernels holds %s", reason)
    _names[compiled.graph] = path.name
    return compiled


# File names of the graphs that :func:`cached` returned; they hash everything that the graph depends on.
_names: weakref.WeakKeyDictionary[torch.fx.Graph, str] = weakref.WeakKeyDictionary()


def note_part(part: StepGraph, compiled: StepGraph) -> None:
    """Have :func:`remembered` serve a graph that follows from one that :func:`cached` returned."""
    if compiled.graph in _names:
        _names[part.graph] = f"{_names[compiled.graph]} in part"


def remembered(compiled: StepGraph, about: str, make: Callable[[], str], read: Callable[[str], T]) -> T:
    """``read(make())``, or ``read`` of the text that an earlier call made for the same graph. Used for schedules.

    Args:
        compiled: a graph that :func:`cached` returned, or a part of one (:func:`note_part`). For other graphs nothing
            is stored.
        about: everything that the text depends on beside the captured graph and the knobs.
        make: computes the text.
        read: what the text means. A text from a file that it refuses, by any error of Python's or MalformedGraph or
            MalformedSchedule, is made again.
    """
    if compiled.graph not in _names:
        return read(make())
    name = hashlib.sha256(json.dumps([_names[compiled.graph], about]).encode()).hexdigest()
    path = cache_folder.entry_path("schedules", name)
    known = cache_folder.read_checked(path)
    if known is not None:
        try:
            return read(known.decode())
        except (MemoryError, MemoryLimitUnreachable):
            raise  # the latter is what a text may say
        except Exception as error:  # noqa: BLE001 - its checksum holds, but nobody knows who wrote it
            _tell_of_damage(path, error)
    said = make()
    cache_folder.write_checked(path, said.encode())
    return read(said)


def _read(path: Path, step: StepGraph) -> StepGraph | None:
    """The verified graph in ``path`` with the line numbers of ``step``; None if it is missing or invalid."""
    content = cache_folder.read_checked(path)
    if content is None:
        return None
    try:
        found = serialize.load(content.decode(), step).check()
        # Triton's interpreter executes kernel text as Python, so text from a file must not do anything but compute.
        for source in {n.target.generated.source for n in found.graph.nodes if isinstance(n.target, KernelCall)}:
            check_kernel(source)
        return found
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a checksum that holds says nothing about who computed it
        _tell_of_damage(path, error)
        return None


def _tell_of_damage(path: Path, error: Exception) -> None:
    log.warning("%s cannot be read (%s: %s); it will be made again", path, type(error).__name__, error)


def _path(step: StepGraph, variant: str = "") -> Path:
    """The file of a captured step: everything that the compiled graph depends on, hashed. A missing part would let a
    step run a graph that was compiled for another one."""
    entries = [repr(entry) for entry in (*step.inputs, *step.outputs)]
    # True division of integers gives the default dtype, also inside decompositions.
    dtype = str(torch.get_default_dtype())
    key = [variant, environment(), dtype, _devices(step), _symbols(step), entries, _groups(step), serialize.dump(step)]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cache_folder.entry_path("graphs", name)


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
