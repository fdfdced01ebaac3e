"""Over which ranks a parameter is sharded and over which it is replicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh

from weft import torch_adapter
from weft.distributed.arguments import check_mesh_dim_names, default_mesh
from weft.errors import InvalidMesh
from weft.short_tracebacks import methods_shorten_tracebacks

_TOO_MANY = (
    "it must have one dimension (shard) or two (replicate, shard). Pass a part of it, such as mesh['dp'], or "
    "dp_mesh_dims="
)
_NO_NAMES = "a mesh of two dimensions needs names. Create it with mesh_dim_names=('replicate', 'shard')"


if hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    DataParallelMeshDims = torch.distributed.fsdp.DataParallelMeshDims
else:  # torch 2.11

    @methods_shorten_tracebacks
    @dataclass
    class DataParallelMeshDims:
        """Names of the dimensions of a mesh that are for data: to shard over, and to replicate over."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None


@dataclass(frozen=True)
class Axis:
    """One dimension of a mesh: the name of its process group, its size, and this process's place in it."""

    group_name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh, dim: int) -> Axis:
        """The axis of ``mesh``'s dimension ``dim``, with this rank's position on it."""
        group = mesh.get_group(dim)
        return cls(group.group_name, mesh.size(dim), group.rank())


@dataclass(frozen=True)
class DataParallelMesh:
    """The data-parallel axes of a mesh.

    Args:
        mesh: the mesh of these axes alone, 1-D or 2-D with replication first.
        shard: the axis that splits parameters; None where they are only replicated.
        replicate: the axis over which the shards are repeated (HSDP); None where there is none.
        whole: with `dp_mesh_dims`, the mesh of every kind of parallelism that parameters are DTensors on.
        shard_names, replicate_names: with `dp_mesh_dims`, the dimensions of `whole` that the axes stand for.
    """

    mesh: DeviceMesh
    shard: Axis | None
    replicate: Axis | None
    whole: DeviceMesh | None = None
    shard_names: tuple[str, ...] = ()
    replicate_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: DeviceMesh, shard_dim: int | None, replicate_dim: int | None) -> DataParallelMesh:
        """The axes of a mesh by the numbers of its dimensions; None for an axis that it does not have."""
        shard = None if shard_dim is None else Axis.of(mesh, shard_dim)
        replicate = None if replicate_dim is None else Axis.of(mesh, replicate_dim)
        return cls(mesh, shard, replicate)

    @property
    def shard_size(self) -> int:
        """Number of ranks that a parameter is split over; 1 without a shard axis."""
        return 1 if self.shard is None else self.shard.size

    @property
    def shard_rank(self) -> int:
        """This rank's position on the shard axis; 0 without one."""
        return 0 if self.shard is None else self.shard.rank

    @property
    def size(self) -> int:
        """Number of ranks that average a gradient."""
        return self.shard_size * (1 if self.replicate is None else self.replicate.size)


def data_parallel_mesh(mesh: DeviceMesh | None, dp_mesh_dims: Any) -> DataParallelMesh:
    """What `fully_shard(mesh=, dp_mesh_dims=)` means; None is all ranks, on an accelerator if there is one.

    Raises InvalidMesh for a mesh that is not 1-D or 2-D, a 2-D one without names, and unknown names; NoProcessGroup.
    """
    mesh = mesh or default_mesh("fully_shard")
    if dp_mesh_dims is not None:
        return _named_axes(mesh, dp_mesh_dims)
    if mesh.ndim == 1:
        return DataParallelMesh.of(mesh, 0, None)
    if mesh.ndim != 2:
        raise InvalidMesh("fully_shard", mesh, _TOO_MANY)
    if mesh.mesh_dim_names is None:
        raise InvalidMesh("fully_shard", mesh, _NO_NAMES)
    return DataParallelMesh.of(mesh, 1, 0)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this process that the mesh communicates from."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _named_axes(mesh: DeviceMesh, dims: Any) -> DataParallelMesh:
    shard, replicate = _as_names(dims.shard), _as_names(dims.replicate)
    check_mesh_dim_names("fully_shard", mesh, (*shard, *replicate))
    parts = [torch_adapter.flat_submesh(mesh, names) for names in (replicate, shard) if names]
    joined = parts[0] if len(parts) == 1 else torch_adapter.joined_mesh(parts)
    return DataParallelMesh(
        joined,
        Axis.of(parts[-1], 0) if shard else None,
        Axis.of(parts[0], 0) if replicate else None,
        mesh,
        shard,
        replicate,
    )


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)
