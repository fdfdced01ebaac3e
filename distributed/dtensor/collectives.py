"""The collectives of tensor parallelism on local tensors, each with the collective that its gradient needs.

With ``n`` ranks, a tensor is *replicated* (equal on all ranks), *sharded* along a dimension (each rank holds one of
``n`` equal parts), or *partial* (the sum over the ranks is the value). A replicated tensor has a replicated gradient
unless a function here says that it is partial. The pairs are those of Megatron-LM (Shoeybi et al. 2019, Korthikanti et
al. 2022).

| function | forward | backward |
|---|---|---|
| ``sum_gradient``, ``to_local_sum_gradient`` | nothing | ``all_reduce``: partial to replicated |
| ``all_reduce`` | all-reduce: partial to replicated | ``sum_gradient``: nothing |
| ``all_gather``, ``all_gather_to_dtensor`` | all-gather: sharded to replicated | reduce-scatter: partial to sharded |
| ``reduce_scatter`` | reduce-scatter: partial to sharded | all-gather: sharded to replicated |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from weft import torch_adapter
from weft.distributed.dtensor.conversions import gradient_of, redistribute, to_local
from weft.mesh_facts import facts_of

# Overloads, not packets: choosing an overload takes torch a third of the time of a call.
_all_reduce = torch.ops._c10d_functional.all_reduce.default
_all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
_reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
_wait = torch.ops._c10d_functional.wait_tensor.default


def sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """``x`` itself, a view of it. Its gradient, partial, is summed over the ranks of the 1-D ``mesh``."""
    return _SumGradient.apply(x, mesh) if _is_recorded(x) else x


def to_local_sum_gradient(x: DTensor, mesh: DeviceMesh) -> Tensor:
    """The replicated ``x`` as a plain tensor. Its gradient, partial, is summed over the ranks of the 1-D ``mesh``."""
    return _ToLocalSumGradient.apply(x, mesh) if _is_recorded(x) else to_local(x)


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of ``x`` over the ranks, in the dtype of ``x``."""
    return _AllReduce.apply(x, mesh) if _is_recorded(x) else _summed(x, mesh)


def all_gather(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """The parts of all ranks side by side along ``dim``, in rank order: ``x.shape[dim]`` grows by the mesh's size."""
    dim %= x.dim()
    return _AllGather.apply(x, dim, mesh) if _is_recorded(x) else _gathered(x, dim, mesh)


def all_gather_to_dtensor(x: Tensor | DTensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """As :func:`all_gather`, as a ``Replicate()`` DTensor of ``mesh``; ``x`` may be a DTensor that is ``Shard(dim)``.
    The gradient may be partial, the sum of several readers' parts, which then takes one reduce-scatter; of a replicated
    one this rank keeps its part."""
    return _AllGatherToDTensor.apply(x, dim % x.dim(), mesh)  # type: ignore[no-any-return]


def reduce_scatter(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part along ``dim`` of the sum over the ranks. The size of ``dim`` is a multiple of the mesh's."""
    dim %= x.dim()
    return _ReduceScatter.apply(x, dim, mesh) if _is_recorded(x) else _scattered(x, dim, mesh)


def _is_recorded(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


# ---- without gradients: past autograd, whose part of torch's collectives is Python code


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    with torch_adapter.below_autograd():
        return _wait(_all_reduce(x.contiguous(), "sum", facts_of(mesh).group))


def _gathered(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    facts = facts_of(mesh)
    with torch_adapter.below_autograd():
        rows = _wait(_all_gather(x.contiguous(), facts.size, facts.group))
        if _is_outermost(dim, x):
            return rows.view(*x.shape[:dim], x.shape[dim] * facts.size, *x.shape[dim + 1 :]) if dim else rows
        return torch.cat(rows.chunk(facts.size), dim)


def _scattered(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    facts = facts_of(mesh)
    with torch_adapter.below_autograd():
        if _is_outermost(dim, x):
            part = (*x.shape[1:dim], x.shape[dim] // facts.size, *x.shape[dim + 1 :])
            rows = x.contiguous().view(facts.size, *part) if dim else x.contiguous()
        else:
            rows = torch.cat(x.chunk(facts.size, dim))
        return _wait(_reduce_scatter(rows, "sum", facts.size, facts.group))


def _is_outermost(dim: int, x: Tensor) -> bool:
    """Whether all dimensions before ``dim`` have size 1, as with a batch of one sequence. Equal parts along ``dim`` are
    then contiguous, and gathers and scatters along it need no copy."""
    return all(type(size) is int and size == 1 for size in x.shape[:dim])


# ---- with gradients. Each backward calls a function of the table above, so that gradients of gradients are right


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(gradient, ctx.mesh), None


class _ToLocalSumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, mesh: DeviceMesh) -> Tensor:
        local = torch_adapter.local_tensor(x)
        ctx.mesh, ctx.spec, ctx.stride = mesh, torch_adapter.dtensor_spec(x), local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:  # type: ignore[override]
        return gradient_of(all_reduce(gradient, ctx.mesh), ctx.spec, ctx.stride, ctx.spec.placements), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _summed(x, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return sum_gradient(gradient, ctx.mesh), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _gathered(x, dim, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return reduce_scatter(gradient, ctx.dim, ctx.mesh), None, None


class _AllGatherToDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor | DTensor, dim: int, mesh: DeviceMesh) -> DTensor:
        ctx.dim, ctx.mesh, ctx.spec = dim, mesh, None
        if isinstance(x, DTensor):
            ctx.spec, x = torch_adapter.dtensor_spec(x), torch_adapter.local_tensor(x)
            ctx.stride = x.stride()
        whole = _gathered(x, dim, mesh)
        return torch_adapter.dtensor_with(whole, facts_of(mesh).spec_of(whole, (Replicate(),)))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if gradient.placements == (Partial(),):
            part = reduce_scatter(to_local(gradient), ctx.dim, ctx.mesh)
        else:
            part = to_local(redistribute(gradient, (Shard(ctx.dim),)))
        return part if ctx.spec is None else gradient_of(part, ctx.spec, ctx.stride, ctx.spec.placements), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        ctx.dim, ctx.mesh = dim, mesh
        return _scattered(x, dim, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(gradient, ctx.dim, ctx.mesh), None, None
