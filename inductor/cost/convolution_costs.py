"""Seconds of cuDNN's convolutions that use no tensor cores, or use them badly: depthwise ones, and those of images.

All constants are measured on an H200 with torch 2.11 (cuDNN 9), bfloat16, channels innermost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from weft.inductor.cost.gemm_shapes import ShapeOf, each_dimension

# Parts of the float32 rate without tensor cores that depthwise convolutions reach, in steps of ConvNeXt, EfficientNet
# and MobileNetV3: 8.4 to 13.5 of 50 TFLOP/s forward, 4.1 to 7.2 for the gradient of the input.
_DEPTHWISE = 0.225
_DEPTHWISE_INPUT = 0.12
# The same for the gradient of the weights, by the side of the window: 4.6 to 8.7 TFLOP/s with 3, 9 to 14 with 5, 10 to
# 18 with 7. With 5, a stride and at most 8 pixels a side cuDNN has another kernel: 0.27.
_DEPTHWISE_WEIGHT = 0.045
_DIRECT_WEIGHT, _DIRECT_WINDOW, _DIRECT_PIXELS = 0.0053, 5, 8

# Channels that tensor cores read at once. Images have three, and are copied into memory of eight.
_FEWEST_CHANNELS = 8
_PADDING_REACH = 0.22  # part of the bandwidth of a copy that clearing and filling this memory reaches
# Seconds for each pixel of each window of one sample, forward and for the gradient of the weights: 890 and 570 us for
# 128 images of 224 pixels, windows of 7 and stride 2; 240 and 260 with windows of 3.
_FEW_CHANNELS, _FEW_CHANNELS_WEIGHT = 9.9e-12, 6e-12


def is_depthwise(arguments: Mapping[str, Any]) -> bool:
    """Whether a convolution, or its backward, is of every channel by itself."""
    return arguments["weight"].shape[1] == 1 and arguments["groups"] > 1


def has_few_channels(arguments: Mapping[str, Any]) -> bool:
    """Whether the input of a convolution, or of its backward, has fewer channels than tensor cores read at once."""
    weight = arguments["weight"]
    plain = arguments["groups"] == 1 and not arguments["transposed"]
    return plain and weight.shape[1] < _FEWEST_CHANNELS and weight.dtype.itemsize == 2


def depthwise_seconds(arguments: Mapping[str, Any], shape_of: ShapeOf, result: torch.Tensor, rate: float) -> float:
    """Seconds of a depthwise convolution or its backward, without launches.

    Args:
        result: of the convolution, or its gradient.
        rate: float32 operations per second without tensor cores.
    """
    window, stride = shape_of(arguments["weight"])[2:], _stride(arguments)
    operations = 2 * math.prod(shape_of(result)) * math.prod(window)
    # A stride leaves pixels out, but their rows are loaded.
    strided = operations * math.sqrt(stride) / rate
    if "output_mask" not in arguments:
        return strided / _DEPTHWISE
    of_input, of_weight, _ = arguments["output_mask"]
    # The gradient of the input visits the pixels that a stride leaves out too, as zeros.
    seconds = operations * stride / (rate * _DEPTHWISE_INPUT) if of_input else 0.0
    direct = stride > 1 and min(window) >= _DIRECT_WINDOW and max(shape_of(result)[2:]) <= _DIRECT_PIXELS
    if of_weight:
        seconds += operations / (rate * _DIRECT_WEIGHT) if direct else strided / (_DEPTHWISE_WEIGHT * max(window))
    return seconds


def few_channels_seconds(
    arguments: Mapping[str, Any], shape_of: ShapeOf, result: torch.Tensor, bandwidth: float
) -> float:
    """Seconds of a convolution of images, or of the gradient of its weights, without launches."""
    samples, _, *pixels = shape_of(arguments["input"])
    padded = samples * math.prod(pixels) * _FEWEST_CHANNELS * arguments["weight"].dtype.itemsize
    windows = samples * math.prod(shape_of(result)[2:]) * math.prod(shape_of(arguments["weight"])[2:])
    each = _FEW_CHANNELS_WEIGHT if "output_mask" in arguments else _FEW_CHANNELS
    return padded / (bandwidth * _PADDING_REACH) + windows * each


def _stride(arguments: Mapping[str, Any]) -> int:
    """The pixels of the input for each of the result."""
    return math.prod(each_dimension(arguments["stride"], arguments["weight"].dim() - 2))
