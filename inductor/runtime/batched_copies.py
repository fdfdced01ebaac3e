"""Batches of memory copies with fixed sources and sizes, whose destinations are set before each issue.

A ``Tensor.copy_`` costs the host 8 us (measured on two H200), and a collective makes dozens of them. Here all arguments
known beforehand are stored in the layout that the CUDA driver reads.
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

from weft import cuda_driver

# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM in cuda.h: sources are read in stream order.
_IN_ORDER_OF_STREAM = 1

_POINTER = ctypes.sizeof(c_void_p)


@dataclass(frozen=True)
class BlockCopy:
    """One copy.

    Attributes:
        source: address of the first byte.
        block: number of the destination block, an index into the addresses given to :meth:`Copies.aim`.
        offset: offset in that block, in bytes.
        size: bytes, at least 1.
    """

    source: int
    block: int
    offset: int
    size: int


class Copies(ABC):
    """Copies on one device, in turns. A turn starts after the one before has ended; copies of a turn have no order.

    Args:
        turns: the copies of each turn.
        description: the collective that makes them, for error messages.
    """

    def __init__(self, turns: Sequence[Sequence[BlockCopy]], description: str) -> None:
        copies = [copy for turn in turns for copy in turn]
        self._description = description
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
        """Set the addresses of the destination blocks for later calls of :meth:`issue`, not for earlier ones."""
        starts = map(blocks.__getitem__, self._blocks)
        self._layout.pack_into(self._destinations, 0, *map(operator.add, starts, self._offsets))

    @abstractmethod
    def issue(self, stream: int) -> None:
        """Start the copies on a CUDA stream.

        Args:
            stream: address of the stream; not the default stream.

        Raises:
            CudaError: the driver returned an error.
        """


class HostCopies(Copies):
    """Copies on the CPU, complete when :meth:`issue` returns."""

    def issue(self, stream: int) -> None:
        """Make the copies now; ``stream`` is ignored."""
        for destination, source, size in self._each:
            ctypes.memmove(destination, source, size.value)


class DeviceCopies(Copies):
    """Copies on a GPU: one ``cuMemcpyBatchAsync`` per turn where the driver has it (CUDA 12.8 and later).

    CUDA graphs cannot record that call. While the stream is captured, and with older drivers, each copy is one call.
    Copy engines make all copies but those within one GPU's memory. The flag that gives these to copy engines too,
    CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, makes them 18 times as slow (NVIDIA/nccl#2177).
    """

    def __init__(self, turns: Sequence[Sequence[BlockCopy]], description: str, driver: cuda_driver.Driver) -> None:
        super().__init__(turns, description)
        self._driver = driver
        self._batches = [] if driver.copy_batch is None else self._prepare(turns)

    def _prepare(self, turns: Sequence[Sequence[BlockCopy]]) -> list[tuple[Any, ...]]:
        """For each turn the arguments of its batched call, without the stream."""
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
        """Start the copies on ``stream``, see :meth:`Copies.issue`."""
        # ctypes passes a plain int as 32 bits, which would cut off the address.
        stream_ = c_void_p(stream)
        if self._batches and not self._driver.is_capturing(stream):
            call, arguments = self._driver.copy_batch, self._batches
        else:
            call, arguments = self._driver.copy, self._each
        for each in arguments:
            if code := call(*each, stream_):
                self._driver.check(code, f"issuing the copies of {self._description}")


class _Location(ctypes.Structure):
    """CUmemLocation in cuda.h. The driver reads it for managed memory only."""

    _fields_ = (("type", c_uint), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes in cuda.h: the attributes of the copies of a batch."""

    _fields_ = (("source_order", c_uint), ("source", _Location), ("destination", _Location), ("flags", c_uint))


def copies_on(device: torch.device, turns: Sequence[Sequence[BlockCopy]], description: str) -> Copies:
    """The copies of ``turns`` on ``device``, see :class:`Copies`.

    Raises:
        NoCudaDriver: ``device`` is a GPU and the process cannot load ``libcuda.so.1``.
    """
    if device.type == "cuda":
        return DeviceCopies(turns, description, cuda_driver.driver())
    return HostCopies(turns, description)
