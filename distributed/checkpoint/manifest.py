"""The manifest of a checkpoint: what each of its files holds, with a hash.

torch's checkpoint files carry no checksum, and one flipped bit loads without a word. The manifest is written last, so a
checkpoint that has one is complete. Two hashes serve two ends. SHA-256 of a whole file says whether it is what was
written; it is what ``sha256sum`` prints. CRC-32 of each tensor's bytes says, once a file is known to be damaged, which
tensors are hit.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import CheckpointDamaged

MANIFEST = "weft.manifest.json"
FORMAT = 1

_BLOCK = 1 << 22  # bytes that are read at once


@dataclass(frozen=True)
class StoredItem:
    """Bytes of a file that belong to one tensor, or to one value that is no tensor.

    Attributes:
        name: as in the state dictionary, with dots.
        offset, size: in bytes, from the beginning of the file.
        crc32: of these bytes.
    """

    name: str
    offset: int
    size: int
    crc32: int = 0


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint: its size in bytes, its SHA-256 in hexadecimal, and what it holds, by offset."""

    size: int
    sha256: str
    items: tuple[StoredItem, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: the number of the training step after which it was written.
        world_size: how many ranks wrote it.
        versions: of torch and weft that wrote it.
        files: by name.
        tensors: dtype and shape of each whole tensor, by its name.
        graphs: SHA-256 of the graph of each compiled step, by its name.
    """

    step: int
    world_size: int
    versions: dict[str, str]
    files: dict[str, StoredFile]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    graphs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Damage:
    """A file that is not what was written: what is wrong, and the names of the tensors that it holds there."""

    file: str
    what: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.names:
            return f"{self.file} {self.what}"
        shown = ", ".join(self.names[:10]) + (f" and {len(self.names) - 10} more" if len(self.names) > 10 else "")
        return f"{self.file} {self.what}; it holds {shown}"


def describe(path: Path, items: Iterable[StoredItem]) -> StoredFile:
    """Read a file once and hash it. ``items`` say which bytes belong to what; their hashes are filled in."""
    size, sha256, hashed = _hashes(path, sorted(items, key=lambda item: item.offset))
    return StoredFile(size, sha256, tuple(hashed))


def damage(folder: Path, name: str, expected: StoredFile) -> Damage | None:
    """What is wrong with a file of the checkpoint in ``folder``; None where it is as it was written."""
    everything = tuple(dict.fromkeys(item.name for item in expected.items))
    try:
        size, sha256, items = _hashes(folder / name, expected.items)
    except FileNotFoundError:
        return Damage(name, "is missing", everything)
    except OSError as error:
        return Damage(name, f"cannot be read ({error.strerror})", everything)
    if sha256 == expected.sha256 and size == expected.size:
        return None
    hit = tuple(dict.fromkeys(a.name for a, b in zip(items, expected.items, strict=True) if a != b))
    what = f"has {size} bytes, not {expected.size}" if size != expected.size else "has other bytes than were written"
    return Damage(name, what, hit)


def unexpected_files(folder: Path, manifest: Manifest) -> list[Damage]:
    """Files in ``folder`` that the manifest does not name: nobody knows what a loader would do with them."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return [
        Damage(name, "is not part of the checkpoint")
        for name in found
        if name != MANIFEST and name not in manifest.files
    ]


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into ``folder``: to a temporary name, to the disk, then by rename."""
    body = asdict(manifest)
    text = json.dumps({"weft_manifest": FORMAT, "sha256": _digest(body), "body": body}, indent=1)
    temporary = folder / f"{MANIFEST}.tmp"
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / MANIFEST)
    sync_folder(folder)


def read(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointDamaged: it has none, or its manifest is damaged or of an unknown format.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        body, digest, form = content["body"], content["sha256"], content["weft_manifest"]
    except FileNotFoundError:
        raise CheckpointDamaged(folder, [f"{MANIFEST} is missing: the checkpoint was not finished"]) from None
    except OSError as error:
        raise CheckpointDamaged(folder, [f"{MANIFEST} cannot be read ({error.strerror})"]) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(folder, [f"{MANIFEST} has other bytes than were written"]) from error
    if form != FORMAT:
        raise CheckpointDamaged(folder, [f"{MANIFEST} has format {form}; this weft reads format {FORMAT}"])
    if digest != _digest(body):
        raise CheckpointDamaged(folder, [f"{MANIFEST} has other bytes than were written"])
    try:
        return _decoded(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(folder, [f"{MANIFEST} does not describe a checkpoint"]) from error


def sync_folder(folder: Path) -> None:
    """Make renames and new files in ``folder`` survive a loss of power (POSIX asks for an fsync of the folder)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hashes(path: Path, items: Iterable[StoredItem]) -> tuple[int, str, list[StoredItem]]:
    """Size and SHA-256 of a file, and ``items``, ascending and apart, with the CRC-32 of their bytes.

    An item behind the end of a file that is too short has the CRC-32 of what is there.
    """
    digest, position = hashlib.sha256(), 0
    waiting = list(items)
    sums = [0] * len(waiting)
    first = 0  # the first item that does not end before `position`
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            view, end = memoryview(block), position + len(block)
            while first < len(waiting) and waiting[first].offset + waiting[first].size <= position:
                first += 1
            for at in range(first, len(waiting)):
                start, stop = waiting[at].offset, waiting[at].offset + waiting[at].size
                if start >= end:
                    break
                part = view[max(start - position, 0) : min(stop, end) - position]
                sums[at] = zlib.crc32(part, sums[at])
            position = end
    hashed = [StoredItem(i.name, i.offset, i.size, crc) for i, crc in zip(waiting, sums, strict=True)]
    return position, digest.hexdigest(), hashed


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _decoded(body: dict[str, Any]) -> Manifest:
    files = {
        name: StoredFile(int(file["size"]), str(file["sha256"]), tuple(StoredItem(**item) for item in file["items"]))
        for name, file in body["files"].items()
    }
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise ValueError("a file outside of the checkpoint")
    tensors = {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in body["tensors"].items()}
    versions, graphs = dict(body["versions"]), dict(body.get("graphs", {}))
    return Manifest(int(body["step"]), int(body["world_size"]), versions, files, tensors, graphs)
