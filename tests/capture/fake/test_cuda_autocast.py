"""Dtypes under CUDA's autocast in a fake world are those of torch's own CUDA rules, asked with fake cuda tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from weft import capture, fake_world

pytestmark = pytest.mark.fake

Operation = Callable[[torch.Tensor, torch.Tensor], Any]  # of a half and a float32 tensor, 4 x 8 both
OPERATIONS: dict[str, Operation] = {
    **{
        name: (lambda half, single, name=name: getattr(torch, name)(half))
        for name in ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal")
        + ("rsqrt", "sinh", "tan", "sum", "prod", "norm", "sin", "sigmoid", "mean", "relu")
    },
    "softplus": lambda half, single: F.softplus(half),
    "pow": lambda half, single: half**2,
    "pow of tensors": lambda half, single: half**half,
    "pow of a number": lambda half, single: 2**half,
    "layer_norm": lambda half, single: F.layer_norm(half, (8,)),
    "layer_norm with a weight": lambda half, single: F.layer_norm(half, (8,), single.select(0, 0), single.select(0, 1)),
    "group_norm": lambda half, single: F.group_norm(half, 2),
    "cosine_similarity": lambda half, single: F.cosine_similarity(half, half),
    "dist": lambda half, single: torch.dist(half, half),
    "renorm": lambda half, single: half.renorm(2, 0, 1.0),
    "logsumexp": lambda half, single: half.logsumexp(0),
    "norm by dim": lambda half, single: half.norm(2, 1),
    "vector_norm": lambda half, single: torch.linalg.vector_norm(half),
    "matrix_norm": lambda half, single: torch.linalg.matrix_norm(half),
    "upsample": lambda half, single: F.interpolate(half.reshape(1, 4, 8), scale_factor=2),
    "upsample bilinear": lambda half, single: F.interpolate(half.reshape(1, 1, 4, 8), scale_factor=2, mode="bilinear"),
    "softmax": lambda half, single: half.softmax(-1),
    "F.softmax": lambda half, single: F.softmax(half, dim=-1),
    "softmax with a dtype": lambda half, single: half.softmax(-1, dtype=torch.bfloat16),
    "log_softmax": lambda half, single: F.log_softmax(half, dim=-1),
    "cumsum": lambda half, single: half.cumsum(0),
    "cumprod": lambda half, single: half.cumprod(0),
    "sum by dim": lambda half, single: half.sum(1),
    "sum with a dtype": lambda half, single: half.sum(dtype=torch.bfloat16),
    "sum of integers": lambda half, single: (half > 0).sum(),
    "addcmul": lambda half, single: torch.addcmul(half, half, single),
    "addcdiv": lambda half, single: torch.addcdiv(single, half, half),
    "atan2": lambda half, single: torch.atan2(half, single),
    "dot": lambda half, single: torch.dot(half.select(0, 0), single.select(0, 0)),
    "scatter_add": lambda half, single: single.scatter_add(0, torch.zeros_like(half, dtype=torch.int64), half),
    "cross_entropy": lambda half, single: F.cross_entropy(half, torch.zeros_like(half.select(1, 0), dtype=torch.int64)),
    "mse_loss": lambda half, single: F.mse_loss(half, half),
    "matmul": lambda half, single: single @ single.T,
    "linear": lambda half, single: F.linear(single, single),
    "add": lambda half, single: half + half,
    "double": lambda half, single: single.double().exp(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_have_the_dtypes_of_a_gpu(name: str) -> None:
    operation = OPERATIONS[name]
    with FakeTensorMode(), torch.no_grad():
        half = torch.empty_strided((4, 8), (8, 1), dtype=torch.bfloat16, device="cuda")
        single = torch.empty_strided((4, 8), (8, 1), device="cuda")
        torch.set_autocast_enabled("cuda", True)  # the class turns itself off where there is no GPU
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            expected = operation(half, single).dtype
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)
    with fake_world(2):
        half, single = torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda"), torch.zeros(4, 8, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert operation(half, single).dtype == expected
        with torch.autocast("cuda", torch.bfloat16), torch.autocast("cuda", enabled=False):
            assert half.exp().dtype == torch.bfloat16
        assert half.exp().dtype == torch.bfloat16


def test_the_autocast_of_a_cpu_keeps_its_own_rules() -> None:
    half = torch.zeros(4, 8, dtype=torch.bfloat16)
    with fake_world(2):
        faked = torch.zeros(4, 8, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            assert faked.exp().dtype == torch.bfloat16
            assert F.layer_norm(faked, (8,)).dtype == torch.bfloat16
            assert (faked.float() @ faked.float().T).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert half.exp().dtype == F.layer_norm(half, (8,)).dtype == torch.bfloat16
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::exp", "AutocastCPU")


def test_a_region_that_is_not_left_ends_with_the_world() -> None:
    before = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    with fake_world(2):
        torch.autocast("cuda", torch.bfloat16).__enter__()
        assert torch.is_autocast_enabled("cuda")
    torch.autocast_decrement_nesting()
    assert [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")] == before


def test_a_script_sees_that_autocast_is_on_and_recomputes_under_it() -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cuda"), F.layer_norm(x, (8,)).dtype))
        return x.exp().sum()

    with fake_world(2):
        x = torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = checkpoint(block, x, use_reentrant=False)
        loss.backward()
        assert not torch.is_autocast_enabled("cuda")
    assert seen == [(True, torch.float32)] * 2


def test_a_captured_step_keeps_in_float32_what_a_gpu_does() -> None:
    with fake_world(1):
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).to("cuda")

        def step(x: torch.Tensor) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).softmax(-1).square().sum()
            loss.backward()

        graph = capture(step, torch.zeros(4, 16, device="cuda"))
    dtypes = {str(node.target): node.meta["val"] for node in graph.graph.nodes if node.op == "call_function"}
    assert dtypes["aten.native_layer_norm.default"][0].dtype == torch.float32
    assert dtypes["aten._softmax.default"].dtype == torch.float32
    assert dtypes["aten.addmm.default"].dtype == torch.bfloat16
