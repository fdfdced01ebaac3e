"""Generated kernels beside tensors whose values are the conjugates or negatives of what memory holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels

COMPLEX = torch.complex(torch.arange(1.0, 65.0), torch.arange(64.0) - 30)
NEGATIVE = COMPLEX.conj().imag


def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, 16).index_add(0, torch.tensor([1, 3, 1, 0]), x.view(4, 16))


def gradient(x: torch.Tensor) -> torch.Tensor:
    leaf = torch.ones(64, requires_grad=True)
    (leaf * 2).sin().backward(x)
    return leaf.grad


STEPS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: (x * 2 + 1).sin(),
    "a view of it": lambda x: x[::2] + 1,
    "a reduction": lambda x: (x * 3).sum(),
    "several casts": lambda x: [part.to(torch.bfloat16) for part in x.split(16)],
    "rows summed by index": sum_of_rows,
    "the gradient of an output": gradient,
    "copied": lambda x: x.clone() * 2,
    "written": lambda x: x.clone().mul_(2).add_(x),
}


def by_kernels(step: Callable[..., Any], *arguments: torch.Tensor) -> Any:
    compiled = weft.compile(step)
    entry = compiled.entry_for(arguments, {})
    generated = make_kernels(run_passes(entry.captured.graph, KERNEL_PASSES))
    entry.program = compile_aten(use_kernels(generated))
    return compiled(*arguments)


@pytest.mark.parametrize("name", STEPS)
def test_a_negative_argument_is_read_as_its_values(name: str) -> None:
    assert NEGATIVE.is_neg()
    torch.testing.assert_close(by_kernels(STEPS[name], NEGATIVE), STEPS[name](NEGATIVE))


@pytest.mark.parametrize("name", STEPS)
def test_a_negative_value_of_the_step_is_read_as_its_values(name: str) -> None:
    step = lambda z: STEPS[name](z.conj().imag)
    torch.testing.assert_close(by_kernels(step, COMPLEX), step(COMPLEX))


def test_a_call_with_a_negative_tensor_is_captured_anew() -> None:
    compiled = weft.compile(lambda x: x + 1)
    for x in (COMPLEX.imag, NEGATIVE, COMPLEX.imag):
        assert torch.equal(compiled(x), x + 1)
    assert compiled.captures == ["first call", compiled.captures[1]]
    assert "negative" in compiled.captures[1]
