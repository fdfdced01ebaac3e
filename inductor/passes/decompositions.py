"""The table of decompositions that :mod:`weft.inductor.passes.decompose` applies.

Most entries are torch's own. Operations that have a lowering stay whole (norms, softmax, cross-entropy, gelu, silu,
sums). So do library calls (GEMMs, attention, and convolutions except those of :mod:`weft.inductor.passes.im2col`),
random numbers, sorting and indexing. Functions of halves that have no lowering are computed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

from weft.inductor.passes import im2col, sync_batch_norm
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
prims = torch.ops.prims

Decomposition = Callable[..., Any]

_AS_TORCH_DOES = [
    # arithmetic
    *(aten.addcmul.default, aten.addcdiv.default, aten.lerp.Scalar, aten.lerp.Tensor),
    *(aten.rsub.Scalar, aten.rsub.Tensor, aten.xlogy.Tensor, aten.nan_to_num.default),
    *(aten.logaddexp.default, aten.logsumexp.default, aten.logit.default, aten.logit_backward.default),
    *(aten.heaviside.default, aten.special_entr.default, aten.sinc.default, aten.frac.default),
    # activations
    *(aten.celu.default, aten.elu_backward.default, aten.glu.default, aten.glu_backward.default),
    *(aten.hardshrink.default, aten.softshrink.default, aten.hardsigmoid.default, aten.hardsigmoid_backward.default),
    *(aten.hardswish.default, aten.hardswish_backward.default, aten.hardtanh_backward.default),
    *(aten.leaky_relu_backward.default, aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default),
    *(aten.mish.default, aten.mish_backward.default, aten.selu.default, aten.sigmoid_backward.default),
    *(aten.softplus.default, aten.softplus_backward.default, aten.tanh_backward.default, aten.threshold.default),
    *(aten.threshold_backward.default, aten._prelu_kernel.default, aten._prelu_kernel_backward.default),
    *(aten._safe_softmax.default, aten.native_dropout_backward.default),
    # losses
    *(aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default),
    *(aten.binary_cross_entropy_with_logits.default, aten.huber_loss.default, aten.huber_loss_backward.default),
    *(aten.mse_loss.default, aten.mse_loss_backward.default),
    *(aten.smooth_l1_loss_backward.default, aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default),
    *(aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
    # norms over groups, and lengths
    *(aten.native_group_norm.default, aten.native_group_norm_backward.default),
    *(aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default),
    *(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats),
    aten.native_batch_norm_backward.default,
    *(aten._weight_norm_interface.default, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype),
    *(aten.nansum.default, aten.count_nonzero.dim_IntList),
    # shapes
    *(aten.stack.default, aten.roll.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default),
    *(aten.channel_shuffle.default, aten.select_backward.default, aten.slice_backward.default),
    *(aten.diag_embed.default, aten.diagonal_backward.default),
    *(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default),
    *(aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default),
    *(aten.upsample_bilinear2d.default, aten.repeat.default),
    # values put where others were
    *(aten.masked_fill.Scalar, aten.masked_fill.Tensor),
]


@functools.cache
def decompositions() -> dict[OpOverload, Decomposition]:
    """For each operation that is decomposed the function that computes it by simpler ones, of the same arguments."""
    by_torch: dict[Any, Decomposition] = {**get_decompositions(_AS_TORCH_DOES)}
    return {**by_torch, **_OWN}


@functools.cache
def functionalized_decompositions() -> dict[OpOverload, Decomposition]:
    """The same for operations that write arguments without saying so: results are followed by the written values."""
    return {aten.native_batch_norm.default: _native_batch_norm, aten.cudnn_batch_norm.default: _cudnn_batch_norm}


def _native_batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> Any:
    if running_mean is None:
        without = decompositions()[aten._native_batch_norm_legit.no_stats]
        return *without(x, weight, bias, training, momentum, eps), None, None
    functional = decompositions()[aten._native_batch_norm_legit_functional.default]
    return functional(x, weight, bias, running_mean, running_var, training, momentum, eps)


def _cudnn_batch_norm(*args: Any) -> Any:
    """cuDNN keeps scratch space for its own backward, which is not called when backward is decomposed too."""
    out, mean, rstd, running_mean, running_var = _native_batch_norm(*args)
    return out, mean, rstd, None, running_mean, running_var


def _cudnn_batch_norm_backward(
    x: Any, grad: Any, weight: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any, eps: float, reserve: Any
) -> Any:
    backward = decompositions()[aten.native_batch_norm_backward.default]
    return backward(grad, x, weight, running_mean, running_var, mean, rstd, True, eps, [True, True, True])


def _smooth_l1_loss(x: Any, target: Any, reduction: int = 1, beta: Any = 1.0) -> Any:
    if isinstance(beta, float) and not beta >= 0:
        return NotImplemented  # ATen raises
    op = aten.smooth_l1_loss.default
    return get_decompositions([op])[op](x, target, reduction, beta)


def _split(x: Any, size: Any, dim: int = 0) -> list[Any]:
    length = x.shape[dim]
    # How many there are, torch has asked in the same way: the length may be a symbol, of which nothing else is known.
    last = int((length + size - 1) // size) - 1
    return [aten.slice.Tensor(x, dim, at * size, length if at == last else (at + 1) * size) for at in range(last + 1)]


def _split_with_sizes(x: Any, sizes: list[Any], dim: int = 0) -> list[Any]:
    start, parts = 0, []
    for size in sizes:
        parts.append(aten.slice.Tensor(x, dim, start, start + size))
        start = start + size
    return parts


def _unbind(x: Any, dim: int = 0) -> list[Any]:
    return [aten.select.int(x, dim, at) for at in range(x.shape[dim])]


def _narrow(x: Any, dim: int, start: Any, length: Any) -> Any:
    return aten.slice.Tensor(x, dim, start, start + length)


def _convert_element_type(x: Any, dtype: torch.dtype) -> Any:
    return aten._to_copy.default(x, dtype=dtype)


# Functions of one tensor, element by element or along a dimension, that have no lowering.
_IN_FLOAT32 = [
    *(aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.round.decimals, aten.angle.default),
    *(aten.tan.default, aten.asin.default, aten.acos.default, aten.atan.default),
    *(aten.sinh.default, aten.cosh.default, aten.asinh.default, aten.acosh.default, aten.atanh.default),
    *(aten.erfc.default, aten.erfinv.default, aten.lgamma.default, aten.digamma.default, aten.special_log_ndtr.default),
]


def _in_float32(op: OpOverload) -> Decomposition:
    """``op`` of a half in float32, rounded once: as it would be in a generated kernel, so that a chain of operations is
    not rounded in front of it either. ATen's kernel would round each sum of a scan on GPUs."""

    def compute(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in (torch.bfloat16, torch.float16) or kwargs.get("dtype") is not None:
            return NotImplemented
        wide = aten._to_copy.default(x, dtype=torch.float32)
        return aten._to_copy.default(op(wide, *args, **kwargs), dtype=x.dtype)

    return compute


_OWN: dict[OpOverload, Decomposition] = {
    aten.smooth_l1_loss.default: _smooth_l1_loss,
    **{op: _in_float32(op) for op in _IN_FLOAT32},
    aten.convolution.default: im2col.convolution,
    aten.convolution_backward.default: im2col.convolution_backward,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.narrow.default: _narrow,
    prims.convert_element_type.default: _convert_element_type,
    **sync_batch_norm.DECOMPOSITIONS,
}
