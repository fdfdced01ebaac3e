"""Whole weights as safetensors files, laid out as the Hugging Face hub lays them out.

    model.safetensors                                      a model that fits one file
    model-00001-of-00002.safetensors, ...                  a larger one, with
    model.safetensors.index.json                           the file of each tensor

``from_pretrained`` of transformers reads such a folder, next to the model's config.json.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from weft import torch_adapter
from weft.errors import CannotCheckpoint, CheckpointMismatch
from weft.short_tracebacks import shortens_tracebacks

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@shortens_tracebacks
def save_safetensors(model: nn.Module, folder: str | os.PathLike[str], *, max_file_gib: float = 5.0) -> None:
    """Write the whole weights of a model to ``folder``. Collective: all ranks call it, rank 0 writes.

    Tensors are gathered one after the other, so that rank 0 holds one file's worth on its CPU.

    Args:
        model: whose parameters and persistent buffers are written, sharded or not, under their names in its
            ``state_dict()``.
        max_file_gib: the most that one file holds, in GiB, except where one tensor alone is larger.

    Raises:
        CannotCheckpoint: safetensors is not installed.
        OSError: the folder cannot be written.
    """
    _library()
    from safetensors.torch import save_file

    folder = Path(folder)
    state: dict[str, Any] = dict(get_model_state_dict(model))
    files = _files(state, int(max_file_gib * 2**30))
    writes = torch_adapter.world_size() == 1 or dist.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        held: dict[str, torch.Tensor] = {}
        for name in names:
            whole = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
            if writes:
                held[name] = whole.detach().to("cpu", copy=True).contiguous()
            del whole
        if writes:
            # Under another name first: a reader must not find half of a file.
            temporary = folder / f"{file}.tmp"
            save_file(held, temporary, metadata={"format": "pt"})
            os.replace(temporary, folder / file)
    if writes and len(files) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: file for file, names in files.items() for n in names},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


@shortens_tracebacks
def load_safetensors(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load whole weights into a model, each rank its shards. Files are mapped, so no rank holds all of them.

    Args:
        model: sharded or not; each entry of its ``state_dict()`` must be in the files. Tied weights may be there once.
        folder: with model.safetensors, or with several files and their index.

    Raises:
        CheckpointMismatch: the files lack a tensor of the model, or have it in another shape or dtype.
        CannotCheckpoint: safetensors is not installed.
        FileNotFoundError: the folder has no such files.
    """
    _library()
    from safetensors import safe_open

    folder = Path(folder)
    state: dict[str, Any] = dict(get_model_state_dict(model))
    names_of = _names_by_file(folder)
    there = {name for names in names_of.values() for name in names}
    missing = [name for name in state if name not in there and not _tied(name, state, there)]
    other: list[str] = []
    loaded: list[tuple[torch.Tensor, torch.Tensor]] = []
    for file, names in names_of.items():
        with safe_open(folder / file, framework="pt") as opened:
            for name in sorted(names & state.keys()):
                mine, value = state[name], opened.get_tensor(name)
                if (mine.shape, mine.dtype) != (value.shape, value.dtype):
                    ours, theirs = (f"{each.dtype} {list(each.shape)}" for each in (mine, value))
                    other.append(f"{name} is {ours} here and {theirs} there")
                else:
                    loaded.append((mine, value))
    if missing or other:
        raise CheckpointMismatch(folder, missing, other)
    with torch.no_grad():
        for mine, value in loaded:
            if isinstance(mine, DTensor):  # every rank has the whole tensor: nothing is sent
                value = distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None)
            mine.copy_(value)


def _files(state: dict[str, Any], limit: int) -> dict[str, list[str]]:
    """Which tensors go to which file, in the order of the state dictionary."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        own = tensor.numel() * tensor.element_size()
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {f"model-{at:05d}-of-{len(groups):05d}.safetensors": group for at, group in enumerate(groups, 1)}


def _names_by_file(folder: Path) -> dict[str, set[str]]:
    from safetensors import safe_open

    if (folder / _INDEX).exists():
        found: dict[str, set[str]] = {}
        for name, file in json.loads((folder / _INDEX).read_text())["weight_map"].items():
            found.setdefault(Path(file).name, set()).add(name)
        return found
    with safe_open(folder / _SINGLE, framework="pt") as opened:
        return {_SINGLE: set(opened.keys())}


def _tied(name: str, state: dict[str, Any], there: set[str]) -> bool:
    """Whether a tensor that the files lack is one that they have under another name."""
    return any(state[other] is state[name] or _same(state[other], state[name]) for other in there & state.keys())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = (each.to_local() if isinstance(each, DTensor) else each for each in (a, b))
    return first.shape == second.shape and 0 != first.data_ptr() == second.data_ptr()


def _library() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise CannotCheckpoint("safetensors", "it is not installed: pip install 'weft[safetensors]'") from error
