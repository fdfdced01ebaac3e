"""From a nest to a kernel that can be launched."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sympy
import torch

from weft.errors import UnsupportedNest
from weft.inductor.codegen import canonical
from weft.inductor.codegen.expressions import TRITON_DTYPES
from weft.inductor.codegen.held import with_held
from weft.inductor.codegen.passes import for_plan
from weft.inductor.codegen.plan import Plan, plan
from weft.inductor.codegen.seams import cut_at_seams
from weft.inductor.codegen.triton import Body
from weft.inductor.ir import Call, Int, Nest, Reduce, Scalar
from weft.inductor.ops import OPS
from weft.inductor.runtime.kernel_source import KernelSource


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel and what it is called with.

    Attributes:
        buffers: the tensors, in the order of the arguments.
        scalars: the numbers behind them, in the order of the arguments.
        blocks: the (size, block) of each dimension of the grid; sizes are over the symbols ``s0``, ``s1``, ... that
            stand for ``scalars``.
    """

    source: KernelSource
    buffers: tuple[str, ...]
    scalars: tuple[Scalar, ...]
    blocks: tuple[tuple[Int, int], ...]

    def grid(self, values: Sequence[float] = ()) -> tuple[int, int, int]:
        """How many programs to launch, given the values of ``scalars``."""
        symbols = {canonical.symbol(k): value for k, value in enumerate(values)}
        programs = 1
        for size, block in self.blocks:
            known = int(size.xreplace(symbols)) if isinstance(size, sympy.Expr) else size
            programs *= -(-known // block)
        return programs, 1, 1


def supports(nest: Nest) -> str | None:
    """Why one kernel cannot compute a nest; None where it can."""
    try:
        form = canonical.canonical(nest)
        plan(form.nest, {f"b{k}": torch.float32 for k in range(len(form.buffers))})
    except UnsupportedNest as error:
        return str(error)
    return None


def generate(nest: Nest, buffers: Mapping[str, torch.dtype]) -> GeneratedKernel:
    """The kernel of a nest. Nests that are the same but for names give the same text.

    Args:
        buffers: the type of each buffer in memory.

    Raises:
        UnsupportedNest: :func:`supports` says why.
    """
    form = canonical.canonical(nest)
    dtypes = tuple(buffers[name] for name in form.buffers)
    kinds = tuple(scalar.dtype for scalar in form.scalars)
    source, order, blocks = _printed(form.nest, dtypes, kinds)
    return GeneratedKernel(source, tuple(form.buffers[at] for at in order), form.scalars, blocks)


@functools.cache
def _printed(
    nest: Nest, dtypes: tuple[torch.dtype, ...], kinds: tuple[torch.dtype, ...]
) -> tuple[KernelSource, tuple[int, ...], tuple[tuple[Int, int], ...]]:
    """The kernel of a canonical nest, the order of its buffers, and its grid."""
    types = {f"b{k}": dtype for k, dtype in enumerate(dtypes)}
    nest = cut_at_seams(nest)
    layout = plan(nest, types)
    nest = for_plan(nest, layout)
    layout = with_held(layout, nest, types)
    pointers = _pointers(nest, types)
    order = tuple(int(buffer[1:]) for buffer in pointers)
    signature = {pointers[buffer]: f"*{TRITON_DTYPES[types[buffer]]}" for buffer in pointers}
    signature |= {f"s{k}": TRITON_DTYPES[kind] for k, kind in enumerate(kinds)}
    constants = {dim.block_name: dim.block for dim in layout.tile}
    body = Body(nest, layout, types, pointers).statements()
    for name, value in (("ARCH", 0), ("ALIGNED", True)):
        constants |= {name: value} if any(name in line for line in body) else {}
    title = _title(nest, layout)
    arguments = ", ".join([*signature, *(f"{block}: tl.constexpr" for block in constants)])
    code = "\n".join(f"    {line}" for line in body)
    name = f"{title}_{hashlib.sha256(f'{arguments}{code}'.encode()).hexdigest()[:6]}"
    text = f"@triton.jit\ndef {name}({arguments}):\n{code}\n"
    text = "\n\n".join(["import triton\nimport triton.language as tl\n", *(f"{h}\n" for h in _helpers(text)), text])
    divisible = frozenset(pointers.values())
    source = KernelSource(name, text, signature, constants, divisible, layout.num_warps, 1, layout.registers)
    return source, order, tuple((dim.size, dim.block) for dim in layout.grid)


def _pointers(nest: Nest, types: Mapping[str, torch.dtype]) -> dict[str, str]:
    """The argument that each buffer is: ``in0``, ..., ``io0``, ... (read and written), ``out0``, ..."""
    read, written = {load.buffer for load in nest.reads}, set(nest.writes)
    found: dict[str, str] = {}
    for prefix, group in (("in", read - written), ("io", read & written), ("out", written - read)):
        found |= {buffer: f"{prefix}{k}" for k, buffer in enumerate(b for b in types if b in group)}
    return found


def _title(nest: Nest, layout: Plan) -> str:
    """What the kernel does: its shape, its reductions and its dearest operations."""
    values = nest.values()
    reduces = dict.fromkeys(value.kind for value in values if isinstance(value, Reduce))
    calls = dict.fromkeys(value.op for value in values if isinstance(value, Call) and value.op not in ("to", "where"))
    dear = sorted(calls, key=lambda op: -OPS[op].cost)[:3]
    words = [layout.shape, *reduces, *dear] if calls or reduces else ["copy"]
    return "_".join(words)[:48]


def _helpers(text: str) -> list[str]:
    """The sources of the functions of device.py that a kernel's text calls, and of those that they call."""
    sources = _device_functions()
    needed: set[str] = set()
    waiting = [text]
    while waiting:
        called = {name for name in re.findall(r"(?<![.\w])(\w+)(?=[(,)])", waiting.pop()) if name in sources}
        waiting += [sources[name] for name in called - needed]
        needed |= called
    return [source for name, source in sources.items() if name in needed]


@functools.cache
def _device_functions() -> dict[str, str]:
    file = Path(__file__).with_name("device.py")
    text = file.read_text()
    lines = text.splitlines()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {f.name: "\n".join(lines[f.decorator_list[0].lineno - 1 : f.end_lineno]) for f in functions}
