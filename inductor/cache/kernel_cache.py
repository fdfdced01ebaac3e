"""Compiled kernels on disk, addressed by content.

An entry (:mod:`weft.cache_folder`) is a line of JSON and the cubin. The host never executes any of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from weft import cache_folder, triton_adapter
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.graph.serializable import check_fields

log = logging.getLogger(__name__)

# Increase it when the meaning of an entry or the way kernels are compiled changes: old entries are then not found.
FORMAT = 3

_NUM_WARPS = frozenset({1, 2, 4, 8, 16, 32})
_MOST_SHARED = 1 << 20  # bytes of shared memory of one program; no GPU has as many
_ELF = b"\x7fELF"


@dataclass(frozen=True)
class Resources:
    """The resources of one compiled kernel.

    Attributes:
        registers: per thread.
        spills: bytes of local memory per thread.
        shared: bytes of shared memory per program.
        vector_loads: number of load instructions that move 16 bytes.
    """

    registers: int
    spills: int
    shared: int
    vector_loads: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        symbol: its name in ``cubin``.
        cubin: the machine code.
        num_warps: warps per program.
        resources: see :class:`Resources`.
    """

    symbol: str
    cubin: bytes
    num_warps: int
    resources: Resources


def path_of(source: KernelSource, arch: int) -> Path:
    """The file of ``source`` compiled for sm_<arch> by the installed version of Triton."""
    key = json.dumps([FORMAT, triton_adapter.version(), arch, source.content])
    return cache_folder.entry_path("kernels", hashlib.sha256(key.encode()).hexdigest())


def read(path: Path) -> Binary | None:
    """The kernel in ``path``; None if there is none, or what is there is no kernel."""
    rest = cache_folder.read_checked(path)
    if rest is None:
        return None
    try:
        return from_bytes(rest)
    except ValueError as error:
        log.warning("%s is damaged (%s); the kernel will be compiled again", path, error)
        return None


def write(path: Path, binary: Binary) -> None:
    """Write a kernel to ``path`` and replace what is there, where the cache can be written."""
    cache_folder.write_checked(path, to_bytes(binary))


def to_bytes(binary: Binary) -> bytes:
    """A kernel as a line of JSON and the machine code."""
    fields = {"symbol": binary.symbol, "num_warps": binary.num_warps, "resources": asdict(binary.resources)}
    return json.dumps(fields).encode() + b"\n" + binary.cubin


def from_bytes(content: bytes) -> Binary:
    """The kernel that :func:`to_bytes` wrote.

    Raises:
        ValueError: it did not write ``content``.
    """
    header, _, cubin = content.partition(b"\n")
    try:
        fields = json.loads(header)
        resources = Resources(**fields["resources"])
        binary = Binary(fields["symbol"], cubin, fields["num_warps"], resources)
        # TypeError: json gave other kinds of values. RecursionError: lists inside lists.
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    # The driver starts what the header says: a number of another type or size would be read beside the arguments.
    check_fields(Resources, astuple(resources))
    check_fields(Binary, [binary.symbol, binary.cubin, binary.num_warps, binary.resources])
    sizes = (*astuple(resources), binary.num_warps)
    if min(sizes) < 0 or binary.num_warps not in _NUM_WARPS or resources.shared > _MOST_SHARED:
        raise ValueError(f"no launch: {fields}")
    if not cubin.startswith(_ELF) or f".text.{binary.symbol}\0".encode() not in cubin:
        raise ValueError(f"no machine code of {binary.symbol!r}")
    return binary
