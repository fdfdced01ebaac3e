"""Operations on halves that have no lowering: computed in float32 and rounded once, through both doors."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import weft
import weft.backend
from weft.capture.graph import StepGraph
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import AtenProgram, compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "angle": torch.angle,
    "log_ndtr": torch.special.log_ndtr,
    "tan": torch.tan,
    "round": torch.round,
    "round to decimals": lambda x: torch.round(x, decimals=2),
    "atanh": lambda x: torch.atanh(x * 0.1),
}


def by_kernels(graph: StepGraph) -> AtenProgram:
    """The program of a graph with generated kernels, in triton's interpreter."""
    return compile_aten(use_kernels(make_kernels(run_passes(graph, KERNEL_PASSES))))


def every_case(x: Tensor) -> list[Tensor]:
    """Each operation of a product, in which a rounding in between shows."""
    return [function(x * 1.37) for function in CASES.values()]


@pytest.mark.parametrize(
    ("dtype", "door"),
    [(torch.bfloat16, "weft.compile"), (torch.float16, "weft.compile"), (torch.bfloat16, "torch.compile")],
)
def test_a_chain_of_halves_is_rounded_once(dtype: torch.dtype, door: str) -> None:
    x = torch.linspace(-1.5, 1.5, 64 * 3).reshape(64, 3).to(dtype)
    wanted = [result.to(dtype) for result in every_case(x.float())]
    if door == "weft.compile":
        step = weft.compile(lambda x: every_case(x))
        entry = step.entry_for((x,), {})
        entry.program = by_kernels(entry.captured.graph)
        found = step(x)
    else:
        torch.compiler.reset()
        with mock.patch.object(weft.backend, "_program", lambda graph, mode: by_kernels(graph)):
            found = torch.compile(every_case, backend="weft", fullgraph=True)(x)
    for name, ours, exact in zip(CASES, found, wanted, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, exact), (name, (ours.float() - exact.float()).abs().max())


def test_a_scan_that_is_asked_for_another_dtype_is_left_alone() -> None:
    x = torch.linspace(-1.5, 1.5, 64).to(torch.bfloat16)
    step = weft.compile(lambda x: (x.cumsum(0, dtype=torch.float64), x.cumsum(0, dtype=torch.bfloat16)))
    entry = step.entry_for((x,), {})
    entry.program = by_kernels(entry.captured.graph)
    for ours, eager in zip(step(x), (x.cumsum(0, dtype=torch.float64), x.cumsum(0)), strict=True):
        assert ours.dtype == eager.dtype
        assert torch.equal(ours, eager)
