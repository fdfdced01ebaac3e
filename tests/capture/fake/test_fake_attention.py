"""Attention in a fake world is one operation, with dropout and masks too, as on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.capture.record.tracer import capture_step
from weft.inductor.graph.retarget import retarget


def attention(
    how: dict[str, Any], key_heads: int = 4, gpu: bool = False, autocast: bool = False
) -> list[torch.fx.Node]:
    """The operations of attention forward and backward on [2, 32, 4, 64] bfloat16, whose heads are the dimension 2."""
    with weft.fake_world(1):
        heads = (4, key_heads, key_heads)
        tensors = [torch.randn(2, 32, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in heads]

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                out = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in tensors), **how)
            out.transpose(1, 2).flatten(2).square().sum().backward()

        graph = capture_step(step).graph
        if gpu:
            graph = retarget(graph)
        assert [tensor.grad for tensor in tensors] == [None] * 3
    return [node for node in graph.graph.nodes if node.op == "call_function" and "." in str(node.target)]


def names(nodes: list[torch.fx.Node]) -> Counter[str]:
    return Counter(str(node.target).split(".")[1] for node in nodes)


def operations(how: dict[str, Any], key_heads: int = 4, gpu: bool = False) -> Counter[str]:
    return names(attention(how, key_heads, gpu))


MASK = torch.ones(32, 32, dtype=torch.bool).tril()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True}, {"attn_mask": MASK}, {"attn_mask": MASK.to(torch.bfloat16)}, {"scale": 0.5}]
)
def test_attention_is_one_operation(how: dict[str, Any], dropout: float) -> None:
    found = operations({**how, "dropout_p": dropout})
    assert found["_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert found["_scaled_dot_product_flash_attention_for_cpu_backward"] == 1
    assert not {"bmm", "mm", "baddbmm", "_softmax"} & found.keys()


@pytest.mark.parametrize("mask", [MASK.t(), torch.zeros(32, 32, dtype=torch.bfloat16).t(), torch.zeros(32, 32).t()])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("learnt", [False, True])
def test_a_strided_mask_selects_the_math_backend_as_on_a_gpu(mask: torch.Tensor, autocast: bool, learnt: bool) -> None:
    if mask.dtype is torch.float32 and not autocast:
        pytest.skip("eager refuses such a mask of bfloat16 queries")
    if learnt and not mask.is_floating_point():
        pytest.skip("a mask of booleans is not learnt")
    nodes = attention({"attn_mask": mask.clone().requires_grad_(learnt)}, autocast=autocast)
    found = names(nodes)
    assert found["bmm"] == 6  # scores and outputs, and two gradients of each
    assert not [name for name in found if "scaled_dot_product" in name]
    products = [node for node in nodes if node.target is torch.ops.aten.bmm.default]
    assert {node.meta["val"].dtype for node in products} == {torch.float32}


def test_key_heads_are_shared() -> None:
    found = operations({"dropout_p": 0.1, "enable_gqa": True}, key_heads=2)
    assert found["_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert "bmm" not in found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_a_gpu_it_is_cudnns(dropout: float) -> None:
    found = operations({"dropout_p": dropout, "is_causal": True}, gpu=True)
    assert found["_scaled_dot_product_cudnn_attention"] == found["_scaled_dot_product_cudnn_attention_backward"] == 1


def test_the_gradients_have_the_sizes_of_their_tensors() -> None:
    with weft.fake_world(1):
        query, key = (torch.randn(2, 4, n, 64, device="cuda", requires_grad=True) for n in (16, 32))
        out = F.scaled_dot_product_attention(query, key, key, dropout_p=0.5)
        out.sum().backward()
        assert out.shape == query.shape
        assert query.grad is not None
        assert key.grad is not None
        assert (query.grad.shape, key.grad.shape) == (query.shape, key.shape)


def test_a_mask_that_is_learnt_gets_a_gradient() -> None:
    with weft.fake_world(1):
        query = torch.randn(2, 4, 16, 64, device="cuda", requires_grad=True)
        bias = torch.zeros(4, 16, 16, device="cuda", requires_grad=True)
        F.scaled_dot_product_attention(query, query, query, bias, dropout_p=0.5).sum().backward()
        assert bias.grad is not None
        assert bias.grad.shape == bias.shape
