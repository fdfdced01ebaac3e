"""How long a kernel takes at least: the bytes it has to move, at the rate at which a GPU copies memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from weft.errors import UnknownOption
from weft.inductor.axes import magnitude
from weft.inductor.codegen.canonical import is_position
from weft.inductor.comm.cluster import Gpu, shipped_clusters, shipped_gpu
from weft.inductor.comm.measure_gpu import measure_gpu
from weft.inductor.ir import Index, Nest
from weft.inductor.lowering.registry import Buffer


def gpu_called(name: str) -> Gpu:
    """The GPU of a shipped description of a cluster whose name occurs in ``name`` (as torch has it: "NVIDIA H200").

    Raises:
        UnknownOption: none does.
    """
    found = shipped_gpu(name)
    if found is None:
        raise UnknownOption("gpu", name, [cluster.gpu.name for cluster in shipped_clusters()])
    return found


def gpu_of(device: torch.device) -> Gpu:
    """The kind of GPU that ``device`` is; one that no shipped description has is measured (about a second)."""
    return shipped_gpu(torch.cuda.get_device_name(device)) or measure_gpu(device)


def bytes_moved(nest: Nest, buffers: Mapping[str, Buffer]) -> int:
    """Bytes that a kernel of ``nest`` reads and writes if it touches every element once; a sum in place is both.

    What a gather may reach counts as often as it is gathered, at most as the whole buffer. Symbols count as in
    :func:`magnitude`.
    """
    moved: dict[tuple[str, str], dict[Index, None]] = {}
    for load in nest.reads:
        if not is_position(load):
            moved.setdefault((load.buffer, "read"), {})[load.index] = None
    for store in nest.stores:
        for kind in ("read", "write") if store.mode == "add" else ("write",):
            moved.setdefault((store.buffer, kind), {})[store.index] = None
    total = 0.0
    for (name, _), indices in moved.items():
        whole = math.prod(magnitude(size) for size in buffers[name].sizes)
        elements = sum(math.prod(magnitude(nest.sizes[axis]) for axis in index.axes) for index in indices)
        total += min(whole, elements) * buffers[name].dtype.itemsize
    return int(total)
