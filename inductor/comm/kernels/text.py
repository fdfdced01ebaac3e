"""Text of the kernels of transports: blocks of elements, chunks of members, and what a kernel starts with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from weft.inductor.comm.kernels.failure import What
from weft.inductor.multi_tensor.text import indented
from weft.inductor.runtime.kernel_source import KernelSource, registers_alone

# How a type is called in kernels, and in which type its values are computed.
_TYPES = {
    torch.float32: ("tl.float32", "tl.float32"),
    torch.bfloat16: ("tl.bfloat16", "tl.float32"),
    torch.float16: ("tl.float16", "tl.float32"),
    torch.float64: ("tl.float64", "tl.float64"),
    torch.int32: ("tl.int32", "tl.int32"),
    torch.int64: ("tl.int64", "tl.int64"),
}


def kernel(
    name: str, lines: Sequence[str], signature: dict[str, str], world: int, warps: int, **constants: int
) -> KernelSource:
    """The kernel with that body and the functions of device.py. Tables start at multiples of 16 bytes."""
    constants |= {"WORLD": world, "LANES": 1 << (world - 1).bit_length()}
    parameters = [*signature, *(f"{constant}: tl.constexpr" for constant in constants)]
    body = "\n".join(indented(lines))
    text = f"{_device()}\n\n@triton.jit\ndef {name}({', '.join(parameters)}):\n{body}\n"
    aligned = frozenset({"chunks", "members", "bases", "pads"} & set(signature))
    # There are fewer programs than multiprocessors.
    return KernelSource(name, text, signature, constants, aligned, warps, 1, registers_alone(warps))


@functools.cache
def _device() -> str:
    return Path(__file__).with_name("device.py").read_text()


def wait(what: What) -> str:
    """A barrier of all ranks: an expression, whether all came."""
    return f"barrier(pads, slots, rank, failure, {int(what)}, collective, patience, WORLD, LANES)"


def look_up(words: int) -> list[str]:
    """Lines that find out about ``chunk``, where a row of ``members`` has ``words`` words."""
    return [
        "row = chunks + chunk * 4",
        f"member = members + tl.load(row) * {words}",
        "start = tl.load(row + 1).to(tl.int64) * CHUNK",
        "count = tl.load(row + 2)",
        f"aligned = tl.load(member + {words - 1})",
    ]


def pointer(address: str, dtype: torch.dtype) -> str:
    """Where the chunk starts in the tensor at ``address``."""
    return f"({address}).to(tl.pointer_type({_TYPES[dtype][0]})) + start"


def places(world: int) -> list[str]:
    """Names of pointers into the buffers of all ranks."""
    return [f"peer{k}_at" for k in range(world)]


def find_places(world: int, shift: str, dtype: torch.dtype, first: str = "") -> list[str]:
    """Lines that give these pointers, ``shift`` bytes into the buffers, ``first`` being the rank of the first.

    Where ranks differ in it, ``{rank}`` in ``shift`` stands for the rank.
    """
    ranks = [f"({first} + {k}) % WORLD" if first else str(k) for k in range(world)]
    addresses = [f"tl.load(bases + {rank}) + {shift.format(rank=rank)}" for rank in ranks]
    return [f"{place} = {pointer(address, dtype)}" for place, address in zip(places(world), addresses, strict=True)]


def blocks(pointers: Sequence[str], body: Callable[[str], list[str]]) -> list[str]:
    """Lines that do ``body(mask)`` to each block of the chunk at ``pointers``.

    ``mask`` is what a load or store of the block needs as a last argument: nothing, where the chunk is whole and
    aligned, so that 16 bytes are moved at a time. Masked blocks are smaller, since their elements have an address each.
    """
    return [
        "if (count == CHUNK) & (aligned != 0):",
        *indented(f"{name} = tl.multiple_of({name}, 16)" for name in pointers),
        "    for first in range(0, CHUNK, BLOCK):",
        "        at = first + tl.arange(0, BLOCK)",
        *indented(body(""), 2),
        "else:",
        "    for first in range(0, count, TAIL):",
        "        at = first + tl.arange(0, TAIL)",
        "        inside = at < count",
        *indented(body(", mask=inside"), 2),
    ]


def load(pointer: str, mask: str) -> str:
    """A block of elements, as they are in memory; 0 where the mask is off."""
    return f"tl.load({pointer} + at{mask}{', other=0' if mask else ''})"


def store(pointer: str, register: str, dtype: torch.dtype, mask: str) -> str:
    """A block of elements, rounded to nearest even where the type is smaller."""
    return f"tl.store({pointer} + at, {register}.to({_TYPES[dtype][0]}){mask})"


def widened(register: str, dtype: torch.dtype) -> str:
    """A block of elements of that type, in the type that it is computed in."""
    return f"{register}.to({_TYPES[dtype][1]})"


def rounded(register: str, dtype: torch.dtype) -> str:
    """A block of elements as they would read back from memory of that type."""
    return widened(f"{register}.to({_TYPES[dtype][0]})", dtype)
