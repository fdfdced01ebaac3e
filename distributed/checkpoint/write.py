"""Write a checkpoint: torch DCP files, their hashes, the manifest, and the name that makes it count."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from weft.distributed.checkpoint import manifest
from weft.distributed.checkpoint.dcp import INDEX, items_by_file, read_index, tensors_of
from weft.distributed.checkpoint.exchange import Ranks
from weft.distributed.checkpoint.folder import CheckpointFolder
from weft.distributed.checkpoint.manifest import Manifest, StoredFile, StoredItem
from weft.errors import CheckpointNotSaved


def write_checkpoint(
    folder: CheckpointFolder, step: int, state: dict[str, Any], ranks: Ranks, keep_last: int, version: str
) -> None:
    """Write ``state`` as the checkpoint of ``step`` and remove older ones. Collective.

    Every rank writes its shards and hashes its own files. Rank 0 writes the manifest, renames the folder, and only then
    removes all but the ``keep_last`` newest checkpoints.

    Args:
        state: nested dictionaries of tensors on the CPU, DTensors and plain values; nobody changes them meanwhile.
        version: of weft, for the manifest.

    Raises:
        CheckpointNotSaved: on all ranks, if one of them could not write; what was there before is still there.
    """
    outcome = _first_failure(ranks, step, lambda: folder.begin(step) if ranks.rank == 0 else None)
    if outcome:
        raise CheckpointNotSaved(step, folder.path, outcome)
    partial = folder.partial(step)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns of processes that are alone
            torch_dcp.save(
                state,
                storage_writer=FileSystemWriter(partial, overwrite=False),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except torch_dcp.CheckpointException as error:  # a BaseException, raised on all ranks alike
        reasons = "; ".join(f"rank {rank}: {fault[0]}" for rank, fault in sorted(error.failures.items()))
        raise CheckpointNotSaved(step, folder.path, reasons) from error

    # What is hashed here is read back from the file system, not what was meant to be written.
    names = sorted(path.name for path in partial.iterdir() if path.name.startswith(f"__{ranks.rank}_"))
    names += [INDEX] if ranks.rank == 0 else []
    own: dict[str, Any] = {}

    def hash_own() -> None:
        items = items_by_file(read_index(partial, {path.name for path in partial.iterdir()}))
        for name in names:
            own[name] = asdict(manifest.describe(partial / name, items.get(name, ())))

    if outcome := _first_failure(ranks, step, hash_own):
        raise CheckpointNotSaved(step, folder.path, outcome)
    described = [json.loads(text) for text in ranks.gather(json.dumps(own))]
    files = {name: _stored_file(file) for part in described for name, file in part.items()}

    def commit() -> None:
        if ranks.rank == 0:
            tensors = tensors_of(read_index(partial, files))
            versions = {"torch": torch.__version__, "weft": version}
            manifest.write(partial, Manifest(step, ranks.world_size, versions, files, tensors))
            folder.commit(step)
            folder.keep_last(keep_last)

    if outcome := _first_failure(ranks, step, commit):
        raise CheckpointNotSaved(step, folder.path, outcome)


def _stored_file(content: dict[str, Any]) -> StoredFile:
    return StoredFile(content["size"], content["sha256"], tuple(StoredItem(**item) for item in content["items"]))


def _first_failure(ranks: Ranks, step: int, action: Any) -> str:
    """Run ``action`` on each rank; the failure of the lowest rank that has one, on all ranks, or an empty text."""
    try:
        action()
        text = ""
    except Exception as error:  # noqa: BLE001 - all ranks must learn of it
        text = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    return next(filter(None, ranks.gather(text)), "")
