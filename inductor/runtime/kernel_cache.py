"""Compiled kernels on disk, by content, for many processes at once.

One file holds one kernel: a line with the SHA-256 of the rest, a line of JSON, the cubin. A file appears whole, by a
rename; whatever does not match its checksum is as good as absent. Nothing of a file is ever executed by the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from weft import errors, knobs, triton_adapter
from weft.inductor.runtime.kernel_source import KernelSource

log = logging.getLogger(__name__)

# Changes with the meaning of an entry or with how kernels are compiled.
FORMAT = 2


@dataclass(frozen=True)
class Resources:
    """What one kernel needs: registers a thread, bytes of spills (local memory) a thread, bytes of shared memory a
    program, and how many of its load instructions move 16 bytes."""

    registers: int
    spills: int
    shared: int
    vector_loads: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel. `symbol` is its name in `cubin`."""

    symbol: str
    cubin: bytes
    num_warps: int
    resources: Resources


def directory() -> Path:
    """Where weft keeps what it may make again: knobs.cache_dir."""
    return Path(knobs.cache_dir).expanduser()


def path_of(source: KernelSource, arch: int) -> Path:
    """The file of `source` compiled for sm_<arch> by the triton that is installed."""
    key = json.dumps([FORMAT, triton_adapter.version(), arch, source.content])
    name = hashlib.sha256(key.encode()).hexdigest()
    return directory() / "kernels" / name[:2] / name


def read(path: Path) -> Binary | None:
    """The kernel in `path`; None where there is none, or where the file is not as it was written.

    Raises errors.CacheUnusable.
    """
    rest = read_checked(path)
    if rest is None:
        return None
    header, _, cubin = rest.partition(b"\n")
    try:
        fields = json.loads(header)
        return Binary(fields["symbol"], cubin, fields["num_warps"], Resources(**fields["resources"]))
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%s); the kernel will be compiled again", path, error)
        return None


def write(path: Path, binary: Binary) -> None:
    """Put a kernel into `path`, over whatever is there. Raises errors.CacheUnusable."""
    fields = {"symbol": binary.symbol, "num_warps": binary.num_warps, "resources": asdict(binary.resources)}
    rest = json.dumps(fields).encode() + b"\n" + binary.cubin
    write_checked(path, rest)


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` put into a file; None where there is none, or where the file is not as it was written.

    Raises errors.CacheUnusable.
    """
    content = read_bytes(path)
    if content is None:
        return None
    checksum, _, rest = content.partition(b"\n")
    if checksum == _checksum(path, rest):
        return rest
    log.warning("%s is damaged (its checksum is another); it will be made again", path)
    return None


def write_checked(path: Path, content: bytes) -> None:
    """Put `content` under its checksum into `path`, over whatever is there. Raises errors.CacheUnusable."""
    write_atomically(path, _checksum(path, content) + b"\n" + content)


def read_bytes(path: Path) -> bytes | None:
    """What is in a file of the cache; None where there is no such file. Raises errors.CacheUnusable."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.CacheUnusable(str(directory()), error) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Make `path` hold `content`: a reader sees the file as it was or as it will be. Raises errors.CacheUnusable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise errors.CacheUnusable(str(directory()), error) from error


def _checksum(path: Path, rest: bytes) -> bytes:
    # With the name, so that a file that was copied to another name is not taken for that kernel.
    return hashlib.sha256(path.name.encode() + b"\n" + rest).hexdigest().encode()
