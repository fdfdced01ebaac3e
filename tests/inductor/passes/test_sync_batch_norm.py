"""Batch norms over ranks by simpler operations, against torch's batch norm of the whole batch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.inductor.passes.sync_batch_norm import DECOMPOSITIONS

aten = torch.ops.aten
EPS = 1e-3


def combined(stats: list[tuple[torch.Tensor, torch.Tensor]], counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse deviation of all parts, as the kernel between the ranks gives them."""
    means = torch.stack([mean for mean, _ in stats])
    variances = torch.stack([invstd.pow(-2) - EPS for _, invstd in stats])
    parts = counts[:, None].double() / counts.sum()
    mean = (parts * means).sum(0)
    return mean, (parts * (variances + (means - mean).square())).sum(0).add(EPS).rsqrt()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("sizes", [(5, 3), (4, 3, 6), (3, 4, 2, 5), (2, 3, 2, 2, 3)])
def test_parts_of_two_ranks_are_normalized_as_the_whole_batch(sizes: tuple[int, ...], affine: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [
        torch.randn((rows, *sizes[1:]), generator=draw, dtype=torch.float64) * 3 + 10
        for rows in (sizes[0], sizes[0] + 2)
    ]
    grads = [torch.randn(part.shape, generator=draw, dtype=torch.float64) for part in parts]
    weight, bias = torch.randn(2, sizes[1], generator=draw, dtype=torch.float64) if affine else (None, None)
    whole = torch.cat(parts).requires_grad_()
    learnt = [each.requires_grad_() for each in (weight, bias) if each is not None]
    expected = F.batch_norm(whole, None, None, weight, bias, training=True, eps=EPS)
    of_whole, *of_learnt = torch.autograd.grad(expected, (whole, *learnt), torch.cat(grads))

    run = DECOMPOSITIONS
    with torch.no_grad():
        counts = torch.tensor([part.numel() // part.shape[1] for part in parts], dtype=torch.int32)
        mean, invstd = combined([run[aten.batch_norm_stats.default](part, EPS) for part in parts], counts)
        out = [run[aten.batch_norm_elemt.default](part, weight, bias, mean, invstd, EPS) for part in parts]
        reduced = [
            run[aten.batch_norm_backward_reduce.default](grad, part, mean, invstd, weight, True, affine, affine)
            for grad, part in zip(grads, parts, strict=True)
        ]
        sums = [reduced[0][at] + reduced[1][at] for at in range(2)]
        back = [
            run[aten.batch_norm_backward_elemt.default](grad, part, mean, invstd, weight, *sums, counts)
            for grad, part in zip(grads, parts, strict=True)
        ]
    torch.testing.assert_close(torch.cat(out), expected.detach())
    torch.testing.assert_close(torch.cat(back), of_whole)
    found = [reduced[0][at] + reduced[1][at] for at in (2, 3)] if affine else []
    torch.testing.assert_close(found, of_learnt)
    assert affine or reduced[0][2:] == (None, None)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32(half: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(8, 4, 3, generator=draw).add(5).to(half) for _ in range(2))
    weight = torch.ones(4)
    run = DECOMPOSITIONS
    mean, invstd = run[aten.batch_norm_stats.default](x, EPS)
    assert mean.dtype == invstd.dtype == torch.float32
    torch.testing.assert_close(mean, x.double().mean((0, 2)).float())
    out = run[aten.batch_norm_elemt.default](x, weight, None, mean, invstd, EPS)
    assert out.dtype == half
    sums = run[aten.batch_norm_backward_reduce.default](grad, x, mean, invstd, weight, True, True, True)
    assert [each.dtype for each in sums] == [torch.float32] * 4
    torch.testing.assert_close(sums[0], grad.double().sum((0, 2)).float())
    counts = torch.tensor([24], dtype=torch.int32)
    back = run[aten.batch_norm_backward_elemt.default](grad, x, mean, invstd, weight, *sums[:2], counts)
    assert back.dtype == half
