"""Torch's Python bindings that programs call in place of ATen operations.

A binding such as ``torch.mm`` parses its Python arguments directly. A call of ``torch.ops.aten.mm.default`` boxes them
by its schema first, which costs 0.3 to 1 us more per call, as much as the dispatch itself. The kernels and the results
are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from weft import torch_adapter
from weft.torch_adapter import OpOverload

aten = torch.ops.aten
Tensor = torch.Tensor

# Only bindings that take the operation's positional arguments unchanged and dispatch to exactly this operation. Another
# overload could change the bits.
BINDINGS: dict[OpOverload, Callable[..., Any]] = {
    # GEMMs and convolutions
    aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.bmm.default: torch.bmm,
    aten.convolution.default: torch.convolution,
    aten.mm.default: torch.mm,
    # views and copies
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.copy_.default: Tensor.copy_,
    aten.detach.default: Tensor.detach,
    aten.expand.default: Tensor.expand,
    aten.permute.default: torch.permute,
    aten.select.int: torch.select,
    aten.squeeze.dim: torch.squeeze,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
    # element by element
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: Tensor.add_,
    aten.div.Tensor: torch.div,
    aten.div_.Tensor: Tensor.div_,
    aten.exp.default: torch.exp,
    aten.gelu.default: F.gelu,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: Tensor.mul_,
    aten.neg.default: torch.neg,
    aten.relu.default: torch.relu,
    aten.relu_.default: torch.relu_,
    aten.rsqrt.default: torch.rsqrt,
    aten.sigmoid.default: torch.sigmoid,
    aten.sub.Tensor: torch.sub,
    aten.tanh.default: torch.tanh,
    aten.where.self: torch.where,
    # reductions and norms
    aten.mean.dim: torch.mean,
    aten.native_batch_norm.default: torch.native_batch_norm,
    aten.native_group_norm.default: torch.native_group_norm,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.sum.dim_IntList: torch.sum,
}


def callable_of(op: OpOverload) -> Callable[..., Any]:
    """The cheapest function that calls ``op`` with its arguments: a binding of torch, else the operation's kernel."""
    return BINDINGS.get(op) or torch_adapter.kernel(op)
