"""GELU and its gradient as generated kernels compute them, in Triton's interpreter, against float64 and eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels

KINDS = ("tanh", "none")
HALF_SPACING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # at most, relative


def forward(kind: str) -> Callable[[Tensor], tuple[Tensor]]:
    return lambda x: (F.gelu(x, approximate=kind),)


def slope(kind: str) -> Callable[[Tensor], tuple[Tensor]]:
    return lambda x: (torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=kind),)


def generated(function: Callable[[Tensor], tuple[Tensor]], x: Tensor) -> tuple[Tensor, str]:
    """What the kernels of a function give, and their texts."""
    graph = make_kernels(run_passes(weft.capture(function, x), KERNEL_PASSES))
    texts = [n.target.generated.source.text for n in graph.graph.nodes if isinstance(n.target, KernelCall)]
    (result,) = compile_aten(use_kernels(graph))(x)
    return result, "\n".join(texts)


def exact(kind: str, x: Tensor, is_slope: bool) -> Tensor:
    """In float64, by formulas in which nothing cancels."""
    x = x.double()
    if kind == "tanh":
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        share = torch.sigmoid(2 * u)
        density = share * torch.sigmoid(-2 * u) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    else:
        share = 0.5 * torch.special.erfc(-x * math.sqrt(0.5))
        density = torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return share + x * density if is_slope else x * share


@pytest.mark.parametrize("is_slope", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF_SPACING, ids=str)
def test_half_precision_gelu_is_rounded_once(dtype: torch.dtype, kind: str, is_slope: bool) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    function = (slope if is_slope else forward)(kind)
    mine, _ = generated(function, x)
    (eager,) = function(x)
    wanted = exact(kind, x, is_slope)
    known = wanted.isfinite() & eager.isfinite() & (wanted.abs() <= torch.finfo(dtype).max)
    far = (mine.double() - wanted).abs()[known]
    # Beside the rounding: float32's, of shares near 1 and of the exponents of small ones.
    allowed = 1.001 * HALF_SPACING[dtype] * wanted.abs() + 2e-7 * (1 + x.double().abs()).clamp(max=10)
    assert bool((far <= allowed[known]).all()), x[known][~(far <= allowed[known])]


@pytest.mark.parametrize("is_slope", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_gelu_is_as_exact_as_eager(kind: str, is_slope: bool) -> None:
    x = torch.linspace(-6, 6, 1 << 16)
    function = (slope if is_slope else forward)(kind)
    mine, _ = generated(function, x)
    wanted = exact(kind, x, is_slope)
    error, eagers = (float((result.double() - wanted).norm()) for result in (mine, *function(x)))
    assert error <= 1.1 * eagers


@pytest.mark.parametrize("is_slope", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_float64_gelu_is_computed_in_float64(kind: str, is_slope: bool) -> None:
    x = torch.linspace(-6, 6, 1000, dtype=torch.float64)
    mine, _ = generated((slope if is_slope else forward)(kind), x)
    torch.testing.assert_close(mine, exact(kind, x, is_slope), rtol=0.0, atol=1e-14)


def test_erf_outside_gelu_is_not_rewritten() -> None:
    x = torch.linspace(-6, 6, 1000)
    mine, text = generated(lambda x: (0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),), x)
    assert "tl.erf" in text
    assert "normal_cdf" not in text
    torch.testing.assert_close(mine, F.gelu(x))
