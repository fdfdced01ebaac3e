"""How long a kernel takes at least: the bytes it has to move, at the rate at which a GPU copies memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.errors import UnknownOption
from weft.inductor.axes import magnitude
from weft.inductor.codegen.canonical import is_position
from weft.inductor.ir import Index, Nest
from weft.inductor.lowering.registry import Buffer
from weft.inductor.runtime.kernels import arch_of


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        arch: as triton numbers architectures: 90 for sm_90.
        copy_bandwidth: bytes a second, read and written, of a large copy.
    """

    name: str
    arch: int
    copy_bandwidth: float


# Measured on the H200; for the others nine tenths of what NVIDIA states for the memory, which is what the H200 reaches.
GPUS = [
    Gpu("B200", 100, 7.2e12),
    Gpu("H200", 90, 4.3e12),
    Gpu("H100", 90, 3.0e12),
    Gpu("A100", 80, 1.8e12),
    Gpu("L40S", 89, 0.78e12),
]


def gpu_called(name: str) -> Gpu:
    """The GPU whose name occurs in ``name`` (as torch has it: "NVIDIA H200").

    Raises:
        UnknownOption: none does.
    """
    found = next((gpu for gpu in GPUS if gpu.name in name), None)
    if found is None:
        raise UnknownOption("gpu", name, [gpu.name for gpu in GPUS])
    return found


def gpu_of(device: torch.device) -> Gpu:
    """The kind of GPU that ``device`` is; the bandwidth of one that is not in the table is measured (milliseconds)."""
    name = torch.cuda.get_device_name(device)
    known = next((gpu for gpu in GPUS if gpu.name in name), None)
    return known or Gpu(name, arch_of(device), _measured_bandwidth(device))


def _measured_bandwidth(device: torch.device) -> float:
    source, target = (torch.empty(1 << 28, dtype=torch.uint8, device=device) for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        target.copy_(source)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
    return 2 * source.nbytes / (start.elapsed_time(end) * 1e-3)


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
