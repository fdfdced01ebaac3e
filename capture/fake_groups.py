"""What a script that trains on many ranks finds inside a fake world: process groups, meshes, and data
loading."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from weft import errors, torch_adapter
from weft.capture.swapping import Swaps, wrap_callable

log = logging.getLogger(__name__)


def swap_groups(swaps: Swaps, world_size: int) -> None:
    """Register stand-ins for everything that would make, end or look into a process group."""
    swaps.function(dist, "init_process_group", _init_process_group(world_size))
    swaps.function(dist, "destroy_process_group", lambda group=None: None)
    swaps.function(dist, "new_group", _new_group(dist.new_group))
    swaps.function(dist, "all_gather_object", _all_gather_object)
    swaps.function(dist, "broadcast_object_list", lambda object_list, *args, **kwargs: None)
    swaps.function(dist, "init_device_mesh", for_real(dist.init_device_mesh))
    for name, member in list(vars(DeviceMesh).items()):
        if name == "__init__":
            swaps.attribute(DeviceMesh, name, for_real(_mesh_init(DeviceMesh.__init__)))
        else:
            wrapped = wrap_callable(member, for_real)
            if wrapped is not member:
                swaps.attribute(DeviceMesh, name, wrapped)


def swap_data(swaps: Swaps, fake_mode: FakeTensorMode) -> None:
    """Register a DataLoader that loads for real, in this process, and gives fakes."""
    swaps.attribute(DataLoader, "__iter__", _loader_iter(DataLoader.__iter__, fake_mode))


def for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the tensors it makes real ones: bookkeeping whose values matter."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch_adapter.real_tensors():
            return function(*args, **kwargs)

    return run


def _init_process_group(world_size: int) -> Callable[..., None]:
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("world_size", -1)
        if asked not in (-1, None, world_size):
            log.warning("init_process_group(world_size=%s) is ignored in a world of %s", asked, world_size)

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """`new_group` whatever the backend: this world has only one."""
    signature = inspect.signature(original)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return original(**{k: v for k, v in given.items() if k not in ("backend", "pg_options", "device_id")})

    return new_group


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Every rank says what this one says; for the same reason a broadcast leaves its list as it is."""
    object_list[:] = [obj] * len(object_list)


def _mesh_init(original: Callable[..., None]) -> Callable[..., None]:
    """A mesh of cuda devices is one of CPU devices here, since that is where all tensors are."""

    def init(self: DeviceMesh, device_type: str, mesh: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(mesh, FakeTensor):
            raise errors.MeshOfFakeTensor(tuple(mesh.shape))
        if isinstance(kwargs.get("_rank_map"), FakeTensor):
            # A reference to init_device_mesh from before this world, one in a function's local variables, made it.
            kwargs["_rank_map"] = torch.arange(kwargs["_rank_map"].numel())
        original(self, "cpu" if device_type == "cuda" else device_type, mesh, *args, **kwargs)

    return init


def _loader_iter(original: Callable[..., Iterator[Any]], fake_mode: FakeTensorMode) -> Callable[..., Iterator[Any]]:
    """Samplers and datasets work with values (`randperm(n).tolist()`), so batches are loaded for real; only
    then are they made fake. No worker processes: they could not send fakes of data that was made inside the
    world."""
    here = {"num_workers": 0, "pin_memory": False, "timeout": 0}

    def as_fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        return fake_mode.from_tensor(leaf, static_shapes=True)

    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        before = {name: getattr(loader, name) for name in here}
        vars(loader).update(here)
        try:
            with torch_adapter.real_tensors():
                batches = original(loader)
        finally:
            vars(loader).update(before)
        fetch = for_real(functools.partial(next, batches, batches))
        while (batch := fetch()) is not batches:
            yield torch_adapter.tree_map(as_fake, batch)

    return iterate
