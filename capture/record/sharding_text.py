"""How an input of a graph is sharded: as text, and along which process groups it is replicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft import torch_adapter
from weft.capture.state.containers import StatePlace
from weft.capture.step_interface import Input


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


def with_axes(inputs: Sequence[Input], places: Sequence[StatePlace], groups: Mapping[str, str]) -> list[Input]:
    """``inputs`` with their ``axes``. ``groups`` are torch's names of the groups of the graph, by their names there."""
    names = {torch_name: name for name, torch_name in groups.items()}
    known: dict[int, list[str]] = {}
    return [
        replace(entry, axes=_axes(place.outer(), names, known)) if entry.sharding else entry
        for entry, place in zip(inputs, places, strict=True)
    ]


def _axes(tensor: Any, names: Mapping[str, str], known: dict[int, list[str]]) -> tuple[tuple[str, bool], ...]:
    mesh = tensor.device_mesh
    if id(mesh) not in known:
        groups = [] if mesh.get_coordinate() is None else [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]
        known[id(mesh)] = [names.get(group, "") for group in groups]
    axes = zip(known[id(mesh)], tensor.placements, strict=False)
    return tuple((name, placement.is_replicate()) for name, placement in axes if name)
