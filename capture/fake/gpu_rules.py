"""Fake rules of operations that only GPUs have, and for which torch has none.

Torch's own code calls them where a tensor is on a GPU: GRU cells, ``SyncBatchNorm``, grid sampling and the CTC
loss. Results are those of the CUDA kernels (``aten/src/ATen/native/cuda`` and ``cudnn``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.torch_adapter import OpOverload

aten = torch.ops.aten

Tensor = torch.Tensor

# Asked even where there is no MIOpen; not in every version of torch.
_MIOPEN = [aten._use_miopen_ctc_loss] if hasattr(aten, "_use_miopen_ctc_loss") else []

_GRU_GATES = 3
_GRU_WORKSPACE = 5  # values that backward needs, per element of the hidden state


def _uses_library_for_ctc(*args: Any) -> bool:
    """Whether cuDNN or MIOpen computes a CTC loss: they ask how long the targets are. ATen's kernel computes all."""
    return False


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, hidden: Tensor, *biases: Any) -> tuple[Tensor, Tensor]:
    """The next hidden state and the workspace, contiguous."""
    rows, width = hidden.shape
    return hidden.new_empty((rows, width)), hidden.new_empty((rows, width * _GRU_WORKSPACE))


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Gradients of both gates, the hidden state and both biases."""
    rows, gates = workspace.shape[0], workspace.shape[1] // _GRU_WORKSPACE * _GRU_GATES
    of_gates = [workspace.new_empty((rows, gates)) for _ in range(2)]
    of_biases = [workspace.new_empty((gates,)) if has_bias else None for _ in range(2)]
    return *of_gates, torch.empty_like(grad, memory_format=torch.contiguous_format), *of_biases


def _batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of each channel."""
    return _of_channels(x, _accumulated(x)), _of_channels(x, _accumulated(x))


def _batch_norm_elemt(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


def _batch_norm_gather_stats(input: Tensor, mean: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation over the ranks. ``mean``: [ranks, channels]. Arguments are given by name where the
    running statistics that it writes are copied before."""
    dtype = _accumulated(mean)
    return mean.new_empty((mean.shape[1],), dtype=dtype), mean.new_empty((mean.shape[1],), dtype=dtype)


def _batch_norm_backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    """Both sums that the gradient of the input needs, and the gradients of weight and bias."""
    of_input, of_weight, of_bias = wanted
    sums = [torch.empty_like(mean) if of_input else None for _ in range(2)]
    dtype = x.dtype if weight is None else weight.dtype
    return *sums, *(_of_channels(x, dtype) if each else None for each in (of_weight, of_bias))


def _batch_norm_backward_elemt(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


def _grid_sampler(x: Tensor, grid: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], *grid.shape[1:3]))


def _grid_sampler_backward(x: Tensor, grid: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), grid.new_empty(grid.shape)


def _accumulated(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _of_channels(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[1],), dtype=dtype)


GPU_RULES: dict[OpOverload, Callable[..., Any]] = {
    aten._use_cudnn_ctc_loss.default: _uses_library_for_ctc,
    aten._use_cudnn_ctc_loss.Tensor: _uses_library_for_ctc,
    **{getattr(packet, name): _uses_library_for_ctc for packet in _MIOPEN for name in packet.overloads()},
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.batch_norm_stats.default: _batch_norm_stats,
    aten.batch_norm_elemt.default: _batch_norm_elemt,
    aten.batch_norm_gather_stats.default: _batch_norm_gather_stats,
    aten.batch_norm_gather_stats_with_counts.default: _batch_norm_gather_stats,
    aten.batch_norm_backward_reduce.default: _batch_norm_backward_reduce,
    aten.batch_norm_backward_elemt.default: _batch_norm_backward_elemt,
    aten.cudnn_grid_sampler.default: _grid_sampler,
    aten.cudnn_grid_sampler_backward.default: _grid_sampler_backward,
}
