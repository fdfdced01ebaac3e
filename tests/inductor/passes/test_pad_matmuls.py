"""Products of odd sizes: the same numbers from aligned products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.inductor.graph.retarget import retarget
from weft.inductor.graph.verify import GraphVerifier
from weft.inductor.passes.decompose import decompose
from weft.inductor.passes.pad_matmuls import pad_matmuls
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.runtime.aten import compile_aten

aten = torch.ops.aten


def products(step) -> list[tuple[int, ...]]:
    nodes = [node for node in step.graph.nodes if node.target is aten.mm.default]
    return [(*node.args[0].meta["val"].shape, node.args[1].meta["val"].shape[1]) for node in nodes]


def test_an_output_projection_with_an_odd_number_of_classes_is_padded() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5003, 256, dtype=torch.bfloat16).div_(16).requires_grad_()

    def step(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy((x @ weight.t()).float(), labels)
        dx, dw = torch.autograd.grad(loss, (x, weight))
        return loss.detach(), dx, dw

    x, labels = torch.randn(1024, 256, dtype=torch.bfloat16), torch.randint(0, 5003, (1024,))
    graph = weft.capture(step, x, labels)
    padded = run_passes(graph, [pad_matmuls])
    assert len(products(padded)) == len(products(graph)) == 3
    assert all(size % 8 == 0 for sizes in products(padded) for size in sizes)
    pads = [node for node in padded.graph.nodes if node.target is aten.constant_pad_nd.default]
    assert len(pads) == 2  # the weight, and the gradient of the logits, each once for two products
    values = {"args[0]": x, "args[1]": labels}
    inputs = [values.get(entry.path, weight.detach()) for entry in graph.inputs]
    for wanted, found in zip(compile_aten(graph)(*inputs), compile_aten(padded)(*inputs), strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-5)


def test_small_and_single_precision_products_stay() -> None:
    small = weft.capture(lambda x, y: x @ y, *(torch.randn(7, 7, dtype=torch.bfloat16) for _ in range(2)))
    single = weft.capture(lambda x, y: x @ y, torch.randn(1025, 1023), torch.randn(1023, 1025))
    for graph in (small, single):
        assert products(run_passes(graph, [pad_matmuls])) == products(graph)


def embedded(images: torch.Tensor, weight: torch.Tensor, side: int, labels: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight of a patch embedding in a small classifier."""
    rows = F.conv2d(images, weight, stride=side).flatten(2).transpose(1, 2)
    loss = F.cross_entropy(rows.float().mean(1), labels)
    (gradient,) = torch.autograd.grad(loss, weight)
    return gradient * 2.0


PATCHES = [(14, 3, 1024, 18), (7, 5, 1000, 33), (3, 11, 999, 57)]


@pytest.mark.parametrize(("side", "channels", "width", "count"), PATCHES)
def test_weight_gradients_of_patch_embeddings_match_float64(side: int, channels: int, width: int, count: int) -> None:
    """14 x 14 patches of 3 channels have 588 elements, padded to 592: views of the sliced product have wider rows."""
    torch.manual_seed(0)
    images = torch.randn(8, channels, side * count, side * count, dtype=torch.bfloat16)
    weight = torch.randn(width, channels, side, side).div_(16).bfloat16().requires_grad_()
    labels = torch.randint(0, width, (8,))
    graph = weft.capture(lambda x, y: embedded(x, weight, side, y), images, labels)
    padded = run_passes(graph, [decompose, pad_matmuls])
    assert products(padded) != products(run_passes(graph, [decompose]))
    assert all(size % 8 == 0 for sizes in products(padded) for size in sizes)

    wide = weight.detach().double().requires_grad_()
    exact = embedded(images.double(), wide, side, labels)
    eager = embedded(images, weight, side, labels)
    values = {"args[0]": images, "args[1]": labels}
    (found,) = compile_aten(padded)(*(values.get(entry.path, weight.detach()) for entry in padded.inputs))
    assert found.is_contiguous()
    error = lambda value: float((value.double() - exact).norm() / exact.norm())
    assert error(found) < 2 * error(eager) + 1e-3


def test_views_of_a_padded_product_record_its_wider_rows() -> None:
    weight = torch.randn(1024, 3, 14, 14, dtype=torch.bfloat16, requires_grad=True)
    images, labels = torch.randn(8, 3, 252, 252, dtype=torch.bfloat16), torch.randint(0, 1024, (8,))
    graph = weft.capture(lambda x, y: embedded(x, weight, 14, y), images, labels)
    padded = retarget(run_passes(graph, [decompose, pad_matmuls]), "cuda:0")
    strides = {tuple(node.meta["val"].stride()) for node in padded.graph.nodes if node.target is aten.view.default}
    assert (592, 196, 14, 1) in strides
    GraphVerifier().start(padded)
