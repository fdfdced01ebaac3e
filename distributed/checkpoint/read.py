"""Find the newest checkpoint that is what was written, and load it."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata

from weft.distributed.checkpoint import manifest
from weft.distributed.checkpoint.dcp import PlainValuesPlanner, VerifiedReader, read_index, tensors_of
from weft.distributed.checkpoint.exchange import Ranks
from weft.distributed.checkpoint.folder import CheckpointFolder
from weft.distributed.checkpoint.manifest import Damage, Manifest
from weft.errors import CheckpointDamaged, CheckpointMismatch

log = logging.getLogger(__name__)


def verify(folder: Path, share: int = 0, shares: int = 1) -> tuple[Manifest, list[Damage]]:
    """Compare a checkpoint with its manifest.

    Args:
        share, shares: hash every ``shares``-th file from number ``share`` on; ranks divide the work that way.

    Returns:
        The manifest, and each file that is damaged, missing or not part of the checkpoint.

    Raises:
        CheckpointDamaged: the manifest itself is missing or damaged.
    """
    found = manifest.read(folder)
    names = sorted(found.files)[share::shares]
    faults = [fault for name in names if (fault := manifest.damage(folder, name, found.files[name])) is not None]
    return found, faults + (manifest.unexpected_files(folder, found) if share == 0 else [])


def newest_valid(folder: CheckpointFolder, ranks: Ranks, strict: bool) -> tuple[Path, Manifest] | None:
    """The newest checkpoint without damage, the same on all ranks; None where the folder has none at all. Collective.

    Args:
        strict: raise at the first damaged checkpoint. Otherwise a warning names the damage and the one before is tried.

    Raises:
        CheckpointDamaged: ``strict`` and the newest is damaged, or all are.
    """
    listed = json.loads(ranks.first(json.dumps([str(path) for _, path in folder.newest_first()])))
    newest: CheckpointDamaged | None = None
    for path in map(Path, listed):
        found: Manifest | None = None
        try:
            found, faults = verify(path, ranks.rank, ranks.world_size)
            own = list(map(str, faults))
        except CheckpointDamaged as error:
            own = error.damages
        everything = [json.loads(text) for text in ranks.gather(json.dumps(own))]
        damages = list(dict.fromkeys(damage for part in everything for damage in part))
        if not damages and found is not None:
            return path, found
        error = CheckpointDamaged(path, damages)
        newest = newest or error
        if strict:
            raise error
        log.warning("%s The checkpoint before it is tried.", error)
    if newest is not None:
        raise newest
    return None


def load_into(path: Path, found: Manifest, state: dict[str, Any], ranks: Ranks) -> None:
    """Load the verified checkpoint at ``path`` into ``state``, nested dictionaries of tensors and plain values.

    Tensors are written in place; shards of another world size are put together from the files that hold them.

    Raises:
        CheckpointMismatch: the checkpoint lacks an entry of ``state``, or has it in another dtype or shape.
        CheckpointDamaged: the index is malformed.
    """
    index = read_index(path, found.files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns of processes that are alone
        planner = PlainValuesPlanner()
        planner.set_up_planner(state, index, ranks.rank == 0)
        _compare(path, planner.state_dict, index)
        torch_dcp.load(
            state,
            storage_reader=VerifiedReader(path, index),
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def _compare(path: Path, flat: dict[str, Any], index: Metadata) -> None:
    """Refuse a checkpoint of another model, with the names that differ."""
    stored = tensors_of(index)
    missing = [name for name in flat if name not in index.state_dict_metadata]
    other = [
        f"{name} is {value.dtype} {list(value.shape)} here and {stored[name][0]} {list(stored[name][1])} there"
        for name, value in flat.items()
        if name in stored and (str(value.dtype), tuple(value.shape)) != stored[name]
    ]
    if missing or other:
        raise CheckpointMismatch(path, missing, other)
