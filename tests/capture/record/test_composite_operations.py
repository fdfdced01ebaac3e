"""Views and casts that torch makes by other operations are recorded as those, whether torch takes them apart or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from both_ways import assert_equal


def names(graph: Any) -> list[str]:
    return [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]


def composed(x: Tensor, weight: Tensor) -> Tensor:
    left, right = torch.mm(x, weight).chunk(2, dim=1)
    return (left * right).to(torch.float64).reshape(2, 2, 4).flatten(1).expand_as(x.new_empty(2, 8))


class BelowAutograd(torch.autograd.Function):
    """Its forward runs below torch's autograd layer, which takes such operations apart elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return composed(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


def test_the_graph_is_the_same_below_autograd_and_in_inference_mode() -> None:
    x, weight = torch.randn(4, 6), torch.randn(6, 8)
    ordinary = names(weft.capture(composed, x, weight))
    assert "split.Tensor" in ordinary
    assert not {"chunk.default", "reshape.default", "to.dtype", "expand_as.default"} & set(ordinary)

    def below(x: Tensor, weight: Tensor) -> Tensor:
        return BelowAutograd.apply(x.requires_grad_(), weight)

    def inference(x: Tensor, weight: Tensor) -> Tensor:
        with torch.inference_mode():
            return composed(x, weight)

    assert [name for name in names(weft.capture(below, x, weight)) if name != "view_as.default"] == ordinary
    assert names(weft.capture(inference, x.detach(), weight)) == ordinary


LSTM = nn.LSTM(6, 5, 2, dropout=0.4)
OTHERS: dict[str, Any] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "an LSTM with dropout": lambda x: LSTM(x)[0],
    "interpolation": lambda x: F.interpolate(x[:, None], scale_factor=1.7, mode="bilinear"),
    "singular values": lambda x: torch.linalg.svdvals(x),
    "a backward": lambda x: torch.ops.aten.silu_backward(x, x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_eagers_bits_and_random_numbers_in_inference_mode(name: str) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            return OTHERS[name](x), torch.rand(3)

    x, results = torch.linspace(-1, 1, 72).reshape(3, 4, 6), []
    for run in (step, weft.compile(step)):
        torch.manual_seed(0)
        results.append([run(x) for _ in range(2)])
    assert_equal(*results)


def test_numbers_that_vmap_casts_are_tensors_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.knobs, "strict", True)  # a pass that fails raises
    x = torch.rand(3, dtype=torch.bfloat16)
    step = lambda x: torch.vmap(lambda each: each * 2.7 + 1)(x)
    assert_equal(weft.compile(step)(x), step(x))
