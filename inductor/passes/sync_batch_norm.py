"""The kernels of ``torch.nn.SyncBatchNorm`` by simpler operations, so that generated kernels fuse them with others.

Between them, ranks exchange the sums of their parts of the batch, which stays as it is. The small kernel that combines
the statistics of all ranks stays too: it has a row for each rank with a batch, and only the data decides how many.
Everything is computed in float32 for halves, as in ``aten/src/ATen/native/cuda/Normalization.cuh``.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.torch_adapter import OpOverload

aten = torch.ops.aten

Tensor = torch.Tensor


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of each channel of this rank's part."""
    var, mean = aten.var_mean.correction(_wide(x), _without_channels(x), correction=0)
    return mean, aten.rsqrt.default(var + eps)


def _elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    """The normalized input."""
    out = (_wide(x) - _per_channel(mean, x)) * _per_channel(invstd, x)
    if weight is not None:
        out = out * _per_channel(weight, x)
    if bias is not None:
        out = out + _per_channel(bias, x)
    return _cast(out, x.dtype)


def _backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    """The sums of the gradient, and of it times the deviation from the mean; the gradients of weight and bias."""
    of_input, of_weight, of_bias = wanted
    grad, dims = _wide(grad), _without_channels(x)
    dtype = x.dtype if weight is None else weight.dtype
    total = aten.sum.dim_IntList(grad, dims)
    by_deviation = aten.sum.dim_IntList(grad * (_wide(x) - _per_channel(mean, x)), dims)
    return (
        total if of_input else None,
        by_deviation if of_input else None,
        _cast(by_deviation * invstd, dtype) if of_weight else None,
        _cast(total, dtype) if of_bias else None,
    )


def _backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    total: Tensor,
    by_deviation: Tensor,
    counts: Tensor,
) -> Tensor:
    """The gradient of the input. ``total`` and ``by_deviation`` are sums over all ranks, ``counts`` their elements of a
    channel."""
    count = _cast(aten.sum.default(counts), mean.dtype)
    slope = _per_channel(invstd * invstd * by_deviation / count, x)
    out = _wide(grad) - _per_channel(total / count, x) - (_wide(x) - _per_channel(mean, x)) * slope
    scale = invstd if weight is None else invstd * weight
    return _cast(out * _per_channel(scale, x), x.dtype)


def _wide(x: Tensor) -> Tensor:
    return _cast(x, torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view([-1, *[1] * (x.dim() - 2)])


def _without_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


DECOMPOSITIONS: dict[OpOverload, Any] = {
    aten.batch_norm_stats.default: _stats,
    aten.batch_norm_elemt.default: _elemt,
    aten.batch_norm_backward_reduce.default: _backward_reduce,
    aten.batch_norm_backward_elemt.default: _backward_elemt,
}
