"""A multi-tensor launch plan on a device: compiled kernels, and pointer tables with the addresses of real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.codegen.triton_text import write_kernel
from weft.inductor.multi_tensor.launch_plan import (
    Argument,
    CallResult,
    ConstantTable,
    LaunchPlan,
    Place,
    PointerTable,
    Scratch,
    pointer_table,
)
from weft.inductor.runtime.kernels import compile_kernels

_BLOCK = 1024  # addresses that one program of the fetch kernel copies
_WORD = 8  # bytes of an address

# Recordings of a CUDA graph for which each address table has page-locked memory. It is allocated beforehand, because
# cudaHostAlloc is not allowed while a stream is captured.
RECORDINGS = 64


def kernels_of(plan: LaunchPlan, device: torch.device) -> list[KernelSource]:
    """Everything that is launched for ``plan`` on ``device``: its kernels, and on a GPU the one that fetches
    addresses."""
    fetch = [fetch_source()] if device.type == "cuda" else []
    return [*(launch.kernel for launch in plan.launches), *fetch]


class BoundLaunches:
    """Runs the kernels of ``plan`` on ``device``: a GPU, or the CPU, where Triton interprets them.

    Call :meth:`bind` first, then :meth:`launch` any number of times. Both may be recorded in a CUDA graph; its replays
    use the tensors that were bound during the recording.

    Raises:
        KernelCompilationFailed, TritonMissing, CudaError: see :func:`compile_kernels`.
    """

    def __init__(self, plan: LaunchPlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._kernels = compile_kernels([launch.kernel for launch in plan.launches], device)
        self._tables = {name: table.to(device) for name, table in plan.tables.items()}
        self._scratch = {
            name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in plan.scratch.items()
        }
        self._starts: dict[str, int] = {}
        words = 0
        for name, rows in plan.pointers.items():
            self._starts[name] = words
            words += len(rows) * (len(rows[0]) + 1) if rows else 0
        self._addresses = AddressTable(words, device)
        self._values: list[list[Any]] = []

    def bind(self, arguments: Sequence[Any], results: Sequence[Sequence[torch.Tensor]], stream: int = 0) -> None:
        """Use these tensors and numbers in later launches: write their addresses into the pointer tables.

        Args:
            arguments: arguments of the call; a number that kernels read from memory is passed as a tensor with it.
            results: the lists of new tensors that the call returns.
            stream: address of the current CUDA stream, on which the kernels will be launched.
        """
        rows = [
            [_tensor(place, arguments, results).data_ptr() for place in row]
            for table in self._plan.pointers.values()
            for row in table
        ]
        self._addresses.fill(rows, stream)
        self._values = [
            [self._value(place, arguments, results) for place in launch.arguments] for launch in self._plan.launches
        ]

    def release(self) -> None:
        """Drop the references to the tensors of the call, so that they can be freed. Launched kernels need none."""
        self._values = []

    def launch(self, stream: int = 0) -> None:
        """Launch all kernels on the CUDA stream at address ``stream``."""
        for launch, kernel, values in zip(self._plan.launches, self._kernels, self._values, strict=True):
            kernel.launch((launch.grid, 1, 1), stream, *values)

    def _value(self, place: Argument, arguments: Sequence[Any], results: Sequence[Sequence[torch.Tensor]]) -> Any:
        if isinstance(place, ConstantTable):
            return self._tables[place.name]
        if isinstance(place, PointerTable):
            return self._addresses.start + _WORD * self._starts[place.name]
        if isinstance(place, Scratch):
            return self._scratch[place.name]
        value = _tensor(place, arguments, results)
        return torch.tensor(value, dtype=torch.float32).to(self._device) if isinstance(value, (list, tuple)) else value


def _tensor(place: Place, arguments: Sequence[Any], results: Sequence[Sequence[torch.Tensor]]) -> Any:
    if isinstance(place, CallResult):
        return results[place.result][place.at]
    value = arguments[place.argument]
    return value if place.at is None else value[place.at]


class AddressTable:
    """The pointer tables of a plan, one after the other, in device memory: int64 of shape [words].

    A CUDA graph cannot record a copy from pageable memory. During a recording the addresses are written to page-locked
    memory that is not changed afterwards, and a recorded kernel copies them to the device at each replay.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self._table = torch.empty(words, dtype=torch.int64, device=device)
        self._rows: list[list[int]] | None = None
        self._locked: list[torch.Tensor] = []
        self._recorded: list[torch.Tensor] = []
        if device.type == "cuda":
            self._locked = [*torch.empty(RECORDINGS, words, dtype=torch.int64, pin_memory=True)]
            self._fetch = compile_kernels([fetch_source()], device)[0]

    @property
    def start(self) -> int:
        """Device address of the first table."""
        return self._table.data_ptr()

    def fill(self, rows: list[list[int]], stream: int) -> None:
        """Write ``rows`` to the tables, ordered after the work on ``stream``."""
        if self._table.is_cuda and torch.cuda.is_current_stream_capturing():
            self._record(rows, stream)
            return
        if rows != self._rows:
            table = pointer_table(rows)
            # A copy from pageable memory would make the host wait until the stream reaches the copy.
            # torch's allocator of pinned memory does not reuse the temporary before the copy has run on this stream.
            self._table.copy_(table.pin_memory() if self._table.is_cuda else table, non_blocking=True)
            self._rows = rows

    def _record(self, rows: list[list[int]], stream: int) -> None:
        # Written once and never again: every replay of this recording reads it.
        locked = self._locked.pop()
        self._recorded.append(locked)
        locked.copy_(pointer_table(rows))
        # Replays leave their own addresses in the table, so the next call outside of them must not skip the copy. Calls
        # and replays do not alternate: a program that runs kernel by kernel again has dropped its recordings.
        self._rows = None
        self._fetch.launch(fetch_grid(len(locked)), stream, locked, self._table, len(locked))


def fetch_grid(words: int) -> tuple[int, int, int]:
    """The grid of :func:`fetch_source` for this many words."""
    return -(-words // _BLOCK), 1, 1


def fetch_source() -> KernelSource:
    """The kernel that copies ``words`` addresses, int64, from ``locked`` to ``table``: one for tables of any length."""
    lines = [
        "at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "tl.store(table + at, tl.load(locked + at, mask=at < words), mask=at < words)",
    ]
    signature = {"locked": "*i64", "table": "*i64", "words": "i32"}
    return write_kernel("fetch_addresses", lines, signature, {"BLOCK": _BLOCK})
