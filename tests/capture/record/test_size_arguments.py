"""Integers that change and that functions of torch's want as sizes: classes, steps, sizes of images, exponents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twenty_calls import twenty_calls

import weft
from both_ways import both_ways, training
from weft.errors import WeftError

LABELS = torch.tensor([0, 3, 1, 5, 2, 2])
GROWING = [*range(2, 18), 1, 3, 0]
SMALL = [2 + at % 5 for at in range(20)]
SIGNED = [at % 9 - 5 for at in range(20)]
image = lambda y: y.reshape(1, 2, 3, 8)

FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], list[int]]] = {
    "one_hot": (lambda y, n: y.sum(1, keepdim=True) * F.one_hot(LABELS, n), [*range(6, 26)]),
    "one_hot by name": (lambda y, n: y.sum() * F.one_hot(LABELS, num_classes=n), [*range(6, 26)]),
    "linspace": (lambda y, n: y.sum() * torch.linspace(0, 1, n), GROWING),
    "linspace between numbers that change": (lambda y, n: y.sum() * torch.linspace(-n, n / 3, n + 2), GROWING),
    "linspace in float64": (lambda y, n: y.sum() * torch.linspace(0, 1, steps=n, dtype=torch.float64), GROWING),
    "logspace": (lambda y, n: y.sum() * torch.logspace(0, 1, n), GROWING),
    "arange": (lambda y, n: y.sum() * torch.arange(1, n + 3, 2), GROWING),
    "eye and full": (lambda y, n: y.sum() * torch.eye(n + 2) * torch.full((n + 2,), n), GROWING),
    "interpolate": (lambda y, n: F.interpolate(image(y)[0], n), GROWING[:16]),
    "interpolate by lines": (lambda y, n: F.interpolate(image(y)[0], size=n, mode="linear"), GROWING[:16]),
    "interpolate exactly": (lambda y, n: F.interpolate(image(y), (n, 2 * n), mode="nearest-exact"), GROWING[:16]),
    "interpolate an image": (lambda y, n: F.interpolate(image(y), size=(n, 4), mode="bilinear"), GROWING[:16]),
    "interpolate corners": (
        lambda y, n: F.interpolate(image(y), size=n, mode="bicubic", align_corners=True),
        GROWING[:16],
    ),
    "interpolate smoothly": (
        lambda y, n: F.interpolate(image(y), size=n, mode="bilinear", antialias=True),
        GROWING[:16],
    ),
    "interpolate channels last": (
        lambda y, n: F.interpolate(image(y).contiguous(memory_format=torch.channels_last), size=n, mode="bilinear"),
        GROWING[:16],
    ),
    "interpolate a volume": (lambda y, n: F.interpolate(image(y)[None], size=n, mode="trilinear"), SMALL),
    "power": (lambda y, n: y**n + torch.pow(y, n) + y.pow(exponent=2), [2, 3, 4, -1, -2, 5, 1, 0]),
    "repeat": (lambda y, n: y.repeat(n, 1), SMALL),
    "tril": (lambda y, n: torch.tril(y, diagonal=n) + torch.triu(y, n), SIGNED),
    "pad": (lambda y, n: F.pad(y, (n, 1, 2, n), value=1.5), SMALL),
    "roll": (lambda y, n: torch.roll(y, n, 0) + torch.roll(y, n), SIGNED),
    "topk": (lambda y, n: y.topk(n, -1).values + y.kthvalue(n).values[:, None], SMALL),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_integer_that_changes_is_one_capture(name: str) -> None:
    """A size of 0 or 1, and a power of 0, are graphs of their own."""
    function, values = FUNCTIONS[name]
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    make = training(lambda net, x, n: function(net(x), n).pow(2).sum(), lambda: nn.Linear(8, 8))
    step = both_ways(make, [(x, value) for value in values], captures=None)
    assert len(step.captures) <= 3 + len({0, 1}.intersection(values)), step.captures


TENSORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "one_hot": lambda x, n: F.one_hot(LABELS, n + 4).sum() * x,
    "linspace": lambda x, n: torch.linspace(0, 1, n).sum() * x,
    "interpolate": lambda x, n: F.interpolate(x[None], n),
    "interpolate an image": lambda x, n: F.interpolate(x[None, None], (n, n + 2), mode="bilinear"),
    "tensor_split": lambda x, n: [part * 2 for part in x.tensor_split(torch.stack([n, n + 1]))],
    "tensor_split by name": lambda x, n: torch.tensor_split(x, tensor_indices_or_sections=n.view(1), dim=1)[1] * 2,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_size_in_a_tensor_is_one_capture(name: str) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    twenty_calls(lambda: TENSORS[name], lambda at: (x, torch.tensor(2 + at % 5)), 1)


WEIGHT = torch.linspace(0.5, 1, 5)
# Of rows, of which each call has another number, and of a layer of 8 inputs and 5 outputs.
PRODUCTS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "a layer": lambda x, layer: layer(x),
    "a layer of strided rows": lambda x, layer: layer(x.transpose(0, 1)),
    "weights": lambda x, layer: x @ layer.weight.t(),
    "weights without gradients": lambda x, layer: x.matmul(layer.weight.detach().t()) * layer.bias,
    "a vector": lambda x, layer: torch.matmul(x, layer.weight[0].detach()) * layer.bias[0],
    "rows": lambda x, layer: layer(x) @ layer(x).mT,
    "a power": lambda x, layer: torch.linalg.matrix_power(x.mT @ x, 3) + layer.bias[0],
    "attention": lambda x, layer: F.scaled_dot_product_attention(*[layer(x)[:, None]] * 3, attn_mask=torch.eye(4)),
    "attention with a mask that is trained": lambda x, layer: F.scaled_dot_product_attention(
        *[x[:, None]] * 3, attn_mask=layer.weight[:4, :4]
    ),
    "probabilities": lambda x, layer: F.cross_entropy(layer(x[:, 0]), x[:, 1, :5].softmax(1)),
    "smoothed probabilities": lambda x, layer: F.cross_entropy(
        layer(x).mT, x[..., :5].softmax(2).mT, weight=WEIGHT, reduction="none", label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("of_data", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_captured_once_for_all_numbers_of_rows(name: str, of_data: bool) -> None:
    """torch 2.11 multiplies in C++ that wants sizes as integers."""
    rows = torch.randn(12, 4, 8, generator=torch.Generator().manual_seed(1))

    def loss(layer: nn.Linear, x: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        return PRODUCTS[name](x if kept is None else x[kept], layer).square().sum()

    calls = [(rows, torch.arange(12) < at) if of_data else (rows[:at],) for at in (5, 7, 3, 12, 6)]
    both_ways(training(loss, lambda: nn.Linear(8, 5)), calls, captures=1 if of_data else 2)


WRONG: dict[str, tuple[Callable[[int], Any], int]] = {
    "a class too many": (lambda n: F.one_hot(LABELS, n), 4),
    "no classes": (lambda n: F.one_hot(LABELS, n), 0),
    "a negative class": (lambda n: F.one_hot(LABELS - 1, n), 9),
    "a negative class of as many as there are": (lambda n: F.one_hot(LABELS - 9 + n), 7),
    "less than no classes": (lambda n: F.one_hot(LABELS, n), -2),
    "fewer than no steps": (lambda n: torch.linspace(0, 1, n), -3),
    "no size": (lambda n: F.interpolate(torch.ones(1, 2, 3), n), 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_integers_raise_as_in_eager(name: str) -> None:
    """For a class that there is not, torch's rule for fake tensors gives zeros, and eager an error."""
    function, wrong = WRONG[name]
    step = weft.compile(function)
    for n in (7, 8, 9):
        if "negative" not in name:
            assert torch.equal(step(n), function(n))
    with pytest.raises((RuntimeError, ValueError)):
        function(wrong)
    with pytest.raises((RuntimeError, ValueError, WeftError)):
        step(wrong)
    with pytest.raises((RuntimeError, ValueError, WeftError)):
        weft.compile(function)(wrong)
