"""The copy of a rank's state that its writer process reads: torch's plan of what is written, and memory of both.

The memory has no name in any file system: the kernel frees it when the last process that has it open ends, however it
ends. It stays for the next save, which needs as much.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from weft.distributed.checkpoint.tensor_bytes import bytes_of

# Tensors begin at multiples of so many bytes, for the copies and for all dtypes.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Place:
    """Where a value lies in the shared memory: from byte ``offset`` on. Without a dtype it is ``shape[0]`` bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * (self.dtype or torch.uint8).itemsize


@dataclass(frozen=True)
class Staged:
    """A copy of a rank's state.

    Attributes:
        plan: what DCP is to write of it, as the rank proposes; other ranks may have the same tensors.
        places: where each of these values lies.
        size: of the shared memory, in bytes.
    """

    plan: SavePlan
    places: Mapping[MetadataIndex, Place]
    size: int


class SharedMemory:
    """Memory that two processes map by one file descriptor. Either may be the one that makes it.

    Args:
        descriptor: of the memory that the other process has made; None makes some.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            # Not below /dev/shm, whose size containers limit to 64 MiB.
            descriptor = os.memfd_create("weft") if hasattr(os, "memfd_create") else _unnamed_file()
        self.descriptor = descriptor
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def bytes(self, size: int) -> torch.Tensor:
        """The memory, at least ``size`` bytes of it, as a tensor of bytes."""
        if size > self._bytes.numel():
            self._pin(False)
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
            self._pin(True)
        return self._bytes

    def close(self) -> None:
        """Give up this process's share of it. Nobody may use it any more."""
        self._pin(False)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)

    def _pin(self, pin: bool) -> None:
        """Copies from a GPU to pinned memory are several times as fast. Where that is refused, they are slow."""
        if torch.cuda.is_initialized() and self._bytes.numel():
            runtime: Any = torch.cuda.cudart()
            address = self._bytes.data_ptr()
            if pin:
                runtime.cudaHostRegister(address, self._bytes.numel(), 0)
            else:
                runtime.cudaHostUnregister(address)


def stage(state: dict[str, Any], rank: int, memory: SharedMemory) -> Staged:
    """Copy ``state``, nested dictionaries of tensors and plain values, to ``memory``."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, rank == 0)
    plan = planner.create_local_plan()
    values: dict[MetadataIndex, torch.Tensor | memoryview] = {}
    places: dict[MetadataIndex, Place] = {}
    size = 0
    for item in plan.items:
        value = planner.resolve_data(item)
        if isinstance(value, torch.Tensor):
            values[item.index] = value
            place = Place(size, tuple(value.shape), value.dtype)
        else:
            values[item.index] = value.getbuffer()
            place = Place(size, (len(values[item.index]),), None)
        places[item.index] = place
        size += -(-place.size // _ALIGNMENT) * _ALIGNMENT
    data = memory.bytes(size)
    for index, value in values.items():
        source = value if isinstance(value, torch.Tensor) else torch.frombuffer(value, dtype=torch.uint8)
        _view(data, places[index]).copy_(source.detach(), non_blocking=True)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return Staged(plan, places, size)


class StagedPlanner(DefaultSavePlanner):
    """DCP's planner in the process that writes: it finds the values in the shared memory."""

    def __init__(self, staged: Staged, memory: SharedMemory) -> None:
        super().__init__()
        self._places = staged.places
        self._data = memory.bytes(staged.size)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """A tensor, or the bytes of a value that is none."""
        place = self._places[write_item.index]
        value = _view(self._data, place)
        return value if place.dtype is not None else io.BytesIO(bytes_of(value))


def _view(data: torch.Tensor, place: Place) -> torch.Tensor:
    part = data[place.offset : place.offset + place.size]
    return part.view(place.dtype or torch.uint8).view(place.shape)


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
