"""Operations that torch computes by others are recorded as those, whether torch takes them apart first or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from both_ways import assert_equal


def names(graph: Any) -> list[str]:
    return [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]


def composed(x: Tensor, weight: Tensor) -> Tensor:
    left, right = F.linear(x, weight).chunk(2, dim=1)
    return torch.where((left > 0) | (right > 0), left, right).to(torch.float64).expand_as(left)


class BelowAutograd(torch.autograd.Function):
    """Its forward runs below torch's autograd layer, which takes such operations apart elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return composed(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


def test_the_graph_is_the_same_below_autograd_and_in_inference_mode() -> None:
    x, weight = torch.randn(4, 6), torch.randn(8, 6)
    ordinary = names(weft.capture(composed, x, weight))
    assert "split.Tensor" in ordinary
    assert not {"chunk.default", "linear.default", "to.dtype", "expand_as.default"} & set(ordinary)

    def below(x: Tensor, weight: Tensor) -> Tensor:
        return BelowAutograd.apply(x.requires_grad_(), weight)

    def inference(x: Tensor, weight: Tensor) -> Tensor:
        with torch.inference_mode():
            return composed(x, weight)

    assert [name for name in names(weft.capture(below, x, weight)) if name != "view_as.default"] == ordinary
    assert names(weft.capture(inference, x.detach(), weight)) == ordinary


def test_operations_with_a_kernel_of_their_own_stay_whole() -> None:
    x, grad = torch.randn(20), torch.randn(20)
    step = lambda x, grad: torch.ops.aten.silu_backward(grad, x)
    assert names(weft.capture(step, x, grad)) == ["silu_backward.default"]
    assert_equal(weft.compile(step)(x, grad), step(x, grad))
