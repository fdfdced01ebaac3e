"""Triton text of elementwise kernels over lists of tensors.

A kernel iterates over *columns*: lists of tensors, tensor ``i`` of each of the same size. A program does one chunk of
one tensor. Two tables in device memory say which:

``chunks``    int32, a row a program: tensor, number of the chunk in it, elements in the chunk, label of the tensor
``pointers``  int64, a row a tensor: its address in each column, then 1 where all of them are multiples of 16 bytes

A whole chunk of an aligned tensor is read and written 16 bytes at a time, unmasked; any other chunk is masked.
Registers are float32 whatever the dtypes of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.inductor.codegen.triton_text import as_pointer, chunk_loop, dtype_name

# Dtypes of columns.
# float64 is left to ATen: registers are float32.
COLUMN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of scalars that kernels read from device memory.
SCALAR_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    """A scalar that is known only when the kernel runs.

    Attributes:
        name: its register, float32.
        type: "fp32" for a kernel argument; a pointer type ("*fp64") for a number in device memory, which is the only
            kind that a replayed CUDA graph sees change.
    """

    name: str
    type: str = "fp32"

    @property
    def argument(self) -> str:
        """The name of the kernel's argument: of the number, or of the pointer to it."""
        return f"{self.name}_at" if self.type.startswith("*") else self.name

    def lines(self) -> list[str]:
        """The line that loads the number, none for a number that is passed by value."""
        return [f"{self.name} = tl.load({self.argument}).to(tl.float32)"] if self.type.startswith("*") else []


# Two casts; where the dtype is float32 there is nothing to round.
def rounded(register: str, dtype: torch.dtype) -> str:
    """The register as it would read back from memory of type ``dtype``."""
    return register if dtype == torch.float32 else f"{register}.to({dtype_name(dtype)}).to(tl.float32)"


def chunked_kernel_lines(
    columns: Sequence[Column],
    scalars: Sequence[ScalarParameter] = (),
    *,
    setup: Sequence[str] = (),
    body: Sequence[str] = (),
    skip: str = "",
    finish: Sequence[str] = (),
) -> list[str]:
    """The lines of a kernel ``(chunks, pointers, <scalars>, ..., CHUNK, BLOCK)`` over chunks of tensors.

    Args:
        setup: lines before the loop; the register ``label`` is the tensor's label in the chunk table.
        body: lines from the loaded registers to the stored ones.
        skip: condition under which nothing is done to a chunk, "" for none.
        finish: lines after the loop.
    """
    # The addresses of a row, then its flag of alignment.
    width = len(columns) + 1
    lines = [
        "chunk = chunks + tl.program_id(0) * 4",
        "tensor = tl.load(chunk)",
        # 64 bits: a tensor may have more than 2**31 elements.
        "start = tl.load(chunk + 1).to(tl.int64) * CHUNK",
        "count = tl.load(chunk + 2)",
        "label = tl.load(chunk + 3)",
        f"row = pointers + tensor * {width}",
        # Addresses are data, not arguments: one launch serves any number of tensors, and a kernel's arguments are
        # limited.
        *(f"{c.name}_at = {as_pointer(f'tl.load(row + {at})', c.dtype)} + start" for at, c in enumerate(columns)),
        f"aligned = tl.load(row + {width - 1})",
        *(line for s in scalars for line in s.lines()),
        *setup,
    ]
    if skip:
        # An empty chunk instead of a branch around the loop. It takes the masked path, which runs no block.
        lines.append(f"count = tl.where({skip}, 0, count)")

    def block(mask: str) -> list[str]:
        # 0 changes no sum (norms) and no element that is stored.
        filled = f"{mask}, other=0.0" if mask else ""
        loads = [f"{c.name} = tl.load({c.name}_at + at{filled}).to(tl.float32)" for c in columns if c.load]
        stores = [f"tl.store({c.name}_at + at, {c.store}.to({dtype_name(c.dtype)}){mask})" for c in columns if c.store]
        return [*loads, *body, *stores]

    return [*lines, *chunk_loop([f"{c.name}_at" for c in columns], block), *finish]
