"""Convolutions whose windows do not overlap are GEMMs.

Where the stride equals the window (the patch embedding of a vision transformer, the downsampling of ConvNeXt), every
element of the image is in exactly one window. The windows are the image in another order: one copy, which the cast of
the image makes on the way. The convolution is then windows times weights, one GEMM, and so are both gradients. cuDNN
treats this case as a general convolution with few channels, and transposes images and results around it.

Changes results: cuBLAS sums in another order. Half precision only, since torch rounds float32 GEMMs and convolutions
differently (TF32). Windows of one element are left to cuDNN, which runs them as GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def convolution(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """``aten.convolution``: ``image`` [N, C, *sizes], ``weight`` [O, C, *window]; NotImplemented for other windows."""
    if not _side_by_side(image, weight, stride, padding, dilation, transposed, groups):
        return NotImplemented
    patches = _patches(image, weight)
    flat = _rows(weight).t()
    out = aten.mm.default(patches, flat) if bias is None else aten.addmm.default(bias, patches, flat)
    out = out.view(image.shape[0], *_counts(image, weight), weight.shape[0])
    out = _channels_second(out)
    last = _is_channels_last(image) or _is_channels_last(weight)
    return out if last else aten.clone.default(out, memory_format=torch.contiguous_format)


def convolution_backward(
    grad: Tensor,
    image: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """``aten.convolution_backward``: gradients of image, weight and bias, None for those not asked for;
    NotImplemented for other windows."""
    if not _side_by_side(image, weight, stride, padding, dilation, transposed, groups):
        return NotImplemented
    rows = _channels_behind(grad).reshape(-1, weight.shape[0])
    to_image, to_weight, to_bias = output_mask
    return (
        _image_of(aten.mm.default(rows, _rows(weight)), image, weight) if to_image else None,
        _weight_of(aten.mm.default(rows.t(), _patches(image, weight)), weight) if to_weight else None,
        aten.sum.dim_IntList(rows, [0]) if to_bias else None,
    )


def _side_by_side(
    image: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> bool:
    """Whether every element of the image is in one window."""
    window, sizes = weight.shape[2:], image.shape[2:]
    half = image.dtype == weight.dtype and image.dtype in (torch.bfloat16, torch.float16)
    if not half or transposed or groups != 1 or any(padding) or any(step != 1 for step in dilation):
        return False
    if not all(type(n) is int for n in (*window, *sizes)):
        return False
    strides = [*stride] * (len(window) // len(stride))
    filled = all(size % n == 0 for size, n in zip(sizes, window, strict=True))
    ordered = weight.is_contiguous() or _is_channels_last(weight)
    return strides == [*window] and math.prod(window) > 1 and filled and ordered


# ---- between images [N, C, c1 * w1, c2 * w2] and rows [N * c1 * c2, elements of a window], which lie as in the weight


def _patches(image: Tensor, weight: Tensor) -> Tensor:
    counts, window = _counts(image, weight), weight.shape[2:]
    split = [n for pair in zip(counts, window, strict=True) for n in pair]
    parts = image.view(*image.shape[:2], *split)
    return parts.permute(_order(weight)).reshape(-1, math.prod(weight.shape[1:]))


def _image_of(patches: Tensor, image: Tensor, weight: Tensor) -> Tensor:
    counts, window, order = _counts(image, weight), weight.shape[2:], _order(weight)
    split = (*image.shape[:2], *(n for pair in zip(counts, window, strict=True) for n in pair))
    back = [order.index(dim) for dim in range(len(order))]
    parts = patches.view([split[dim] for dim in order]).permute(back)
    if not _is_channels_last(image):
        return parts.reshape(image.shape)
    n, c, *rest = range(len(split))
    return _channels_second(parts.permute(n, *rest, c).reshape(image.shape[0], *image.shape[2:], image.shape[1]))


def _order(weight: Tensor) -> list[int]:
    """The dimensions of [N, C, c1, w1, c2, w2] in the order of the rows: images, windows, elements."""
    count = range(2, 2 * weight.dim() - 2, 2)
    within = range(3, 2 * weight.dim() - 2, 2)
    return [0, *count, *((*within, 1) if _is_channels_last(weight) else (1, *within))]


def _rows(weight: Tensor) -> Tensor:
    """[O, elements of a window]; a view."""
    behind = _channels_behind(weight) if _is_channels_last(weight) else weight
    return behind.view(weight.shape[0], -1)


def _weight_of(rows: Tensor, weight: Tensor) -> Tensor:
    o, c, *window = weight.shape
    return _channels_second(rows.view(o, *window, c)) if _is_channels_last(weight) else rows.view(weight.shape)


def _counts(image: Tensor, weight: Tensor) -> list[int]:
    """Windows along each dimension."""
    return [size // n for size, n in zip(image.shape[2:], weight.shape[2:], strict=True)]


def _is_channels_last(tensor: Tensor) -> bool:
    layout = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return layout and not tensor.is_contiguous()


def _channels_second(tensor: Tensor) -> Tensor:
    return tensor.permute(0, tensor.dim() - 1, *range(1, tensor.dim() - 1))


def _channels_behind(tensor: Tensor) -> Tensor:
    return tensor.permute(0, *range(2, tensor.dim()), 1)
