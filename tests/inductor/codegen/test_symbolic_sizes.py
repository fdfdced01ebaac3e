"""Numbers that a step computes from symbolic sizes, in the sizes, offsets and values of generated kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.capture.record.tracer import capture_step
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.compiler import make_kernels
from weft.inductor.fusion.kernel_stages import kernel_graph
from weft.inductor.graph.retarget import retarget
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime import compile_pool
from weft.inductor.runtime.aten import compile_aten


def step(x: Tensor) -> tuple[Tensor, ...]:
    n = x.size(0)
    return (
        # sizes of loops
        x[: round(n * 0.7)] * 2,
        x[: math.floor(n / 2)] + 1,
        x[: math.ceil(n / 3)] + 1,
        x[: n // 3] * (n // 3),
        # offsets, and strides of a transposed operand
        x[round(n * 0.3) :] + 1,
        x[: n // 2].t().exp() + x[n - n // 2 :].t(),
        # values
        x * round(n / 3),
        x * round(n / 3, 2),
        x * math.floor(n / 3.5),
        x * math.ceil(n / 3.3),
        x / n**2,
        x / n**0.5,
        x * n**-0.5,
        x / math.sqrt(n),
        x * 2 ** (n - 4),
        x * 1.01**n,
        x * (n % 3),
        torch.where(x > n**0.5, x, round(n / 4)),
        x + torch.full_like(x, n**0.5),
        # in a reduction
        x.softmax(0).sum(0).mean() / math.floor(n / 2 + 0.5),
    )


def test_kernels_compute_with_numbers_made_of_sizes() -> None:
    graph = capture_step(step, (torch.randn(10, 6),), {}, dynamic=frozenset({(0, 0)})).graph
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.graph.nodes)
    program = compile_aten(make_kernels(run_passes(graph, KERNEL_PASSES)))
    for size in (10, 7, 13):
        x = torch.randn(size, 6)
        inputs = [x if isinstance(node.meta["val"], Tensor) else None for node in graph.placeholders]
        torch.testing.assert_close(program(*inputs), list(step(x)))


def test_kernels_with_numbers_made_of_sizes_compile_for_sm_90() -> None:
    graph = capture_step(step, (torch.randn(10, 6),), {}, dynamic=frozenset({(0, 0)})).graph
    made = kernel_graph(run_passes(retarget(graph), KERNEL_PASSES))
    calls = [node.target for node in made.graph.nodes if isinstance(node.target, KernelCall)]
    assert len(calls) > 5
    compile_pool.build([call.generated.source for call in calls], 90)
