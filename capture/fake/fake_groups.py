"""The process groups, meshes and data loaders that a training script finds inside a fake world.

The process group of a fake world has the requested number of ranks and communicates with nobody. Functions that create
or end process groups, or that send Python objects, are replaced. Meshes compute ranks and need real numbers, so their
bookkeeping runs on real tensors. Data loaders load real batches in this process; the batches are then made fake.
"""

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
from weft.thread_patches import Patches, present, wrap_callable

log = logging.getLogger(__name__)


def patch_groups(patches: Patches, world_size: int) -> None:
    """Register replacements of all functions that create, end or inspect a process group."""
    patches.function(dist, "init_process_group", _init_process_group(world_size))
    patches.function(dist, "destroy_process_group", lambda group=None: None)
    patches.function(dist, "new_group", _new_group(present(dist, "new_group")))
    patches.function(dist, "all_gather_object", _all_gather_object)
    patches.function(dist, "broadcast_object_list", lambda object_list, *args, **kwargs: None)
    patches.function(dist, "init_device_mesh", with_real_tensors(present(dist, "init_device_mesh")))
    for name, member in list(vars(DeviceMesh).items()):
        if name == "__init__":
            patches.attribute(DeviceMesh, name, with_real_tensors(_mesh_init(present(DeviceMesh, "__init__"))))
        else:
            wrapped = wrap_callable(member, with_real_tensors)
            if wrapped is not member:
                patches.attribute(DeviceMesh, name, wrapped)


def patch_data_loader(patches: Patches, fake_mode: FakeTensorMode) -> None:
    """Register a replacement of `DataLoader.__iter__` that loads real batches in this process and yields fake ones."""
    patches.attribute(DataLoader, "__iter__", _loader_iter(present(DataLoader, "__iter__"), fake_mode))


def with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with real tensors for those that it creates: bookkeeping needs their values."""

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
    """`new_group` without its backend: a fake world has only one."""
    signature = inspect.signature(original)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return original(**{k: v for k, v in given.items() if k not in ("backend", "pg_options", "device_id")})

    return new_group


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """All ranks contribute the object of this rank. For the same reason a broadcast leaves its list as it is."""
    object_list[:] = [obj] * len(object_list)


def _mesh_init(original: Callable[..., None]) -> Callable[..., None]:
    """A mesh of cuda devices becomes a mesh of CPU devices, because all tensors are on the CPU."""

    def init(self: DeviceMesh, device_type: str, mesh: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(mesh, FakeTensor):
            raise errors.MeshOfFakeTensor(tuple(mesh.shape))
        if isinstance(kwargs.get("_rank_map"), FakeTensor):
            # Called through a reference to init_device_mesh that a local variable has held since before this world.
            kwargs["_rank_map"] = torch.arange(kwargs["_rank_map"].numel())
        original(self, "cpu" if device_type == "cuda" else device_type, mesh, *args, **kwargs)

    return init


def _loader_iter(original: Callable[..., Iterator[Any]], fake_mode: FakeTensorMode) -> Callable[..., Iterator[Any]]:
    """Samplers and datasets need values (`randperm(n).tolist()`), so batches are loaded with real tensors and made fake
    afterwards. There are no worker processes: they could not send fakes of data that was made inside the world."""
    in_process = {"num_workers": 0, "pin_memory": False, "timeout": 0}

    def as_fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        return fake_mode.from_tensor(leaf, static_shapes=True)

    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        before = {name: getattr(loader, name) for name in in_process}
        vars(loader).update(in_process)
        try:
            with torch_adapter.real_tensors():
                batches = original(loader)
        finally:
            vars(loader).update(before)
        fetch = with_real_tensors(functools.partial(next, batches, batches))
        while (batch := fetch()) is not batches:
            yield torch_adapter.tree_map(as_fake, batch)

    return iterate
