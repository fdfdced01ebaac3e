"""From DTensors to local tensors, back, and from layout to layout: with gradients, at little cost for the host.

``DTensor.to_local`` and ``DTensor.from_local`` work out the layout of each gradient again and go through DTensor's
dispatch for it, which takes the host some 100 microseconds a tensor. The functions here keep the layout that forward
has. Their gradients can be differentiated: those of torch 2.11's ``to_local`` and ``redistribute`` are constants to
autograd, without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from weft import torch_adapter
from weft.mesh_facts import facts_of


def to_local(x: DTensor, gradient: Placement | None = None) -> Tensor:
    """This rank's part of ``x``, as ``x.to_local()`` gives it; ``x`` is on a 1-D mesh.

    Args:
        gradient: how the gradients of the ranks are laid out. As ``x`` by default, replicated where ``x`` is partial.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return torch_adapter.local_tensor(x)
    return _ToLocal.apply(x, None if gradient is None else (gradient,))  # type: ignore[no-any-return]


def to_dtensor(x: Tensor, mesh: DeviceMesh, placement: Placement, size: int | None = None) -> DTensor:
    """``DTensor.from_local(x, mesh, [placement], run_check=False)``.

    Args:
        size: of the whole tensor along the dimension that is sharded. Without it, the parts of all ranks are alike.
    """
    shape = None
    if isinstance(placement, Shard):
        placement = Shard(placement.dim % x.dim()) if placement.dim < 0 else placement
        if size is not None and size % facts_of(mesh).size:
            shape = torch.Size([*x.shape[: placement.dim], size, *x.shape[placement.dim + 1 :]])
    if shape is None:
        spec = facts_of(mesh).spec_of(x, (placement,))
    else:
        spec = torch_adapter.dtensor_spec_of(x, mesh, (placement,), shape)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return torch_adapter.dtensor_with(x.detach(), spec)  # type: ignore[no-any-return]
    return _ToDTensor.apply(x, spec)  # type: ignore[no-any-return]


def redistribute(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """``x.redistribute(placements=placements)``; ``x`` itself where it is laid out so. The gradient of a redistribution
    that does nothing would still be brought to the layout of ``x``, a partial one by an all-reduce."""
    if x.placements == placements:
        return x
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x.redistribute(placements=placements)
    return _Redistribute.apply(x, placements)  # type: ignore[no-any-return]


def _of_gradient(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """How the gradient of a DTensor with these placements is laid out: a partial one has a replicated gradient."""
    return tuple(Replicate() if each.is_partial() else each for each in placements)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor with these strides holds each element once, without gaps."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


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
        placements = ctx.grad_placements or _of_gradient(ctx.spec.placements)
        return gradient_of(gradient, ctx.spec, ctx.stride, placements), None


def gradient_of(part: Tensor, spec: Any, stride: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    """The gradient of a DTensor, in a backward, from this rank's part of it.

    Args:
        spec: the ``dtensor_spec`` of the DTensor.
        stride: of this rank's part of the DTensor.
        placements: of the gradient.
    """
    spec = facts_of(spec.mesh).spec_like(spec, placements)
    # The strides of the whole gradient decide whether torch issues collectives for it, so they are those of forward on
    # every rank. Torch takes them from this rank's part, and those of an empty part mean nothing.
    if part.stride() != stride:
        if _is_dense(part.shape, stride):
            part = part.new_empty_strided(part.shape, stride).copy_(part)
        else:
            part = part.contiguous()
            spec = torch_adapter.dtensor_spec_of(part, spec.mesh, placements, spec.shape)
    # Under `create_graph` the gradient is differentiated: the conversion has to be an operation of autograd's.
    if torch.is_grad_enabled() and part.requires_grad:
        return _ToDTensor.apply(part, spec)  # type: ignore[no-any-return]
    return torch_adapter.dtensor_with(part, spec)  # type: ignore[no-any-return]


class _ToDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Any) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.placements = _of_gradient(spec.placements)
        return torch_adapter.dtensor_with(x.detach(), spec)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return None if gradient is None else to_local(redistribute(gradient, ctx.placements)), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.placements = _of_gradient(x.placements)
        return x.detach().redistribute(placements=placements)  # type: ignore[attr-defined,no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[DTensor | None, None]:  # type: ignore[override]
        return None if gradient is None else redistribute(gradient, ctx.placements), None
