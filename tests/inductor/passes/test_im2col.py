"""Convolutions of windows side by side as products: against torch's own, in every layout, and which stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from weft.capture.graph import StepGraph, drop_dead
from weft.capture.record.aot import Source, step_graph
from weft.capture.step_interface import Role
from weft.inductor.passes.decompose import decompose
from weft.inductor.runtime.aten import compile_aten

Tensor = torch.Tensor
aten = torch.ops.aten
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> StepGraph:
    module = make_fx(lambda *given: function(*given), tracing_mode="fake")(*inputs)
    return step_graph(module, [Source(f"x{at}", Role.BATCH) for at in range(len(inputs))])[0]


def is_whole(step: StepGraph) -> bool:
    return any("convolution" in str(node.target) for node in step.graph.nodes)


def forward(stride: list[int], **options: Any) -> Callable[..., Any]:
    given = {"padding": 0, "dilation": 1, "transposed": False, "output_padding": 0, "groups": 1, **options}
    dims = lambda key: [given[key]] * len(stride)

    def function(image: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        middle = dims("padding"), dims("dilation"), given["transposed"], dims("output_padding"), given["groups"]
        return (aten.convolution(image, weight, bias, stride, *middle),)

    return function


def backward(
    stride: list[int], mask: tuple[bool, bool, bool] = (True, True, True), dilation: int = 1
) -> Callable[..., Any]:
    zeros = [0] * len(stride)

    def function(image: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        middle = stride, zeros, [dilation] * len(stride), False, zeros, 1
        made = aten.convolution_backward(grad, image, weight, [bias.shape[0]], *middle, list(mask))
        return tuple(result for result, wanted in zip(made, mask, strict=True) if wanted)

    return function


def operands(image_layout: str, weight_layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Small whole numbers: sums are exact in bfloat16's float32, whatever their order."""
    whole = lambda *sizes: torch.randint(-3, 4, sizes).to(torch.bfloat16)
    image = whole(3, 5, 8, 12).to(memory_format=LAYOUTS[image_layout])
    weight = whole(6, 5, 4, 2).to(memory_format=LAYOUTS[weight_layout])
    return image, weight, whole(6)


@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("image_layout", LAYOUTS)
def test_the_gemm_equals_the_convolution(image_layout: str, weight_layout: str) -> None:
    given = operands(image_layout, weight_layout)
    step = decompose(graph_of(forward([4, 2]), *given)).check()
    assert not is_whole(step)
    (found,) = compile_aten(step)(*given)
    (wanted,) = forward([4, 2])(*given)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (True, False, False)])
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("image_layout", LAYOUTS)
def test_gradients_by_gemm_equal_those_of_the_convolution(
    image_layout: str, weight_layout: str, grad_layout: str, mask: tuple[bool, bool, bool]
) -> None:
    image, weight, bias = operands(image_layout, weight_layout)
    grad = torch.randint(-3, 4, (3, 6, 2, 6)).to(torch.bfloat16).to(memory_format=LAYOUTS[grad_layout])
    given = image, weight, bias, grad
    step = graph_of(backward([4, 2], mask), *given)
    drop_dead(step.graph)  # gradients not asked for, which a capture leaves out
    step = decompose(step).check()
    wanted = backward([4, 2], mask)(*(t.double() for t in given))
    for one, other in zip(compile_aten(step)(*given), wanted, strict=True):
        assert torch.equal(one, other.to(torch.bfloat16))
    if image_layout == weight_layout == grad_layout:
        assert not is_whole(step)


def test_one_dimensional_convolutions_become_gemms() -> None:
    given = (
        torch.randint(-3, 4, (2, 3, 20)).half(),
        torch.randint(-3, 4, (4, 3, 5)).half(),
        torch.randint(-3, 4, (4,)).half(),
    )
    step = decompose(graph_of(forward([5]), *given)).check()
    assert not is_whole(step)
    assert torch.equal(compile_aten(step)(*given)[0], forward([5])(*given)[0])


@pytest.mark.parametrize(
    ("window", "stride", "options", "dtype"),
    [
        ((3, 3), [2, 2], {}, torch.bfloat16),  # windows overlap
        ((2, 2), [3, 3], {}, torch.bfloat16),  # and have gaps between them
        ((2, 2), [2, 2], {"padding": 1}, torch.bfloat16),
        ((2, 2), [2, 2], {"dilation": 2}, torch.bfloat16),  # they reach into each other
        ((2, 2), [2, 2], {"groups": 2}, torch.bfloat16),
        ((5, 5), [5, 5], {}, torch.bfloat16),  # a rest of the image is in none
        ((1, 1), [1, 1], {}, torch.bfloat16),
        ((2, 2), [2, 2], {}, torch.float32),
    ],
)
def test_convolutions_with_overlapping_windows_stay(
    window: tuple[int, int], stride: list[int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    given = (
        torch.randn(2, 4, 12, 12, dtype=dtype),
        torch.randn(6, 4 // options.get("groups", 1), *window, dtype=dtype),
        torch.randn(6, dtype=dtype),
    )
    assert is_whole(decompose(graph_of(forward(stride, **options), *given)).check())


def test_gradients_of_dilated_convolutions_stay() -> None:
    given = [torch.randn(2, 4, 12, 12), torch.randn(6, 4, 2, 2), torch.randn(6), torch.randn(2, 6, 5, 5)]
    halves = [tensor.bfloat16() for tensor in given]
    assert is_whole(decompose(graph_of(backward([2, 2], dilation=2), *halves)).check())
