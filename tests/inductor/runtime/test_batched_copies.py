"""Copies that are issued together: what they copy on every route, and what exactly a stand-in for CUDA's driver gets.

The stand-in's functions are C functions, called as those of libcuda are: what comes through is what the driver gets.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import pytest
import torch

from weft import cuda_driver, errors
from weft.inductor.runtime.batched_copies import BlockCopy, Copies, DeviceCopies, copies_on

STREAM = 0x7F12_3456_789A
TOLD = "copy_engine_gather of wte.weight at train.py:7"

ONE = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_uint64)
# As in the cuda.h of CUDA 12.8: destinations, sources, sizes, count, attributes, which copies they are for, how
# many there are, which copy failed, stream.
MANY = CFUNCTYPE(
    c_int,
    *[POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t],
    *[c_void_p, POINTER(c_size_t), c_size_t, POINTER(c_size_t), c_uint64],
)
ASK = CFUNCTYPE(c_int, c_uint64, POINTER(c_int))


class Library:
    """Copies the host's memory, and writes down what it is asked. What copies returns the next of ``results``, or 0."""

    def __init__(self, batches: bool = True, capturing: bool = False, results: Sequence[int] = ()) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.capturing = capturing
        self._results = [*results]
        self._kept: list[Any] = []
        for name in (
            *["cuLaunchKernel", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuFuncGetAttribute"],
            *["cuCtxPushCurrent_v2", "cuCtxSetCurrent"],
        ):
            self._provide(name, ASK, lambda *arguments: 1)
        self._provide("cuMemcpyAsync", ONE, self._copy)
        self._provide("cuStreamIsCapturing", ASK, self._ask)
        if batches:
            self._provide("cuMemcpyBatchAsync", MANY, self._copy_batch)

    def _provide(self, name: str, prototype: Any, function: Callable[..., int]) -> None:
        made = prototype(function)
        self._kept.append(made)
        setattr(self, name, CFUNCTYPE(c_int)(ctypes.cast(made, c_void_p).value))

    def _copy(self, destination: int, source: int, size: int, stream: int) -> int:
        self.calls.append(("copy", destination, source, size, stream))
        return self._done([(destination, source, size)])

    def _copy_batch(
        self,
        destinations: Any,
        sources: Any,
        sizes: Any,
        count: int,
        attributes: int,
        firsts: Any,
        number: int,
        failed: Any,
        stream: int,
    ) -> int:
        copies = [*zip(destinations[:count], sources[:count], sizes[:count], strict=True)]
        how = ctypes.string_at(attributes, 24)
        self.calls.append(("batch", copies, how, firsts[:number], stream))
        failed[0] = 2**64 - 1
        return self._done(copies)

    def _done(self, copies: list[tuple[int, int, int]]) -> int:
        if code := self._results.pop(0) if self._results else 0:
            return code
        for copy in copies:
            ctypes.memmove(*copy)
        return 0

    def _ask(self, stream: int, status: Any) -> int:
        self.calls.append(("ask", stream))
        status[0] = int(self.capturing)  # CU_STREAM_CAPTURE_STATUS_ACTIVE is 1
        return 0

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_%d" % code.value
        return 0

    def cuGetErrorString(self, code: Any, text: Any) -> int:
        text._obj.value = b"something is wrong"
        return 0


def on_driver(turns: Sequence[Sequence[BlockCopy]], **how: Any) -> tuple[Copies, Library]:
    library = Library(**how)
    return DeviceCopies(turns, TOLD, cuda_driver.Driver(library)), library


ROUTES: dict[str, Callable[[Sequence[Sequence[BlockCopy]]], Copies]] = {
    "host": lambda turns: copies_on(torch.device("cpu"), turns, TOLD),
    "batches": lambda turns: on_driver(turns)[0],
    "captured": lambda turns: on_driver(turns, capturing=True)[0],
    "old driver": lambda turns: on_driver(turns, batches=False)[0],
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_copy_path_copies_exactly_the_given_bytes(route: str) -> None:
    draw = random.Random(3)
    for _ in range(20):
        sources = bytearray(draw.randbytes(500))
        start = ctypes.addressof(ctypes.c_char.from_buffer(sources))
        sizes = [draw.randrange(1, 100) for _ in range(draw.randrange(1, 5))]
        turns: list[list[BlockCopy]] = [[] for _ in range(draw.randrange(1, 4))]
        for block, room in enumerate(sizes):
            at = 0
            while at < room:
                size = min(draw.randrange(1, 30), room - at)
                draw.choice(turns).append(BlockCopy(start + draw.randrange(470), block, at, size))
                at += size + draw.randrange(3)
        copies = ROUTES[route](turns := [turn for turn in turns if turn])
        # Elsewhere at each call, as a caching allocator has it; what was copied stays as it is.
        calls: list[list[bytearray]] = []
        wanted: list[list[bytearray]] = []
        for _ in range(3):
            sources[:] = draw.randbytes(500)
            calls.append([bytearray(size) for size in sizes])
            wanted.append([bytearray(size) for size in sizes])
            for copy in (copy for turn in turns for copy in turn):
                found = sources[copy.source - start : copy.source - start + copy.size]
                wanted[-1][copy.block][copy.offset : copy.offset + copy.size] = found
            copies.aim([ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in calls[-1]])
            copies.issue(STREAM)
        assert calls == wanted


def gather(world: int = 3, members: int = 2) -> tuple[list[list[BlockCopy]], list[torch.Tensor], list[torch.Tensor]]:
    """The copies of a gather of shards of 8 * (member + 1) bytes, what they copy, and where to."""
    shards = [torch.randn(world, 2 * (member + 1)) for member in range(members)]
    results = [torch.zeros_like(shard) for shard in shards]
    turns = [
        [BlockCopy(shard[rank].data_ptr(), at, rank * 8 * (at + 1), 8 * (at + 1)) for at, shard in enumerate(shards)]
        for rank in range(world)
    ]
    return turns, shards, results


def addresses(tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], rank: int) -> list[tuple[int, ...]]:
    return [
        (into[rank].data_ptr(), source[rank].data_ptr(), source[rank].nbytes)
        for into, source in zip(tensors, sources, strict=True)
    ]


def test_a_turn_is_one_driver_call_where_batched_copies_exist() -> None:
    turns, shards, results = gather()
    copies, library = on_driver(turns)
    copies.aim([result.data_ptr() for result in results])
    copies.issue(STREAM)
    # In the order of the stream, no hints where memory lies, no flags; from the first copy on.
    how = struct.pack("=IIiIiI", 1, 0, 0, 0, 0, 0), [0], STREAM
    batches = [("batch", addresses(results, shards, rank), *how) for rank in range(3)]
    assert library.calls == [("ask", STREAM), *batches]
    assert all(map(torch.equal, results, shards))


@pytest.mark.parametrize("how", [{"capturing": True}, {"batches": False}], ids=["captured", "old driver"])
def test_each_copy_is_one_driver_call_without_batched_copies_or_during_capture(how: dict[str, bool]) -> None:
    turns, shards, results = gather()
    copies, library = on_driver(turns, **how)
    copies.aim([result.data_ptr() for result in results])
    copies.issue(STREAM)
    each = [("copy", *copy, STREAM) for rank in range(3) for copy in addresses(results, shards, rank)]
    # Where there is no choice the stream is not asked.
    assert library.calls == ([("ask", STREAM), *each] if "capturing" in how else each)
    assert all(map(torch.equal, results, shards))


def test_captured_copies_can_be_issued_again_at_once() -> None:
    turns, _, results = gather()
    copies, library = on_driver(turns)
    copies.aim([result.data_ptr() for result in results])
    kinds = []
    for capturing in (False, True, False):
        library.capturing = capturing
        library.calls.clear()
        copies.issue(STREAM)
        kinds.append({call[0] for call in library.calls})
    assert kinds == [{"ask", "batch"}, {"ask", "copy"}, {"ask", "batch"}]


@pytest.mark.parametrize("capturing", [False, True], ids=["batches", "captured"])
def test_a_driver_error_names_the_collective(capturing: bool) -> None:
    turns, shards, results = gather()
    copies, library = on_driver(turns, capturing=capturing, results=[0, 1])
    copies.aim([result.data_ptr() for result in results])
    with pytest.raises(errors.CudaError) as caught:
        copies.issue(STREAM)
    assert str(caught.value).startswith(f"issuing the copies of {TOLD} failed with CUDA_ERROR_1: something is wrong")
    assert len(library.calls) == 3  # one asks; nothing is issued after what failed
    assert torch.equal(results[0][0], shards[0][0])
    assert not results[0][2].any()
