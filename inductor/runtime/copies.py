"""Copies of bytes that are issued together, again and again: from places known before to places told each time.

As a ``Tensor.copy_`` each costs the host 8 us (measured on two H200), and a collective makes dozens. Here all that is
known before lies ready as the driver reads it.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from weft.inductor.runtime import cuda

# Of enum CUmemcpySrcAccessOrder in cuda.h: sources are read in the order of the stream.
_IN_ORDER_OF_STREAM = 1

_POINTER = ctypes.sizeof(c_void_p)


@dataclass(frozen=True)
class Copy:
    """What is copied where.

    Attributes:
        source: the address of the bytes.
        block: the number of the block of memory that they go to.
        offset: where in it, in bytes.
        size: how many there are, at least 1.
    """

    source: int
    block: int
    offset: int
    size: int


class Copies(ABC):
    """Copies on one device, in turns: a turn begins when the one before has ended, its copies are in no order.

    Args:
        turns: the copies of each.
        told: what makes them, for messages.
    """

    def __init__(self, turns: Sequence[Sequence[Copy]], told: str) -> None:
        copies = [copy for turn in turns for copy in turn]
        self._told = told
        self._blocks = [copy.block for copy in copies]
        self._offsets = [copy.offset for copy in copies]
        self._layout = struct.Struct(f"@{len(copies)}P")
        self._destinations = (c_void_p * len(copies))()
        # ctypes passes such objects as they are, at half the cost of numbers. Destinations are views of the array.
        self._each = [
            (c_void_p.from_buffer(self._destinations, at * _POINTER), c_void_p(copy.source), c_size_t(copy.size))
            for at, copy in enumerate(copies)
        ]

    def aim(self, blocks: Sequence[int]) -> None:
        """From now on copy to blocks of memory at these addresses. What was issued before is not changed by it."""
        starts = map(blocks.__getitem__, self._blocks)
        self._layout.pack_into(self._destinations, 0, *map(operator.add, starts, self._offsets))

    @abstractmethod
    def issue(self, stream: int) -> None:
        """Start the copies on the CUDA stream of that address, which is not the default one.

        Raises:
            CudaError: the driver refuses.
        """


class HostCopies(Copies):
    """Copies on the CPU: what is issued has been copied."""

    def issue(self, stream: int) -> None:
        for destination, source, size in self._each:
            ctypes.memmove(destination, source, size.value)


class DeviceCopies(Copies):
    """Copies on a GPU, a turn by one call of the driver where it has such a call.

    CUDA graphs cannot record that call, so that copies are issued one by one while the stream is captured, and always
    by drivers before CUDA 12.8. Engines make them but for those within one GPU's memory: the flag that gives these to
    engines too, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, makes them 18 times as slow (NVIDIA/nccl#2177).
    """

    def __init__(self, turns: Sequence[Sequence[Copy]], told: str, driver: cuda.Driver) -> None:
        super().__init__(turns, told)
        self._driver = driver
        self._batches = [] if driver.copy_batch is None else self._prepare(turns)

    def _prepare(self, turns: Sequence[Sequence[Copy]]) -> list[tuple[Any, ...]]:
        """For each turn the arguments of its call, but for the stream."""
        attributes = ctypes.byref(_Attributes(source_order=_IN_ORDER_OF_STREAM))
        from_the_first = ctypes.byref(c_size_t(0))
        failed = ctypes.byref(c_size_t())
        batches = []
        start = 0
        for turn in turns:
            count = len(turn)
            destinations = (c_void_p * count).from_buffer(self._destinations, start * _POINTER)
            sources = (c_void_p * count)(*(copy.source for copy in turn))
            sizes = (c_size_t * count)(*(copy.size for copy in turn))
            arrays = destinations, sources, sizes
            batches.append((*arrays, c_size_t(count), attributes, from_the_first, c_size_t(1), failed))
            start += count
        return batches

    def issue(self, stream: int) -> None:
        # Numbers would be passed as 32 bits.
        stream_ = c_void_p(stream)
        if self._batches and not self._driver.is_capturing(stream):
            call, arguments = self._driver.copy_batch, self._batches
        else:
            call, arguments = self._driver.copy, self._each
        for each in arguments:
            if code := call(*each, stream_):
                self._driver.check(code, f"issuing the copies of {self._told}")


class _Location(ctypes.Structure):
    """CUmemLocation in cuda.h: for managed memory, else not looked at."""

    _fields_ = (("type", c_uint), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes in cuda.h: how copies of a batch are made."""

    _fields_ = (("source_order", c_uint), ("source", _Location), ("destination", _Location), ("flags", c_uint))


def copies_on(device: torch.device, turns: Sequence[Sequence[Copy]], told: str) -> Copies:
    """Copies on ``device``, see :class:`Copies`. Raises errors.NoCudaDriver."""
    return DeviceCopies(turns, told, cuda.driver()) if device.type == "cuda" else HostCopies(turns, told)
