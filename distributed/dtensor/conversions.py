"""From DTensors to local tensors and back, with gradients, at little cost for the host.

``DTensor.to_local`` and ``DTensor.from_local`` work out the layout of each gradient again and go through DTensor's
dispatch for it, which takes the host some 100 microseconds a tensor. The functions here keep the layout that forward
has. Where torch's rules need more than that (a gradient of other strides, of another layout, or one that is
differentiated itself), torch's functions are called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from weft import torch_adapter


def to_local(x: DTensor, gradient: Placement | None = None) -> Tensor:
    """This rank's part of ``x``, as ``x.to_local()`` gives it; ``x`` is on a 1-D mesh.

    Args:
        gradient: how the gradients of the ranks are laid out. As ``x`` by default, replicated where ``x`` is partial.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return torch_adapter.local_tensor(x)
    return _ToLocal.apply(x, None if gradient is None else (gradient,))  # type: ignore[no-any-return]


def to_dtensor(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """``DTensor.from_local(x, mesh, [placement], run_check=False)``: the parts of all ranks are alike in size."""
    if not (torch.is_grad_enabled() and x.requires_grad) or placement.is_partial():
        return DTensor.from_local(x, mesh, [placement], run_check=False)
    return _ToDTensor.apply(x, mesh, placement)  # type: ignore[no-any-return]


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_placements: tuple[Placement, ...] | None) -> Tensor:
        ctx.set_materialize_grads(False)
        local = torch_adapter.local_tensor(x)
        ctx.spec, ctx.stride, ctx.grad_placements = torch_adapter.dtensor_spec(x), local.stride(), grad_placements
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, None]:  # type: ignore[override]
        if gradient is None:
            return None, None
        spec = ctx.spec
        placements = ctx.grad_placements or tuple(
            Replicate() if each.is_partial() else each for each in spec.placements
        )
        # Under `create_graph` the gradient is differentiated: the conversion has to be an operation of autograd's.
        if torch.is_grad_enabled() or gradient.stride() != ctx.stride:
            stride = torch_adapter.dtensor_spec_of(gradient, spec.mesh, spec.placements).stride
            local = gradient, spec.mesh, placements
            return DTensor.from_local(*local, run_check=False, shape=spec.shape, stride=stride), None
        if placements != spec.placements:
            spec = type(spec)(spec.mesh, placements, tensor_meta=spec.tensor_meta)
        return torch_adapter.dtensor_with(gradient, spec), None


class _ToDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.placements = (placement,)
        return torch_adapter.dtensor_with(x.detach(), torch_adapter.dtensor_spec_of(x, mesh, (placement,)))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        if gradient is None:
            return None, None, None
        if gradient.placements != ctx.placements:
            gradient = gradient.redistribute(placements=ctx.placements)
        part = gradient.to_local() if torch.is_grad_enabled() else torch_adapter.local_tensor(gradient)
        return part, None, None
