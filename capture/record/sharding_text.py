"""How an input of a graph is sharded, as text."""

from __future__ import annotations

from weft import torch_adapter
from weft.capture.state.containers import StatePlace


def sharding_text(place: StatePlace, axes: dict[int, str]) -> str:
    """Global shape, dtype, mesh and placements of a DTensor, the same text on every rank; "" for another tensor.

    ``axes`` are the texts of the meshes so far, by their ids; filled here.
    """
    tensor = place.outer() if place.inner else None
    if tensor is None or not torch_adapter.is_dtensor(tensor):
        return ""
    mesh = tensor.device_mesh
    if id(mesh) not in axes:
        axes[id(mesh)] = str(dict(zip(mesh.mesh_dim_names or range(mesh.ndim), mesh.shape, strict=True)))
    return f"{list(tensor.shape)} {tensor.dtype} over {axes[id(mesh)]} as {list(tensor.placements)}"
