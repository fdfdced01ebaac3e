"""torch's distributed checkpoint (DCP), read without executing anything from its files.

DCP pickles its index, ``.metadata``, and each value that is no tensor. Both are read here through closed lists of
types: torch 2.11 to 2.15 read the index with plain ``pickle`` even where tensors are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from weft import torch_adapter
from weft.distributed.checkpoint.manifest import StoredItem
from weft.errors import CheckpointDamaged

INDEX = ".metadata"

_CLASSES: dict[tuple[str, str], Any] = {
    **torch_adapter.checkpoint_index_classes(),
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    # The index names the folder that it was written to. Pure paths touch no file.
    **{
        (module, name): pure
        for module in ("pathlib", "pathlib._local")  # the second is where Python 3.13 has them
        for names, pure in (
            (("PosixPath", "PurePosixPath"), pathlib.PurePosixPath),
            (("WindowsPath", "PureWindowsPath"), pathlib.PureWindowsPath),
        )
        for name in names
    },
}


class _IndexUnpickler(pickle.Unpickler):
    """Makes the classes of an index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = _CLASSES.get((module, name))
        if known is None and module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            known = found
        if known is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not a class of checkpoint indexes")
        return known


def read_index(folder: Path, files: Collection[str]) -> Metadata:
    """The index of the checkpoint in ``folder``.

    Args:
        files: the names of the files that the index may refer to.

    Raises:
        CheckpointDamaged: it is no index, it names a class that no index has, or another file.
    """
    try:
        with open(folder / INDEX, "rb") as file:
            index = _IndexUnpickler(file).load()
    except Exception as error:
        raise CheckpointDamaged(folder, [f"{INDEX} cannot be read: {error}"]) from error
    if not isinstance(index, Metadata):
        raise CheckpointDamaged(folder, [f"{INDEX} holds a {type(index).__name__}, not an index"])
    for info in (index.storage_data or {}).values():
        if info.relative_path not in files:
            raise CheckpointDamaged(folder, [f"{INDEX} refers to {info.relative_path}, no file of the checkpoint"])
    return index


def items_by_file(index: Metadata) -> dict[str, list[StoredItem]]:
    """Which bytes of which file belong to which entry of the state dictionary."""
    found: dict[str, list[StoredItem]] = {}
    for key, info in (index.storage_data or {}).items():
        found.setdefault(info.relative_path, []).append(StoredItem(key.fqn, info.offset, info.length))
    return found


def tensors_of(index: Metadata) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each whole tensor in the checkpoint, by its name."""
    return {
        name: (str(entry.properties.dtype), tuple(entry.size))
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class VerifiedReader(FileSystemReader):
    """Reads a checkpoint whose files were verified, by an index that :func:`read_index` read."""

    def __init__(self, path: str | os.PathLike[str], index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; nothing is unpickled again."""
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index


class PlainValuesPlanner(DefaultLoadPlanner):
    """Loads values that are no tensors with ``weights_only=True``: numbers, strings, and containers of them."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Put one value at its place in the nested dictionaries."""
        *path, last = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict
        for key in path:
            container = container[key]
        container[last] = torch.load(value, weights_only=True)
