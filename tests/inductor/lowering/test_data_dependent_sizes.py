"""Generated kernels over sizes that only the data decides, against eager: one program for every number of elements."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn import functional as F

import weft
import weft.backend
from weft.capture.graph import StepGraph
from weft.inductor.codegen.kernel_call import KernelCall
from weft.inductor.compiler import make_kernels
from weft.inductor.passes.pipeline import KERNEL_PASSES, run_passes
from weft.inductor.runtime.aten import AtenProgram, compile_aten
from weft.inductor.runtime.multi_tensor import use_kernels

ROWS = torch.arange(21.0).reshape(7, 3).sin()
COUNTS = torch.tensor([1, 0, 2, 3, 0, 1, 2])
MASKS = {
    "some": torch.tensor([1, 0, 1, 1, 0, 1, 1]).bool(),
    "none": torch.zeros(7, dtype=torch.bool),
    "one": torch.arange(7) == 4,
    "all": torch.ones(7, dtype=torch.bool),
}


def gradient(x: Tensor, mask: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    loss = (x[mask].exp().sum(1) * 2).sum()
    return torch.autograd.grad(loss, x)[0] * 2


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nonzero": lambda x, mask: (x * mask.unsqueeze(1)).nonzero().float() * 2,
    "masked_select": lambda x, mask: torch.masked_select(x, mask.unsqueeze(1)) + 1,
    "unique": lambda x, mask: torch.unique(x * mask.unsqueeze(1)) * 2,
    "repeat_interleave": lambda x, mask: torch.repeat_interleave(x[:, 0], COUNTS * mask).sin(),
    "softmax of rows": lambda x, mask: torch.softmax(x[mask] * 2, -1),
    "sum over rows": lambda x, mask: (x[mask] * 2).sum(0) + 1,
    "transposed": lambda x, mask: x[mask].t().contiguous() + 1,
    "outer": lambda x, mask: (x[mask][:, :1] + x[~mask][:, 1]).tanh(),
    "its number": lambda x, mask: x[mask] / (x[mask].shape[0] + 1),
    "repeated": lambda x, mask: x[mask].repeat(2, 1) * 2,  # stays whole: its decomposition asks for the size
    "layer_norm": lambda x, mask: F.layer_norm(x[mask], (3,)),
    "gradient": gradient,
}


def by_kernels(graph: StepGraph) -> tuple[AtenProgram, int]:
    """The program of a graph with generated kernels, in triton's interpreter, and the number of its kernels."""
    generated = make_kernels(run_passes(graph, KERNEL_PASSES))
    kernels = sum(isinstance(node.target, KernelCall) for node in generated.graph.nodes)
    return compile_aten(use_kernels(generated)), kernels


def check(name: str, step: Callable[[Tensor, Tensor], Tensor]) -> None:
    for size, mask in MASKS.items():
        wanted = CASES[name](ROWS, mask)
        torch.testing.assert_close(step(ROWS, mask), wanted, msg=lambda text: f"{name}, {size}: {text}")  # noqa: B023


@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_has_kernels_for_every_size(name: str) -> None:
    function = CASES[name]
    step = weft.compile(lambda x, mask: function(x, mask))
    entry = step.entry_for((ROWS, MASKS["some"]), {})
    entry.program, kernels = by_kernels(entry.captured.graph)
    assert kernels
    check(name, step)
    assert len(step.captures) == 1


@pytest.mark.parametrize("name", ["nonzero", "masked_select", "unique", "repeat_interleave", "repeated"])
def test_a_dynamo_graph_has_kernels_for_every_size(name: str) -> None:
    torch.compiler.reset()
    made: list[int] = []

    def program(graph: StepGraph, mode: str) -> AtenProgram:
        compiled, kernels = by_kernels(graph)
        made.append(kernels)
        return compiled

    captures = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
    with mock.patch.object(weft.backend, "_program", program), captures:
        check(name, torch.compile(CASES[name], backend="weft", fullgraph=True))
    assert len(made) == 1
    assert made[0]
