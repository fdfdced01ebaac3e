"""``weft checkpoint``: look at checkpoints and compare them with what was written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from weft.distributed.checkpoint.folder import CheckpointFolder
from weft.distributed.checkpoint.manifest import Manifest
from weft.distributed.checkpoint.manifest import read as read_manifest
from weft.distributed.checkpoint.read import verify
from weft.errors import CheckpointDamaged


def checkpoint(
    action: Annotated[Literal["verify", "list", "show"], tyro.conf.Positional],
    folder: Annotated[Path, tyro.conf.Positional],
) -> None:
    """Verify, list or show the checkpoints that weft.TrainState wrote. Nothing in them is unpickled.

    Args:
        action: verify compares every file with its SHA-256, names damaged files and the tensors in them, and ends with
            status 1 if there are any. list prints a line for each checkpoint. show prints the tensors of the newest.
        folder: of a training run, or of one checkpoint.
    """
    found = CheckpointFolder(folder).newest_first()
    paths = [path for _, path in found] or [folder]
    if not found and not any(folder.glob("weft.manifest.json*")) and not any(folder.glob("*.distcp")):
        sys.exit(f"weft: there is no checkpoint in {folder}")
    if action == "verify":
        sys.exit(_verify(paths))
    if action == "list":
        _list(paths)
    else:
        _show(paths[0])


def _verify(paths: list[Path]) -> int:
    """Print what is wrong with each checkpoint. Returns the exit status."""
    damaged = 0
    for path in paths:
        try:
            manifest, faults = verify(path)
            lines = [str(fault) for fault in faults]
            size = sum(file.size for file in manifest.files.values())
            good = f"{path}: {len(manifest.files)} files, {_size(size)}, as written"
        except CheckpointDamaged as error:
            lines, good = error.damages, ""
        damaged += bool(lines)
        print(good if not lines else "\n".join(f"{path}: {line}" for line in lines))
    return 1 if damaged else 0


def _list(paths: list[Path]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("step", "ranks", "files", "size", "torch", "folder"):
        table.add_column(title, no_wrap=True, justify="left" if title == "folder" else "right")
    for path in paths:
        try:
            manifest = read_manifest(path)
        except CheckpointDamaged as error:
            table.add_row("?", "?", "?", "?", "?", f"{path.name}: {error.damages[0]}")
            continue
        size = sum(file.size for file in manifest.files.values())
        row = manifest.step, manifest.world_size, len(manifest.files), _size(size), manifest.versions.get("torch", "?")
        table.add_row(*map(str, row), path.name)
    Console().print(table)


def _show(path: Path) -> None:
    manifest: Manifest = read_manifest(path)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
    print(f"{path}: step {manifest.step}, {manifest.world_size} ranks, {versions}")
    for name, digest in sorted(manifest.graphs.items()):
        print(f"  graph of {name}: SHA-256 {digest}")
    for name, (dtype, shape) in manifest.tensors.items():
        print(f"  {name}: {dtype.removeprefix('torch.')}{list(shape)}")


def _size(count: int) -> str:
    """``count`` bytes in the largest unit that leaves a number of 1 or more."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"
