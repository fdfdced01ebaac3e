"""The roofline of a kernel: the bytes that it must move, and the GPU whose copy bandwidth bounds it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from weft.errors import UnknownOption
from weft.inductor.cost.cluster import Gpu, load_cluster, shipped_clusters, shipped_gpu
from weft.inductor.cost.measure_gpu import measure_gpu
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Buffer, Index, Nest, is_position


def gpu_called(name: str) -> Gpu:
    """The GPU of a shipped cluster description whose name occurs in torch's device name ("NVIDIA H200"), or the one of
    a description that :func:`~weft.inductor.cost.cluster.load_cluster` finds by its name or path ("h200x8").

    Raises:
        UnknownOption: no description has such a GPU.
        InvalidCluster, NoClusterFile: see ``load_cluster``.
    """
    gpu = shipped_gpu(name)
    if gpu is not None:
        return gpu
    try:
        return load_cluster(name).gpu
    except UnknownOption as error:
        known = list(dict.fromkeys(cluster.gpu.name for cluster in shipped_clusters()))
        raise UnknownOption("gpu", name, [*known, "the name or path of a cluster"]) from error


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of ``device``. If no shipped description has it, it is measured, which takes about ten seconds."""
    return shipped_gpu(torch.cuda.get_device_name(device)) or measure_gpu(device)


def bytes_moved(nest: Nest, buffers: Mapping[str, Buffer]) -> int:
    """Bytes that a kernel of ``nest`` reads and writes if it accesses every element once.

    A gather counts one element per access, at most the whole buffer. Symbols have the value of :func:`size_hint`.
    """
    moved: dict[tuple[str, str], dict[Index, None]] = {}
    for load in nest.reads:
        if not is_position(load):
            moved.setdefault((load.buffer, "read"), {})[load.index] = None
    for store in nest.stores:
        moved.setdefault((store.buffer, "write"), {})[store.index] = None
    total = 0.0
    for (name, _), indices in moved.items():
        whole = math.prod(size_hint(size) for size in buffers[name].sizes)
        elements = sum(math.prod(size_hint(nest.sizes[axis]) for axis in index.axes) for index in indices)
        # Several accesses with different indices may read one buffer twice, which caches serve: at most the whole
        # buffer counts.
        total += min(whole, elements) * buffers[name].dtype.itemsize
    return int(total)
