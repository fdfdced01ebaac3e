"""Tensor subclasses with FSDP2's all-gather extension, as libraries write them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

_KEPT = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("detach", "clone", "slice", "split", "view", "as_strided", "_to_copy", "new_zeros", "empty_like"),
        *("zeros_like", "copy_", "add_", "mul_", "addcmul_", "addcdiv_", "lerp_", "t", "alias"),
    )
)


class Wrapped(torch.Tensor):
    """A tensor around another one. Operations work on the inner tensor; those that keep a parameter a parameter
    (`_KEPT`) give such a tensor again."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.elem = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["elem"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["elem"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.elem})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def inner(tree: Any) -> Any:
            return pytree.tree_map_only(Wrapped, lambda tensor: tensor.elem, tree)

        out = func(*inner(args), **inner(kwargs or {}))
        if func.overloadpacket not in _KEPT:
            return out
        if func._schema.is_mutable:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, out)


def _rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


class HalfWire(Wrapped):
    """Travels in bfloat16; forward sees the compute dtype. The newer signature."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert mesh.ndim == 1
        assert isinstance(module, torch.nn.Module)
        return (_rows(self.elem, -(-outer_size[0] // mesh.size())).to(torch.bfloat16),), outer_stride

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (tensor,) = outputs
        assert metadata == (tensor.shape[1], 1)
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(tensor[: out.shape[0]])
            return None
        whole = tensor.to(param_dtype)
        return whole, (tensor, whole)


class RawWire(Wrapped):
    """Travels and arrives in bfloat16, whatever the compute dtype: so do its gradients."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.elem.to(torch.bfloat16),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


class Float8Wire(Wrapped):
    """Travels as float8 values, one float32 scale a row and one for all rows of the rank. The older signature."""

    strided = False

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scales = self.elem.abs().amax(1).clamp(min=1e-12) / 448.0
        total = self.elem.abs().amax()
        values = (self.elem / scales[:, None]).to(torch.float8_e4m3fn)
        values = values.t().contiguous().t() if self.strided else values
        return (values, scales, total), (values.shape[1],)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        values, scales, totals = outputs
        assert metadata == (values.shape[1],)
        whole = Scaled(values, scales, totals.amax(), param_dtype)
        if out is None:
            return whole, (values, scales)
        out.coded, out.scales, out.total = whole.coded, whole.scales, whole.total
        return None


class StridedFloat8Wire(Float8Wire):
    """The same with a tensor that is not contiguous, which PyTorch's FSDP2 fails to gather."""

    strided = True


class Scaled(torch.Tensor):
    """A float8 matrix with a scale for each row and one for all: what forward sees of `Float8Wire`."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scales: torch.Tensor, total: torch.Tensor, dtype: torch.dtype) -> Any:
        kept = values.stride(), values.storage_offset()
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, *kept, dtype=dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, total: torch.Tensor, dtype: torch.dtype) -> None:
        self.coded, self.scales, self.total = values, scales, total

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["coded", "scales", "total"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["coded"], inner["scales"], inner["total"], dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Scaled({self.coded}, {self.scales})"

    def whole(self) -> torch.Tensor:
        """The values that it stands for."""
        return self.coded.to(self.dtype) * self.scales[:, None].to(self.dtype) + 0 * self.total.to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.as_strided, torch.ops.aten.alias):
            self = args[0]
            return cls(func(self.coded, *args[1:]), self.scales, self.total, self.dtype)
        args, kwargs = pytree.tree_map_only(Scaled, Scaled.whole, (args, kwargs))
        return func(*args, **kwargs)


class _Product(torch.autograd.Function):
    """``x @ weight.t()`` that saves the weight itself, as float8 products do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ _plain(weight).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ _plain(weight), grads[0].t() @ x


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.whole() if isinstance(weight, Scaled) else weight


class ProductLinear(torch.nn.Module):
    """A linear layer without a bias by `_Product`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight)


def two_before(self: Any, mesh: Any) -> Any:
    """`fsdp_pre_all_gather` of torch's TwoTensor."""
    return (self.a, self.b), None


def two_after(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    """`fsdp_post_all_gather` of torch's TwoTensor."""
    a, b = outputs
    if out is None:
        return type(self)(a, b).to(param_dtype), outputs
    if a.dtype != param_dtype:
        out.a.copy_(a)
        out.b.copy_(b)
    return None
