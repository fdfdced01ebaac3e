"""Triton text of kernels that do the same to every element of many tensors.

One kernel walks *columns*: lists of tensors, tensor ``i`` of each of the same size. A program does one chunk of one
tensor. Two tables in device memory say which:

``chunks``    int32, a row a program: tensor, number of the chunk in it, elements in the chunk, label of the tensor
``pointers``  int64, a row a tensor: its address in each column, then 1 where all of them are multiples of 16 bytes

A whole chunk of an aligned tensor is read and written 16 bytes at a time, unmasked; any other chunk is masked.
Registers are float32 whatever the columns hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_INDENT = "    "

TRITON_DTYPES = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}
INDICES = {torch.int32: "*i32", torch.int64: "*i64"}


@dataclass(frozen=True)
class Column:
    """One list of tensors.

    Attributes:
        name: the register that its elements are loaded into.
        dtype: of its tensors: float32, bfloat16 or float16.
        load: whether they are read.
        store: the register that is written there, "" for none.
    """

    name: str
    dtype: torch.dtype
    load: bool = True
    store: str = ""


@dataclass(frozen=True)
class ScalarParameter:
    """A number known only when the kernel runs.

    Attributes:
        name: its register, float32.
        type: "fp32" for a kernel argument; a pointer type ("*fp64") for a number in device memory, which is the only
            kind that a replayed CUDA graph sees change.
    """

    name: str
    type: str = "fp32"

    @property
    def argument(self) -> str:
        return f"{self.name}_at" if self.type.startswith("*") else self.name

    def lines(self) -> list[str]:
        return [f"{self.name} = tl.load({self.argument}).to(tl.float32)"] if self.type.startswith("*") else []


def number(value: float) -> str:
    """``value`` as a float32 literal, rounded as a C++ cast rounds it."""
    return repr(torch.tensor(value, dtype=torch.float32).item())


def rounded(register: str, dtype: torch.dtype) -> str:
    """The register as it would read back from memory of type ``dtype``."""
    return register if dtype == torch.float32 else f"{register}.to({TRITON_DTYPES[dtype]}).to(tl.float32)"


def walk(
    name: str,
    columns: Sequence[Column],
    scalars: Sequence[ScalarParameter] = (),
    *,
    arguments: Sequence[str] = (),
    setup: Sequence[str] = (),
    body: Sequence[str] = (),
    skip: str = "",
    finish: Sequence[str] = (),
) -> str:
    """A kernel ``name(chunks, pointers, <scalars>, <arguments>, CHUNK, BLOCK)`` over chunks of tensors.

    Args:
        arguments: names of further arguments.
        setup: lines before the loop; they know ``label``, the tensor's.
        body: lines from the loaded registers to the stored ones.
        skip: condition under which nothing is done to a chunk, "" for none.
        finish: lines after the loop.
    """
    width = len(columns) + 1
    parameters = ["chunks", "pointers", *(s.argument for s in scalars), *arguments]
    lines = [
        "chunk = chunks + tl.program_id(0) * 4",
        "tensor = tl.load(chunk)",
        "start = tl.load(chunk + 1).to(tl.int64) * CHUNK",
        "count = tl.load(chunk + 2)",
        "label = tl.load(chunk + 3)",
        f"row = pointers + tensor * {width}",
        *(
            f"{c.name}_at = tl.load(row + {at}).to(tl.pointer_type({TRITON_DTYPES[c.dtype]})) + start"
            for at, c in enumerate(columns)
        ),
        f"aligned = tl.load(row + {width - 1})",
        *(line for s in scalars for line in s.lines()),
        *setup,
    ]
    if skip:
        lines.append(f"count = tl.where({skip}, 0, count)")
    lines += [
        "if (count == CHUNK) & (aligned != 0):",
        *indented(f"{c.name}_at = tl.multiple_of({c.name}_at, 16)" for c in columns),
        *indented(_loop(columns, body, "CHUNK", "")),
        "else:",
        *indented(_loop(columns, body, "count", "at < count")),
        *finish,
    ]
    return function(name, [*parameters, "CHUNK: tl.constexpr", "BLOCK: tl.constexpr"], lines)


def _loop(columns: Sequence[Column], body: Sequence[str], until: str, mask: str) -> list[str]:
    masked = ", mask=inside" if mask else ""
    filled = f"{masked}, other=0.0" if mask else ""
    inner = ["at = first + tl.arange(0, BLOCK)"]
    if mask:
        inner.append(f"inside = {mask}")
    inner += [f"{c.name} = tl.load({c.name}_at + at{filled}).to(tl.float32)" for c in columns if c.load]
    inner += body
    inner += [f"tl.store({c.name}_at + at, {c.store}.to({TRITON_DTYPES[c.dtype]}){masked})" for c in columns if c.store]
    return [f"for first in range(0, {until}, BLOCK):", *indented(inner)]


def function(name: str, parameters: Sequence[str], lines: Sequence[str]) -> str:
    """The text of a module with one Triton function."""
    imports = ["import triton", "import triton.language as tl", "", ""]
    return "\n".join([*imports, "@triton.jit", f"def {name}({', '.join(parameters)}):", *indented(lines)]) + "\n"


def indented(lines: Iterable[str], by: int = 1) -> list[str]:
    """The lines, ``by`` levels deeper."""
    return [_INDENT * by + line for line in lines]
