"""Write a checkpoint: torch DCP files, their hashes, the manifest, and the name that makes it count.

This runs in the writer processes, one of each rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from weft.distributed.checkpoint import manifest
from weft.distributed.checkpoint.dcp import INDEX, items_by_file, read_index, tensors_of
from weft.distributed.checkpoint.folder import CheckpointFolder
from weft.distributed.checkpoint.manifest import Manifest, StoredFile
from weft.distributed.checkpoint.staging import SharedMemory, Staged, StagedPlanner

# Agree with the other writers: what `mine()` returns goes to the writer of rank 0. There a function makes of the
# answers of all ranks, by rank, what each rank gets back. Where either raises on any rank, this raises on all.
Round = Callable[[Callable[[], Any], Callable[[list[Any]], list[Any]]], Any]

# How many rounds a save has.
ROUNDS = 3


@dataclass(frozen=True)
class SaveRequest:
    """What one rank has written.

    Attributes:
        folder: of the run.
        step: number of training steps done.
        staged: this rank's part of the state.
        rank, world_size: of this rank.
        keep_last: how many checkpoints stay in the folder.
        version: of weft, for the manifest.
        graphs: SHA-256 of the graph of each compiled step, for the manifest.
    """

    folder: str
    step: int
    staged: Staged
    rank: int
    world_size: int
    keep_last: int
    version: str
    graphs: dict[str, str]


def write_checkpoint(request: SaveRequest, memory: SharedMemory, together: Round) -> int:
    """Write the checkpoint and remove older ones. Collective.

    Every rank writes its shards and hashes its own files. Rank 0 writes the manifest, renames the folder, and only then
    removes all but the newest checkpoints.

    Returns:
        The size of its files, of all ranks, in bytes.

    Raises:
        whatever ``together`` raises, on all ranks, if one of them could not write.
    """
    folder = CheckpointFolder(request.folder)
    partial = folder.partial(request.step)
    planner = StagedPlanner(request.staged, memory)
    writer = FileSystemWriter(partial, overwrite=False)
    writer.set_up_storage_writer(request.rank == 0)
    index: list[Metadata] = []

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        folder.begin(request.step)
        chosen, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
        index.append(metadata)
        return writer.prepare_global_plan(chosen)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns of tensors that it may write otherwise one day
        plan = together(lambda: request.staged.plan, plan_all)

    def write_data() -> list[Any]:
        return writer.write_data(planner.finish_plan(plan), planner).value()

    def write_index(results: list[list[Any]]) -> list[None]:
        writer.finish(index[0], results)
        return [None] * request.world_size

    together(write_data, write_index)

    def hash_own() -> dict[str, StoredFile]:
        # What is hashed is read back from the file system, not what was meant to be written.
        names = sorted(path.name for path in partial.iterdir() if path.name.startswith(f"__{request.rank}_"))
        names += [INDEX] if request.rank == 0 else []
        items = items_by_file(read_index(partial, {path.name for path in partial.iterdir()}))
        return {name: manifest.describe(partial / name, items.get(name, ())) for name in names}

    def commit(described: list[dict[str, StoredFile]]) -> list[int]:
        files = {name: file for part in described for name, file in part.items()}
        tensors = tensors_of(read_index(partial, files))
        versions = {"torch": torch.__version__, "weft": request.version}
        manifest.write(partial, Manifest(request.step, request.world_size, versions, files, tensors, request.graphs))
        folder.commit(request.step)
        folder.keep_last(request.keep_last)
        return [sum(file.size for file in files.values())] * request.world_size

    return together(hash_own, commit)
