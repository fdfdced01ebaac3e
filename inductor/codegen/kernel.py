"""From a nest to a kernel that can be launched: canonical form, plan, reduction forms, text.

Kernels are cached by canonical nest, so a layer that is repeated 32 times is generated and compiled once.
"""

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
from weft.inductor.codegen.kernel_body import KernelBody
from weft.inductor.codegen.kernel_plan import KernelPlan, plan_kernel
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.codegen.mask_splitting import split_at_mask_boundaries
from weft.inductor.codegen.reduction_forms import choose_reduction_forms
from weft.inductor.codegen.register_tiling import plan_register_tiles
from weft.inductor.codegen.shared_columns import split_rows
from weft.inductor.codegen.triton_text import argument_type, indented, parameter_list, pointer_type, write_kernel
from weft.inductor.graph.gpu import HOPPER_MULTIPROCESSORS
from weft.inductor.graph.serializable import serializable
from weft.inductor.loop_ir.ir import Call, Int, Nest, Reduce, Scalar
from weft.inductor.loop_ir.ops import OPS


@serializable
@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel and what it is called with.

    Attributes:
        buffers: the tensors, in the order of the arguments.
        scalars: the scalar arguments, which follow the tensors.
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
            # Along one axis of the grid: CUDA limits the other two to 65,535 programs.
            programs *= -(-known // block)
        return programs, 1, 1


def supports(nest: Nest) -> str | None:
    """Why one kernel cannot compute a nest, as a sentence; None where it can.

    The answer depends on the nest alone: neither on the dtypes of buffers nor on the GPU, so that fusion decides the
    same on every rank.
    """
    form = canonical.canonical(nest)
    return _why_not(form.nest, len(form.buffers))


@functools.lru_cache(maxsize=1024)
def _why_not(nest: Nest, buffers: int) -> str | None:
    """:func:`supports` of a canonical nest."""
    try:
        # float32 for all: where a plan depends on bytes it must not decide support (see `_row_and_column` in
        # kernel_plan.py).
        plan_kernel(nest, {f"b{k}": torch.float32 for k in range(buffers)})
    except UnsupportedNest as error:
        return str(error)
    return None


def generate(
    nest: Nest, buffers: Mapping[str, torch.dtype], multiprocessors: int = HOPPER_MULTIPROCESSORS
) -> GeneratedKernel:
    """The kernel of a nest. Nests that are the same but for names give the same text.

    Args:
        buffers: the type of each buffer in memory.
        multiprocessors: of the GPU that the kernel is for.

    Raises:
        UnsupportedNest: :func:`supports` says why.
    """
    form = canonical.canonical(nest)
    # Dtypes in memory are not part of the nest, but of the text (casts at loads and stores), so they are part of the
    # key.
    dtypes = tuple(buffers[name] for name in form.buffers)
    kinds = tuple(scalar.dtype for scalar in form.scalars)
    source, order, blocks = _generate_canonical(form.nest, dtypes, kinds, multiprocessors)
    return GeneratedKernel(source, tuple(form.buffers[at] for at in order), form.scalars, blocks)


# For the whole process: the key holds no names of a step, so a second step or a recapture finds the same kernels.
@functools.cache
def _generate_canonical(
    nest: Nest, dtypes: tuple[torch.dtype, ...], kinds: tuple[torch.dtype, ...], multiprocessors: int
) -> tuple[KernelSource, tuple[int, ...], tuple[tuple[Int, int], ...]]:
    """The kernel of a canonical nest, the order of its buffers, and its grid."""
    types = {f"b{k}": dtype for k, dtype in enumerate(dtypes)}
    # Splitting comes first, as it changes the sizes to plan for. The final forms of reductions decide how many
    # accumulators there are, so registers are counted after them.
    nest = split_rows(split_at_mask_boundaries(nest), types, multiprocessors)
    layout = plan_kernel(nest, types, multiprocessors)
    nest = choose_reduction_forms(nest, layout)
    layout = plan_register_tiles(layout, nest, types)
    pointers = _pointers(nest, types)
    # Arguments are sorted by kind (read, both, written), so the call has to know which of its buffers each is.
    order = tuple(int(buffer[1:]) for buffer in pointers)
    signature = {pointers[buffer]: pointer_type(types[buffer]) for buffer in pointers}
    signature |= {f"s{k}": argument_type(kind) for k, kind in enumerate(kinds)}
    # Block sizes are constants: Triton needs the shapes of tiles when it compiles.
    constants = {dim.block_name: dim.block for dim in layout.tile}
    body = KernelBody(nest, layout, types, pointers).statements()
    # Only where the text uses them: an unused constant would make equal kernels different.
    for name, value in (("ARCH", 0), ("ALIGNED", True)):
        constants |= {name: value} if any(name in line for line in body) else {}
    title = _kernel_name(nest, layout)
    # The name carries a hash of the text, so that a profile tells two kernels of one title apart. It is the same on
    # every rank.
    content = parameter_list(signature, constants) + "\n".join(indented(body))
    source = write_kernel(
        f"{title}_{hashlib.sha256(content.encode()).hexdigest()[:6]}",
        body,
        signature,
        constants,
        # What torch's allocator gives is aligned. `KernelCall` has a variant for the tensors that are not.
        divisible=pointers.values(),
        num_warps=layout.num_warps,
        registers=layout.registers,
        helpers=_helpers(content),
    )
    return source, order, tuple((dim.size, dim.block) for dim in layout.grid)


def _pointers(nest: Nest, types: Mapping[str, torch.dtype]) -> dict[str, str]:
    """The argument that each buffer is: ``in0``, ..., ``io0``, ... (read and written), ``out0``, ..."""
    # A buffer that is read and written by one kernel is one argument, of its own kind.
    read, written = {load.buffer for load in nest.reads}, set(nest.writes)
    found: dict[str, str] = {}
    for prefix, group in (("in", read - written), ("io", read & written), ("out", written - read)):
        found |= {buffer: f"{prefix}{k}" for k, buffer in enumerate(b for b in types if b in group)}
    return found


def _kernel_name(nest: Nest, layout: KernelPlan) -> str:
    """A name that says what the kernel does: its shape, its reductions and its three most expensive operations."""
    values = nest.values()
    reduces = dict.fromkeys(value.kind for value in values if isinstance(value, Reduce))
    plain = ("to", "where", "checked_index")
    calls = dict.fromkeys(value.op for value in values if isinstance(value, Call) and value.op not in plain)
    # `sorted` is stable, so equal costs keep the order of the nest.
    dear = sorted(calls, key=lambda op: -OPS[op].cost)[:3]
    words = [layout.shape, *reduces, *dear] if calls or reduces else ["copy"]
    return "_".join(words)[:48]


def _helpers(text: str) -> list[str]:
    """The sources of the functions of device_functions.py that a kernel's text calls, with those that they call."""
    sources = _device_functions()
    needed: set[str] = set()
    waiting = [text]
    while waiting:
        # Functions that are called, and those that are passed to `tl.reduce`.
        # Comments of a helper count as its text. One that has the name of another helper before a comma pulls that
        # in.
        called = {name for name in re.findall(r"(?<![.\w])(\w+)(?=[(,)])", waiting.pop()) if name in sources}
        waiting += [sources[name] for name in called - needed]
        needed |= called
    return [source for name, source in sources.items() if name in needed]


@functools.cache
def _device_functions() -> dict[str, str]:
    file = Path(__file__).with_name("device_functions.py")
    text = file.read_text()
    lines = text.splitlines()
    # By their source lines, decorators included: `inspect` would need them imported, and importing compiles nothing
    # of use.
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {f.name: "\n".join(lines[f.decorator_list[0].lineno - 1 : f.end_lineno]) for f in functions}
