"""Operations that call other kernels for tensors that want no gradient: the compiled step calls those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import weft
from both_ways import assert_equal
from weft.errors import CannotCapture

torch.manual_seed(0)
LSTM = nn.LSTM(16, 24, 2)
ATTENTION = nn.MultiheadAttention(16, 2, batch_first=True).eval()
LAYER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
CAUSAL = torch.ones(20, 20).triu(1).bool()

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "an LSTM": lambda x: LSTM(x)[0],
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "eigvals": lambda x: torch.linalg.eigvals(x @ x.mT).abs(),
    "a condition number": torch.linalg.cond,
    "a nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc") + torch.norm(x, "nuc", dim=(1, 2)),
    "a spectral norm": lambda x: torch.linalg.norm(x[0], 2),
    "attention": lambda x: ATTENTION(x, x, x, need_weights=False)[0],
    "attention with a mask": lambda x: ATTENTION(x, x, x, attn_mask=CAUSAL)[0],
    "an encoder layer": LAYER,
    "an encoder layer with a mask": lambda x: LAYER(x, src_mask=CAUSAL),
}


def ordinary(operation: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    y = x.clone().requires_grad_()
    out = operation(y)
    out.sum().backward()
    return operation(x), out, y.grad


def without_grad(operation: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with torch.no_grad():
        return operation(x)


def in_inference_mode(operation: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with torch.inference_mode():
        return operation(x)


def in_an_autograd_function(operation: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return operation(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                out = operation(x)
            return torch.autograd.grad(out, x, grad)[0]

    y = x.clone().requires_grad_()
    out = Recomputed.apply(y)
    out.sum().backward()
    return out, y.grad


@pytest.mark.parametrize("way", [ordinary, without_grad, in_inference_mode, in_an_autograd_function])
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_are_those_of_eager(name: str, way: Callable[..., Any]) -> None:
    x = torch.randn(12, 20, 16)

    def step(x: Tensor) -> Any:
        return way(OPERATIONS[name], x)

    compiled = weft.compile(step)
    for _ in range(2):
        found = []
        for run in (step, compiled):
            found.append([each.detach().clone() for each in tree_leaves(run(x))])
            LSTM.zero_grad()
            ATTENTION.zero_grad()
            LAYER.zero_grad()
        assert_equal(found[1], found[0])


def test_attention_without_weights_returns_none_for_them() -> None:
    def step(x: Tensor) -> tuple[Tensor, bool]:
        with torch.no_grad():
            out, weights = ATTENTION(x, x, x, need_weights=False)
        return out, weights is None

    x = torch.randn(2, 20, 16)
    assert_equal(weft.compile(step)(x), step(x))


def test_an_encoder_that_leaves_out_padding_is_refused_with_a_remedy_that_works() -> None:
    padding = torch.tensor([[False] * 20, [False] * 15 + [True] * 5])

    def step(encoder: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return encoder(x, src_key_padding_mask=padding)

    x = torch.randn(2, 20, 16)
    encoder = nn.TransformerEncoder(LAYER, 2).eval()
    with pytest.raises(CannotCapture, match="enable_nested_tensor=False"):
        weft.compile(step)(encoder, x)
    encoder = nn.TransformerEncoder(LAYER, 2, enable_nested_tensor=False).eval()
    assert_equal(weft.compile(step)(encoder, x), step(encoder, x))
