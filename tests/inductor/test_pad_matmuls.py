"""Products of odd sizes: the same numbers from aligned products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import weft
from weft.inductor.passes.pad_matmuls import pad_matmuls
from weft.inductor.passes.pipeline import run_passes
from weft.inductor.runtime.aten import compile_aten

aten = torch.ops.aten


def products(step) -> list[tuple[int, ...]]:
    nodes = [node for node in step.graph.nodes if node.target is aten.mm.default]
    return [(*node.args[0].meta["val"].shape, node.args[1].meta["val"].shape[1]) for node in nodes]


def test_a_head_with_an_odd_number_of_classes() -> None:
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
