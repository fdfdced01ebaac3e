"""Where the shard of a parameter lies in the whole: mesh, placements and shapes, decided at wrap time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from weft import torch_adapter
from weft.distributed.fsdp.mesh import DataParallelMesh
from weft.distributed.ops import shard_length, shard_rows
from weft.errors import InvalidShardPlacement

_NOT_ON_WHOLE_MESH = (
    "with dp_mesh_dims every parameter must be a DTensor on the given mesh. Create it with "
    "torch.distributed.tensor.distribute_tensor, or pass the mesh of the data-parallel ranks without dp_mesh_dims"
)


@dataclass(frozen=True)
class ShardLayout:
    """How one parameter is cut.

    Args:
        data_parallel: the axes of the collectives.
        dim: the dimension that is split over the shard axis; None where nothing is split: 0-dimensional
            parameters, which every rank holds, and meshes that only replicate.
        shape: sizes of the whole on this rank; of a tensor-parallel parameter, of this rank's part of it.
        mesh, placements: of the DTensor that holds the shard.
        global_shape, global_stride: of that DTensor.
        model_parallel: mesh and placements of a parameter that was a DTensor before; forward sees it as such.
        kept_partial: dimensions of the model-parallel mesh on which a gradient may arrive unsummed, because
            the data-parallel reduction sums them.
    """

    data_parallel: DataParallelMesh
    dim: int | None
    shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    global_shape: torch.Size
    global_stride: tuple[int, ...]
    model_parallel: tuple[DeviceMesh, tuple[Placement, ...]] | None = None
    kept_partial: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Size of a padded shard in `dim`."""
        return shard_rows(self.shape[self.dim or 0], self.data_parallel.shard_size)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor of `shape`, in memory of its own."""
        if self.dim is None:
            return whole.clone()
        parts, rank = self.data_parallel.shard_size, self.data_parallel.shard_rank
        length = shard_length(whole.shape[self.dim], parts, rank)
        start = min(rank * self.rows, whole.shape[self.dim])
        return whole.narrow(self.dim, start, length).clone(memory_format=torch.contiguous_format)

    def wrap(self, shard: torch.Tensor) -> DTensor:
        """The DTensor that holds this rank's shard, on the device where the shard is."""
        without_data = DTensor.from_local(  # it would move a shard on the host to the mesh's device
            torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device="meta"),
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.global_shape,
            stride=self.global_stride,
        )
        return torch_adapter.dtensor_with(shard, torch_adapter.dtensor_spec(without_data))

    def wrap_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """What forward sees of a gathered tensor: itself, or the DTensor that it was before sharding."""
        if self.model_parallel is None:
            return whole
        mesh, placements = self.model_parallel
        return DTensor.from_local(
            whole, mesh, placements, run_check=False, shape=self.global_shape, stride=self.global_stride
        )

    @property
    def may_reduce_outside(self) -> bool:
        """Whether `unwrap_gradient` may have to sum a gradient over a dimension that is not data-parallel."""
        placements = self.model_parallel[1] if self.model_parallel is not None else ()
        return any(isinstance(p, Replicate) for i, p in enumerate(placements) if i not in self.kept_partial)

    def unwrap_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The local part of a gradient of what `wrap_whole` returned."""
        if self.model_parallel is None or not isinstance(grad, DTensor):
            return grad
        mesh, wanted = self.model_parallel
        placements = [grad.placements[i] if i in self.kept_partial else p for i, p in enumerate(wanted)]
        return torch_adapter.local_tensor(grad.redistribute(mesh, placements))


def layout_of(param: torch.Tensor, placement: Shard | None, data_parallel: DataParallelMesh, path: str) -> ShardLayout:
    """The layout of `param`, split in the dimension of `placement` (None: 0).

    Raises InvalidShardPlacement where there is no such dimension, and, with `dp_mesh_dims`, where the
    parameter is not a DTensor on that mesh that is replicated over the data-parallel dimensions.
    """
    shape = torch_adapter.local_tensor(param).shape if isinstance(param, DTensor) else param.shape
    dim = _shard_dim(shape, placement, path)
    if data_parallel.shard is None or not shape:
        dim = None
    if data_parallel.whole is not None:
        return _on_whole_mesh(param, dim, data_parallel, path)
    shard: Placement = Replicate() if dim is None else Shard(dim)
    if isinstance(param, DTensor):
        spec = torch_adapter.dtensor_spec(param)
        if dim is not None and (split := spec.num_shards_map[dim]) > 1:
            shard = torch_adapter.strided_shard(dim, split)
        mesh = torch_adapter.joined_mesh([data_parallel.mesh, param.device_mesh])
        placements = (*_data_placements(data_parallel, shard), *param.placements)
        before = (param.device_mesh, tuple(param.placements))
        return ShardLayout(data_parallel, dim, shape, mesh, placements, param.shape, param.stride(), before)
    placements = _data_placements(data_parallel, shard)
    return ShardLayout(data_parallel, dim, shape, data_parallel.mesh, placements, param.shape, param.stride())


def _shard_dim(shape: torch.Size, placement: Any, path: str) -> int:
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        what = f"shard_placement_fn returned {placement!r}. Make it return Shard(dim) or None"
        raise InvalidShardPlacement(path, what)
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not shape:
        return 0
    if not 0 <= dim < len(shape):
        what = f"shard_placement_fn returned {placement!r}, and its shape is {tuple(shape)}. Return a dimension of it"
        raise InvalidShardPlacement(path, what)
    return dim


def _data_placements(data_parallel: DataParallelMesh, shard: Placement) -> tuple[Placement, ...]:
    replicate = () if data_parallel.replicate is None else (Replicate(),)
    return replicate if data_parallel.shard is None else (*replicate, shard)


def _on_whole_mesh(param: torch.Tensor, dim: int | None, data_parallel: DataParallelMesh, path: str) -> ShardLayout:
    """A parameter that is a DTensor on the mesh of every kind of parallelism (`dp_mesh_dims`)."""
    whole = data_parallel.whole
    assert whole is not None
    if not isinstance(param, DTensor) or param.device_mesh != whole:
        raise InvalidShardPlacement(path, _NOT_ON_WHOLE_MESH)
    names = whole.mesh_dim_names or ()
    data = [names.index(name) for name in (*data_parallel.shard_names, *data_parallel.replicate_names)]
    before = tuple(param.placements)
    if any(not before[i].is_replicate() for i in data):
        raise InvalidShardPlacement(path, _not_replicated(before, [names[i] for i in data]))
    mesh, placements = _split_whole(whole, before, dim, data_parallel)
    shape = torch_adapter.local_tensor(param).shape
    return ShardLayout(
        data_parallel, dim, shape, mesh, placements, param.shape, param.stride(), (whole, before), tuple(data)
    )


def _not_replicated(placements: tuple[Placement, ...], names: list[str]) -> str:
    return f"its placements {placements} must be Replicate() on {names}. Create it with such placements"


def _split_whole(
    whole: DeviceMesh, before: tuple[Placement, ...], dim: int | None, data_parallel: DataParallelMesh
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of the shard: several shard dimensions become the one flattened axis."""
    names = whole.mesh_dim_names or ()
    first = min((names.index(name) for name in data_parallel.shard_names), default=-1)
    shard: Placement = Replicate()
    if dim is not None:
        inner = [i for i in range(first + 1, whole.ndim) if before[i].is_shard(dim)]
        split = 1
        for i in inner:
            split *= whole.size(i)
        shard = torch_adapter.strided_shard(dim, split) if split > 1 else Shard(dim)
    if len(data_parallel.shard_names) <= 1:
        return whole, tuple(shard if i == first else p for i, p in enumerate(before))
    meshes, placements = [], []
    for i, name in enumerate(names):
        if i == first:
            meshes.append(data_parallel.mesh)
            placements += _data_placements(data_parallel, shard)
        elif name not in (*data_parallel.shard_names, *data_parallel.replicate_names):
            meshes.append(whole[name])
            placements.append(before[i])
    return torch_adapter.joined_mesh(meshes), tuple(placements)
