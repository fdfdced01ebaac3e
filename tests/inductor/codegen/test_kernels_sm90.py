"""Every kernel of the example steps, compiled for sm_90 with no GPU: what it needs, and how it reaches memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from example_graphs import EXAMPLES, example

from weft import knobs
from weft.capture.graph import StepGraph
from weft.inductor.codegen.kernel import generate, supports
from weft.inductor.codegen.kernel_source import KernelSource
from weft.inductor.fusion.fuse import FusedLoops, fuse
from weft.inductor.fusion.inline import inline
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Load, Nest
from weft.inductor.lowering.lower import lower
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime import compile_pool

SHARED = 227 * 1024  # bytes of a multiprocessor that one program may have
# Bytes that a thread may spill. Kernels over long rows fill the registers; those of GPT-2's loss save two registers for
# the call of a failed assertion, that a label is a class.
SPILLS = 8
MUCH = 1 << 20  # elements: what is smaller is not laid out for wide loads


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("cache")
    with knobs.override(cache_dir=str(directory)):
        yield directory


@pytest.mark.parametrize("name", EXAMPLES)
def test_kernels_of_example_steps_do_not_spill_and_load_16_bytes(name: str) -> None:
    kernels = _kernels(example(name))
    wrong, wide_kernels = [], 0
    for (kernel, dtypes), binary in zip(kernels.values(), compile_pool.build(list(kernels), 90), strict=True):
        nest, needs = kernel.nest, binary.resources
        if needs.spills > SPILLS or needs.shared > SHARED:
            wrong.append(f"{binary.symbol}: {needs}\n{nest}")
        wide = [load for load in nest.reads if _could_be_wide(nest, load, dtypes[load.buffer].itemsize)]
        wide_kernels += bool(wide)
        if wide and not needs.vector_loads:
            wrong.append(f"{binary.symbol} has no wide load of {', '.join(map(str, wide))}\n{nest}")
    assert not wrong, "\n\n".join(wrong)
    assert wide_kernels >= 2


def _kernels(step: StepGraph) -> dict[KernelSource, tuple[FusedLoops, dict[str, torch.dtype]]]:
    """The different kernels of a step, each with the types of its buffers."""
    step = run_passes(step, KERNEL_PASSES)
    lowered = inline(lower(step, list(step.graph.nodes)))
    found = {}
    for item in fuse(lowered, supports):
        if isinstance(item, FusedLoops):
            dtypes = {name: lowered.buffers[name].dtype for name in (*item.reads, *item.writes)}
            found[generate(item.nest, dtypes).source] = item, dtypes
    return found


def _could_be_wide(nest: Nest, load: Load, itemsize: int) -> bool:
    """Whether 16 bytes of the buffer lie side by side wherever the load reads, and there is much to read."""
    many = 16 // itemsize
    sizes = [size_hint(nest.sizes[axis]) for axis in sorted(load.index.axes)]
    inner = [axis for axis, stride in load.index.strides if stride == 1 and size_hint(nest.sizes[axis]) % many == 0]
    others = [size_hint(stride) for axis, stride in load.index.strides if axis not in inner]
    aligned = all(stride % many == 0 for stride in (*others, size_hint(load.index.offset)))
    return len(inner) == 1 and aligned and load.mask is None and not load.index.indirect and math.prod(sizes) >= MUCH
