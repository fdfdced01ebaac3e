"""A plan on a device: its kernels, and its tables filled with the addresses of real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.inductor.multi_tensor.plan import Argument, Made, Place, Plan, Pointers, Scratch, Table, addresses
from weft.inductor.multi_tensor.text import function
from weft.inductor.runtime.kernel_source import KernelSource
from weft.inductor.runtime.kernels import compile_kernels

_BLOCK = 1024
_WORD = 8  # bytes of an address

# How often a CUDA graph can be recorded before a table of addresses has no page-locked memory left.
RECORDINGS = 64


class Bound:
    """Runs the launches of ``plan`` on ``device``: a GPU, or the CPU, where kernels are interpreted.

    First :meth:`bind`, then :meth:`launch` any number of times. Both may be recorded in a CUDA graph: what is replayed
    works on the tensors that were bound then.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
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
        """Take these tensors and numbers from now on.

        Args:
            arguments: of the call; a number that kernels read from memory is given as the tensor that holds it.
            results: the new lists of the call.
            stream: the CUDA stream that will be launched on (its address), the current one.
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
        """Hold no tensor of the call any more: what was launched needs none, a next call binds its own."""
        self._values = []

    def launch(self, stream: int = 0) -> None:
        """Run all kernels on the CUDA stream of that address."""
        for launch, kernel, values in zip(self._plan.launches, self._kernels, self._values, strict=True):
            kernel.launch((launch.grid, 1, 1), stream, *values)

    def _value(self, place: Argument, arguments: Sequence[Any], results: Sequence[Sequence[torch.Tensor]]) -> Any:
        if isinstance(place, Table):
            return self._tables[place.name]
        if isinstance(place, Pointers):
            return self._addresses.start + _WORD * self._starts[place.name]
        if isinstance(place, Scratch):
            return self._scratch[place.name]
        value = _tensor(place, arguments, results)
        return torch.tensor(value, dtype=torch.float32).to(self._device) if isinstance(value, (list, tuple)) else value


def _tensor(place: Place, arguments: Sequence[Any], results: Sequence[Sequence[torch.Tensor]]) -> Any:
    if isinstance(place, Made):
        return results[place.result][place.at]
    value = arguments[place.argument]
    return value if place.at is None else value[place.at]


class AddressTable:
    """The address tables of a plan, one after the other, in device memory.

    While a CUDA graph is recorded nothing may be copied from ordinary memory: the addresses are left in page-locked
    memory, which stays as it is from then on, and a kernel recorded with the others fetches them at each replay.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self._table = torch.empty(words, dtype=torch.int64, device=device)
        self._rows: list[list[int]] | None = None
        self._locked: list[torch.Tensor] = []
        self._recorded: list[torch.Tensor] = []
        if device.type == "cuda":
            self._locked = [*torch.empty(RECORDINGS, words, dtype=torch.int64, pin_memory=True)]
            self._fetch = compile_kernels([_fetch_source(words)], device)[0]

    @property
    def start(self) -> int:
        """Where the first table lies."""
        return self._table.data_ptr()

    def fill(self, rows: list[list[int]], stream: int) -> None:
        """Hold these rows from now on, in the order of ``stream``."""
        if self._table.is_cuda and torch.cuda.is_current_stream_capturing():
            self._record(rows, stream)
            return
        if rows != self._rows:
            held = addresses(rows)
            # From ordinary memory the host would wait until the stream has come to the copy.
            self._table.copy_(held.pin_memory() if self._table.is_cuda else held, non_blocking=True)
            self._rows = rows

    def _record(self, rows: list[list[int]], stream: int) -> None:
        locked = self._locked.pop()
        self._recorded.append(locked)
        locked.copy_(addresses(rows))
        self._rows = None
        self._fetch.launch((-(-len(locked) // _BLOCK), 1, 1), stream, locked, self._table)


def _fetch_source(words: int) -> KernelSource:
    lines = [
        "at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "tl.store(table + at, tl.load(locked + at, mask=at < WORDS), mask=at < WORDS)",
    ]
    text = function("fetch_addresses", ["locked", "table", "WORDS: tl.constexpr", "BLOCK: tl.constexpr"], lines)
    signature = {"locked": "*i64", "table": "*i64"}
    return KernelSource("fetch_addresses", text, signature, {"WORDS": words, "BLOCK": _BLOCK}, frozenset(), 4, 1)
