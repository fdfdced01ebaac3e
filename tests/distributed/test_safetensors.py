"""Whole weights as safetensors files: written by sharded models, read by the library, and back by other world sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from weft.errors import CheckpointMismatch

safetensors = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    """A head that shares the embedding, a buffer, and sizes that no number of ranks divides."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6).to(torch.bfloat16))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((3,), float(seed)))


def whole(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in Tied(seed).state_dict().items()}


def save(rank: int, world: int, folder: str, gib: float) -> None:
    model = Tied(1)
    mesh = init_device_mesh("cpu", (world,))
    weft.fully_shard(model.inner[0], mesh=mesh)
    weft.fully_shard(model, mesh=mesh)
    weft.save_safetensors(model, folder, max_file_gib=gib)


def load(rank: int, world: int, folder: str) -> Any:
    model = Tied(2)
    weft.fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    weft.load_safetensors(model, folder)
    return {n: getattr(v, "full_tensor", lambda v=v: v)().detach().clone() for n, v in model.state_dict().items()}


@pytest.mark.gloo
@pytest.mark.parametrize("gib", [5.0, 250 / 2**30], ids=["one file", "several files"])
def test_sharded_weights_are_written_whole_and_read_by_another_number_of_ranks(gib: float, tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), gib)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) is (gib == 5.0)
    read = {name: value for file in files for name, value in safetensors.load_file(file).items()}
    wanted = whole(1)
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], wanted[name]) and read[name].dtype == wanted[name].dtype for name in wanted)
    if gib < 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert all(name in safetensors.load_file(tmp_path / file) for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in wanted.values())
    for found in run_ranks(load, 3, str(tmp_path)):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_tied_weights_may_be_in_the_files_once_and_other_models_are_refused(tmp_path: Path) -> None:
    values = whole(1)
    del values["head.weight"]
    safetensors.save_file(values, tmp_path / "model.safetensors")
    model = Tied(2)
    weft.load_safetensors(model, tmp_path)
    assert torch.equal(model.head.weight, whole(1)["head.weight"])
    model.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(CheckpointMismatch, match=r"it has no extra\.weight"):
        weft.load_safetensors(model, tmp_path)
    safetensors.save_file({**values, "scale": torch.zeros(4)}, tmp_path / "model.safetensors")
    model = Tied(2)
    with pytest.raises(CheckpointMismatch, match=r"scale is torch\.float32 \[3\] here and torch\.float32 \[4\] there"):
        weft.load_safetensors(model, tmp_path)
    assert torch.equal(model.scale, torch.full((3,), 2.0))  # nothing of a model that is refused is loaded
    with pytest.raises(FileNotFoundError):
        weft.load_safetensors(model, tmp_path / "absent")
