"""Text that all transfer kernels share: chunk look-up, peer pointers, loads and stores of blocks, and the header."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from weft.inductor.codegen.kernel_source import KernelSource, registers_per_thread
from weft.inductor.codegen.triton_text import as_pointer, dtype_name, write_kernel
from weft.inductor.loop_ir.ir import register_dtype
from weft.inductor.transports.kernels.failure import FailureKind


def peer_kernel_source(
    name: str, lines: Sequence[str], signature: dict[str, str], world: int, warps: int, **constants: int
) -> KernelSource:
    """The kernel with body ``lines``, headed by device_functions.py. Tables start at multiples of 16 bytes."""
    # Sizes of Triton blocks are powers of two.
    constants |= {"WORLD": world, "LANES": 1 << (world - 1).bit_length()}
    aligned = {"chunks", "members", "bases", "pads"} & set(signature)
    # All programs of a barrier run at once, so there are few, and each may take a multiprocessor's registers. Without a
    # limit of its own the assembler would spill, for an occupancy that is of no use.
    registers = registers_per_thread(warps)
    return write_kernel(
        name, lines, signature, constants, divisible=aligned, num_warps=warps, registers=registers, head=_device()
    )


@functools.cache
def _device() -> str:
    return Path(__file__).with_name("device_functions.py").read_text()


def barrier_call(what: FailureKind) -> str:
    """A barrier of all ranks, as an expression: true if every rank arrived."""
    return f"barrier(pads, slots, rank, failure, {int(what)}, collective, max_polls, WORLD, LANES)"


def chunk_lookup(words: int) -> list[str]:
    """Lines that look up ``chunk``: its member, start, element count and alignment.

    A row of ``members`` has ``words`` words.
    """
    return [
        "row = chunks + chunk * 4",
        f"member = members + tl.load(row) * {words}",
        # In 64 bits: a member can have more than 2^31 elements.
        "start = tl.load(row + 1).to(tl.int64) * CHUNK",
        "count = tl.load(row + 2)",
        f"aligned = tl.load(member + {words - 1})",
    ]


def pointer(address: str, dtype: torch.dtype) -> str:
    """A pointer to the chunk's first element in the tensor at ``address``."""
    return f"{as_pointer(f'({address})', dtype)} + start"


def peer_names(world: int) -> list[str]:
    """Names of pointers into the buffers of all ranks."""
    return [f"peer{k}_at" for k in range(world)]


def peer_pointers(world: int, shift: str, dtype: torch.dtype, first: str = "") -> list[str]:
    """Lines that define the pointers of :func:`peer_names`, ``shift`` bytes into each rank's buffer.

    Args:
        shift: an expression; ``{rank}`` in it stands for the rank.
        first: the rank of the first pointer, from which the others count up; rank 0 if empty.
    """
    # Sums start at rank 0 on every rank, for equal bits. Pushes start at the rank itself, to spread the load on the
    # links.
    ranks = [f"({first} + {k}) % WORLD" if first else str(k) for k in range(world)]
    addresses = [f"tl.load(bases + {rank}) + {shift.format(rank=rank)}" for rank in ranks]
    return [f"{place} = {pointer(address, dtype)}" for place, address in zip(peer_names(world), addresses, strict=True)]


def load(pointer: str, mask: str) -> str:
    """A load of a block in the dtype of memory; 0 where the mask is off."""
    return f"tl.load({pointer} + at{mask}{', other=0' if mask else ''})"


def store(pointer: str, register: str, dtype: torch.dtype, mask: str) -> str:
    """A store of a block, rounded to nearest even if ``dtype`` is narrower than the register."""
    return f"tl.store({pointer} + at, {register}.to({dtype_name(dtype)}){mask})"


def widened(register: str, dtype: torch.dtype) -> str:
    """A block of dtype ``dtype``, converted to its register type (float32 for half precision)."""
    return f"{register}.to({dtype_name(register_dtype(dtype))})"


def rounded(register: str, dtype: torch.dtype) -> str:
    """A block as it would read back from memory of type ``dtype``."""
    return widened(f"{register}.to({dtype_name(dtype)})", dtype)
