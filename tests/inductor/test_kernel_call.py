"""Kernels as calls of a graph: where their inputs lie, and what they do about it."""

from __future__ import annotations

import torch

import weft
from weft.inductor.compiler import make_kernels
from weft.inductor.kernel_call import KernelCall
from weft.inductor.passes.pipeline import run_passes


def call_of(step, *inputs: torch.Tensor) -> KernelCall:
    graph = make_kernels(run_passes(weft.capture(step, *inputs)))
    (call,) = (node.target for node in graph.graph.nodes if isinstance(node.target, KernelCall))
    return call


def test_an_input_in_another_layout_is_laid_out_first() -> None:
    """Some ATen kernels return another layout on a GPU than their fake tensor had."""
    x = torch.randn(6, 8)
    call = call_of(lambda x: x.exp() + 1, x)
    (wanted,) = call(x)
    call._elsewhere = None
    (found,) = call(x.t().contiguous().t())
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found, x.exp() + 1)


def test_an_input_that_starts_anywhere_is_read_by_a_kernel_of_its_own() -> None:
    x = torch.randn(65)
    call = call_of(lambda x: x.exp(), x[:64])
    (found,) = call(x[1:])
    torch.testing.assert_close(found, x[1:].exp())
    assert call._unaligned is not None
