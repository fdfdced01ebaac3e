"""Products that take over the addition behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from pass_runs import Run, close, targets
from weft.inductor.passes.accumulate_matmuls import accumulate_matmuls
from weft.inductor.passes.pipeline import KERNEL_PASSES


def accumulations(step: Any, *args: torch.Tensor) -> int:
    """How many additions went; the result stays close in float64, and nothing is cloned for it."""
    run, plain = Run(step, args, [accumulate_matmuls]), Run(step, args, [])
    close(run, plain, rtol=1e-12, atol=1e-12)
    gone = targets(plain.graph)["aten.add.Tensor"] - targets(run.graph)["aten.add.Tensor"]
    made = run.source.count("addmm_(") + run.source.count("addbmm_(")
    assert made == gone
    assert run.source.count("aten_clone(") == plain.source.count("aten_clone(")
    return gone


def doubles(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_chain_of_products_is_one_chain_of_accumulations() -> None:
    a, b, c = doubles(3, 4), doubles(4, 5), doubles(4, 5)
    assert accumulations(lambda a, b, c: (a @ b + a @ c + a @ (b * c)).exp(), a, b, c) == 2


def test_batches_of_products_accumulate_too() -> None:
    a, b = doubles(2, 3, 4), doubles(2, 4, 5)
    assert accumulations(lambda a, b: (torch.bmm(a, b) + torch.bmm(a.exp(), b)).exp(), a, b) == 1


@pytest.mark.parametrize(
    "step",
    [
        lambda a, b: (a @ b) + a,  # the addend is an input that keeps its value
        lambda a, b: b @ a + (t := a @ b) + t,  # a product is read twice
        lambda a, b: (t := b @ a) + a @ b + t.sum(),  # the addend is read again
        lambda a, b: (b @ a)[:1] + a @ b,  # the addend is stretched
        lambda a, b: (b[:1] @ a) + a @ b,
        lambda a, b: torch.add(b @ a, a @ b, alpha=2),
        lambda a, b: (b @ a).t() + a @ b,  # the addend lies otherwise in memory
        lambda a, b: (b.float() @ a.float()) + a @ b,  # the addend is of another dtype
        lambda a, b: (torch.cat([a, b]) @ b)[:4] + a @ b,  # the addend is a part of a tensor
        lambda a, b: a.exp() + a @ b,  # the addend is computed by a loop
    ],
)
def test_sums_that_cannot_take_the_addends_memory_stay(step: Any) -> None:
    assert accumulations(step, doubles(4, 4), doubles(4, 4)) == 0


def test_a_gradient_accumulates_in_its_buffer() -> None:
    def step(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        grad.add_(a @ b)

    args = doubles(3, 5), doubles(3, 4), doubles(4, 5)
    assert accumulations(step, *args) == 1


class Gated(nn.Module):
    """Three projections of one input, reshaped as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.projections = nn.ModuleList(nn.Linear(8, width, bias=False) for width in (8, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k, v = (projection(x) for projection in self.projections)
        return q * torch.cat([k, v], -1).sigmoid()


def training_step(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated()).to(dtype)

    def step(x: torch.Tensor) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(x).square().mean()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    return step


@pytest.mark.parametrize(("shape", "again"), [((3, 2, 8), (3, 2, 8)), ((3, 8), (5, 8))])
def test_gradients_of_sibling_projections_accumulate_in_one_buffer(
    shape: tuple[int, ...], again: tuple[int, ...]
) -> None:
    """Of rows and of batches of them; rows of a dynamic number, run with another than was captured."""
    x = doubles(*shape)
    if shape != again:
        weft.mark_dynamic(x, 0)
    step = training_step(torch.float64)
    run, plain = (Run(step, [x], passes, [doubles(*again)]) for passes in ([accumulate_matmuls], []))
    close(run, plain, rtol=1e-12, atol=1e-14)
    assert targets(run.graph)["aten.addmm.default"] == 4
    assert run.source.count("addmm_(") == 4


def test_the_error_in_half_precision_is_no_larger() -> None:
    """All passes; gradients against those in float64."""
    x = doubles(4, 16, 8)
    exact = training_step(torch.float64)(x)
    errors = []
    for passes in ([], KERNEL_PASSES):
        run = Run(training_step(torch.bfloat16), [x.bfloat16()], passes)
        (got,) = (tensor for tensor in run.outcome if tensor.shape == exact.shape)
        errors.append((got.double() - exact).norm())
    assert errors[1] <= errors[0] * 1.1
