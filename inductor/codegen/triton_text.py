"""The one writer of Triton text: dtypes, literals, indentation, chunks of tensors, and whole kernels.

Three folders write kernels: ``codegen/`` from loop nests, ``multi_tensor/`` over lists of tensors, and
``transports/kernels/`` between GPUs. What they share is here, so that each is spelled once.

Kernels over lists of tensors cut each tensor into *chunks*. A chunk that is whole and aligned is read and written
16 bytes at a time without a mask; any other chunk is masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from weft.inductor.codegen.kernel_source import KernelSource

INDENT = "    "
IMPORTS = "import triton\nimport triton.language as tl\n"


class _TritonDtype(NamedTuple):
    argument: str  # in a signature
    register: str  # in the text of a kernel


_DTYPES = {
    torch.float64: _TritonDtype("fp64", "tl.float64"),
    torch.float32: _TritonDtype("fp32", "tl.float32"),
    torch.float16: _TritonDtype("fp16", "tl.float16"),
    torch.bfloat16: _TritonDtype("bf16", "tl.bfloat16"),
    torch.float8_e4m3fn: _TritonDtype("fp8e4nv", "tl.float8e4nv"),
    torch.float8_e5m2: _TritonDtype("fp8e5", "tl.float8e5"),
    torch.int64: _TritonDtype("i64", "tl.int64"),
    torch.int32: _TritonDtype("i32", "tl.int32"),
    torch.int16: _TritonDtype("i16", "tl.int16"),
    torch.int8: _TritonDtype("i8", "tl.int8"),
    torch.uint8: _TritonDtype("u8", "tl.uint8"),
    torch.bool: _TritonDtype("i1", "tl.int1"),
}


def argument_type(dtype: torch.dtype) -> str:
    """The type of a scalar argument in a signature: ``fp32`` for float32."""
    return _DTYPES[dtype].argument


def pointer_type(dtype: torch.dtype) -> str:
    """The type of a pointer argument in a signature: ``*fp32`` for a tensor of float32."""
    return f"*{_DTYPES[dtype].argument}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the text of a kernel: ``tl.float32`` for float32."""
    return _DTYPES[dtype].register


def literal_text(value: float, dtype: torch.dtype) -> str:
    """A number as Triton text, to stand next to an operand of the register type ``dtype``.

    Triton 3.6 turns every constant that equals zero into +0.0, so -0.0 is written by its bits, as a value with a type.
    """
    if dtype == torch.bool:
        return str(bool(value))
    if not dtype.is_floating_point:
        return str(int(value))
    value = float(value)
    # Python has no literal for these, and `math.inf` would be a global of the kernel.
    if not math.isfinite(value):
        return f'float("{value}")'
    if value == 0 and math.copysign(1, value) < 0:
        bits = 64 if dtype == torch.float64 else 32
        return f"tl.full([], {-(2 ** (bits - 1))}, tl.int{bits}).to(tl.float{bits}, bitcast=True)"
    # `repr` is the shortest text that reads back as the same double: nothing is rounded on the way.
    return repr(value)


def float32_literal(value: float) -> str:
    """``value`` as a float32 literal, rounded to nearest even as a C++ cast rounds it."""
    # Rounded here, as Triton rounds a constant only where it meets a tensor, and folds constants in double before
    # that.
    return literal_text(torch.tensor(value, dtype=torch.float32).item(), torch.float32)


def indented(lines: Iterable[str], by: int = 1) -> list[str]:
    """The lines, ``by`` levels deeper."""
    return [INDENT * by + line for line in lines]


def as_pointer(address: str, dtype: torch.dtype) -> str:
    """An address (an int64 of a pointer table) as a pointer to elements of ``dtype``."""
    return f"{address}.to(tl.pointer_type({dtype_name(dtype)}))"


def chunk_loop(pointers: Sequence[str], body: Callable[[str], list[str]], tail: str = "BLOCK") -> list[str]:
    """Lines that do ``body(mask)`` to each block of the chunk at ``pointers``.

    The lines read the registers ``count`` (elements of the chunk) and ``aligned`` (whether every pointer is a multiple
    of 16 bytes), and the constants ``CHUNK`` and ``BLOCK``. Only in the branch of whole, aligned chunks may Triton know
    the alignment: it then moves 16 bytes at a time.

    Args:
        pointers: registers that point to the chunk's first element.
        body: the lines of one block at offsets ``at``; ``mask`` is the last argument of its loads and stores, or "".
        tail: the constant with the elements of a masked block.
    """
    return [
        "if (count == CHUNK) & (aligned != 0):",
        *indented(f"{name} = tl.multiple_of({name}, 16)" for name in pointers),
        "    for first in range(0, CHUNK, BLOCK):",
        "        at = first + tl.arange(0, BLOCK)",
        *indented(body(""), 2),
        "else:",
        f"    for first in range(0, count, {tail}):",
        f"        at = first + tl.arange(0, {tail})",
        "        inside = at < count",
        *indented(body(", mask=inside"), 2),
    ]


def parameter_list(signature: Iterable[str], constants: Iterable[str]) -> str:
    """The parameters of a kernel: its arguments, then its constants as ``tl.constexpr``."""
    return ", ".join([*signature, *(f"{constant}: tl.constexpr" for constant in constants)])


def write_kernel(
    name: str,
    lines: Sequence[str],
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    divisible: Collection[str] = (),
    num_warps: int = 4,
    registers: int | None = None,
    head: str = IMPORTS,
    helpers: Iterable[str] = (),
) -> KernelSource:
    """A kernel from the lines of its body; see :class:`KernelSource` for what the arguments mean.

    Args:
        lines: the body, not indented.
        head: the first lines of the module, imports included.
        helpers: texts of functions that the body calls.
    """
    body = "\n".join(indented(lines))
    function = f"@triton.jit\ndef {name}({parameter_list(signature, constants)}):\n{body}\n"
    text = "\n\n".join([head, *(f"{helper}\n" for helper in helpers), function])
    # One stage: what pipelines loads says so at its own loop.
    return KernelSource(
        name, text, dict(signature), dict(constants), frozenset(divisible), num_warps, num_stages=1, registers=registers
    )
