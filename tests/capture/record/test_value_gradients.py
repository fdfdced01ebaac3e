"""Gradients for which torch looks at the values of tensors: those of eager at each call, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from both_ways import both_ways

MASK = torch.rand(3, 4) > 0.5

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": torch.prod,
    "a product in float64": lambda x: x.prod(dtype=torch.float64),
    "a product of columns": lambda x: x.prod(0),
    "a product of rows": lambda x: x.prod(-1, keepdim=True),
    "a product of a transposed matrix": lambda x: x.T.prod() + x.T.prod(0).sum(),
    "a product of complex numbers": lambda x: torch.complex(x, x.roll(1, 0)).prod().abs(),
    "a product of windows": lambda x: x.unfold(1, 2, 1).prod(-1),
    "a masked product": lambda x: torch.masked.prod(x, 1, mask=MASK),
    "a product in a checkpoint": lambda x: checkpoint(lambda y: (y * 2).prod(0), x, use_reentrant=False),
    "cumulative products": lambda x: x.cumprod(1),
    "a maximum": torch.max,
    "a minimum": torch.min,
    "a median": torch.median,
    "a median without NaN": torch.nanmedian,
    "a filled mask": lambda x: x.masked_fill(MASK, x.sum()) * x,
    "a mask filled in place": lambda x: (x * 2).masked_fill_(MASK, x.sum()) * x,
}


def _calls(dtype: torch.dtype) -> list[tuple[Tensor]]:
    """Without zeros, with one, with several in one row, all the same, with zeros in several rows."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(3, 4, generator=generator, dtype=dtype) for _ in range(5)]
    tensors[1][1, 2] = 0
    tensors[2][0, 1] = tensors[2][0, 3] = tensors[2][2, 1] = 0
    tensors[3][:] = 1.5
    tensors[4][0] = 0
    return [(tensor,) for tensor in (*tensors, tensors[0])]


def _bits(gradient: Tensor) -> Tensor:
    """So that 0.0 and -0.0 are two values."""
    return gradient.contiguous().view(torch.int64 if gradient.dtype == torch.float64 else torch.int32)


PRODUCTS_IN_OTHER_DTYPES: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "a product": (torch.bfloat16, lambda x: x.prod(dtype=torch.float32)),
    "a product of rows": (torch.bfloat16, lambda x: x.prod(-1, dtype=torch.float32)),
    "cumulative products": (torch.bfloat16, lambda x: x.cumprod(-1, dtype=torch.float32)),
    "cumulative products in float64": (torch.float32, lambda x: x.cumprod(-1, dtype=torch.float64)),
    "cumulative products in float32": (torch.float64, lambda x: x.cumprod(-1, dtype=torch.float32)),
}


@pytest.mark.parametrize("name", PRODUCTS_IN_OTHER_DTYPES)
def test_gradients_of_products_in_another_dtype_have_the_bits_of_eager(name: str) -> None:
    dtype, operation = PRODUCTS_IN_OTHER_DTYPES[name]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (operation(x.to(dtype)) * weight).sum()

    def step(loss: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        loss(leaf, weight).backward()
        return leaf.grad

    compiled, by_torch = weft.compile(partial(step, loss)), torch.compile(loss, backend="weft")
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(5, 5, generator=generator), torch.randn(5, generator=generator)
        x[1, 2 : 2 + seed // 2] = 0
        try:
            expected = _bits(step(loss, x, weight))
        except RuntimeError:
            assert seed > 1  # torch 2.11 has no gradient for zeros among cumulative products in another dtype
            continue
        assert torch.equal(_bits(compiled(x, weight)), expected)
        assert torch.equal(_bits(step(by_torch, x, weight)), expected)


def _step(operation: Callable[[Tensor], Tensor], gradient: float) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        leaf = x.clone().requires_grad_()
        out = operation(leaf)
        weights = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape)
        (out * weights).sum().backward(torch.tensor(gradient, dtype=out.dtype))
        return out.detach(), leaf.grad, _bits(leaf.grad)

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_have_the_bits_of_eager(name: str, dtype: torch.dtype) -> None:
    for gradient in (-1.0, float("inf")):
        both_ways(lambda gradient=gradient: (_step(OPERATIONS[name], gradient), []), _calls(dtype))


@pytest.mark.parametrize(
    "name", ["a product", "a product of rows", "cumulative products", "a maximum", "a filled mask"]
)
def test_so_do_gradients_of_gradients(name: str) -> None:
    def step(x: Tensor) -> Any:
        leaf = x.clone().requires_grad_()
        out = OPERATIONS[name](leaf).sum()
        (first,) = torch.autograd.grad(out, leaf, create_graph=True)
        (first.pow(2).sum() + out).backward()
        return first.detach(), leaf.grad, _bits(leaf.grad)

    both_ways(lambda: (step, []), _calls(torch.float32), captures=None)


def test_hooks_on_their_nodes_are_not_counted() -> None:
    compiled = weft.compile(_step(torch.prod, 1.0), verify=True)
    for (x,) in _calls(torch.float32):
        compiled(x)


def test_gradients_of_parameters_accumulate() -> None:
    def make() -> Any:
        weight = torch.nn.Parameter(torch.ones(3, 4))

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                weight.copy_(x)
            (weight.prod(1).sum() + weight.max() - weight.prod()).backward()
            return weight.grad.clone()

        return step, [weight]

    both_ways(make, _calls(torch.float32), captures=2)


EIGENVECTORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "of a Hermitian matrix": (lambda x: torch.linalg.eigh(x @ x.mH)[1], "linalg_eigh_backward"),
    "of a complex matrix": (lambda x: torch.linalg.eig(x)[1], "linalg_eig_backward"),
    "of a real matrix": (lambda x: torch.linalg.eig(x.real)[1], "linalg_eig_backward"),
    "of singular values": (lambda x: torch.linalg.svd(x)[0] * torch.linalg.svd(x)[2], "svd_backward"),
}


@pytest.mark.parametrize("name", EIGENVECTORS)
def test_a_loss_that_depends_on_the_phases_of_eigenvectors_raises_as_in_eager(name: str) -> None:
    vectors_of, function = EIGENVECTORS[name]
    generator = torch.Generator().manual_seed(1)
    matrices = [torch.randn(3, 3, generator=generator, dtype=torch.complex128) for _ in range(3)]

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        def step(x: Tensor, share: Tensor) -> Any:
            leaf = x.clone().requires_grad_()
            vectors = vectors_of(leaf)
            loss = vectors.abs().pow(3).sum() + share * vectors.sum().abs()
            loss.backward()
            return leaf.grad

        step, results = wrap(step), []
        for share in (0.0, 1.0, 0.0):
            captures.append(len(getattr(step, "captures", [])))
            for matrix in matrices:
                try:
                    results.append(step(matrix, torch.tensor(share, dtype=torch.float64)).tolist())
                except RuntimeError as error:
                    results.append(str(error).partition("\n")[0])
        return results

    captures: list[int] = []
    ours, eager = run(weft.compile), run(lambda step: step)
    assert ours == eager
    assert captures[1] <= 1  # nothing but the outcome that raises is captured anew
    raised = [str(each).startswith(function) for each in eager]  # real eigenvectors have no phases
    assert any(raised[3:6])
    assert not any(raised[:3] + raised[6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_gradients_of_determinants_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    def step(x: Tensor) -> Any:
        leaf = x.clone().requires_grad_()
        out = torch.linalg.det(leaf).abs().sum()
        (first,) = torch.autograd.grad(out, leaf, create_graph=True)
        (first.abs().pow(2).sum() + out).backward()
        return first.detach(), leaf.grad

    generator = torch.Generator().manual_seed(1)
    matrices = [torch.randn(2, 3, 3, generator=generator, dtype=dtype) for _ in range(4)]
    matrices[2][:, 0] = matrices[2][:, 1]
    both_ways(lambda: (step, []), [(matrix,) for matrix in matrices], captures=None)
